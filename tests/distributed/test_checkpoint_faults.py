"""Checkpoints on full disks, in directories that ranks do not share, over old runs, and from untrusted sources."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import pickle
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_sp.checkpoint import files
from megatron_sp.checkpoint.save_directory import reserve_save_directory
from megatron_sp.errors import CheckpointError
from tests.helpers.configs import STYLES, tiny_run
from tests.helpers.spawn import run_ranks
from tests.helpers.training import copy_checkpoint, train

LLAMA = f"{STYLES['llama']} --save-interval 2"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run of two steps, with a checkpoint after step 2."""
    directory = tmp_path_factory.mktemp("source")
    assert run_ranks(train, 1, f"{LLAMA} --save {directory} --exit-interval 2") == [""]
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# ---------------------------------------------------------------- full disks

def save_in_little_room(source: str, target: str, limited: list[int]) -> str:
    """Load and save on every rank; on the ranks named, files cannot grow beyond 4 KB."""
    if dist.get_rank() in limited:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    try:
        copy_checkpoint(STYLES["llama"], source, target)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("world, limited", [(1, [0]), (2, [1]), (2, [0, 1])])
def test_a_failed_save_names_file_and_cause_and_leaves_nothing(
        source: Path, tmp_path: Path, world: int, limited: list[int]) -> None:
    target = tmp_path / "save"
    shutil.copytree(source, target)
    before = contents(target)
    messages = run_ranks(save_in_little_room, world, str(source), str(target), limited)
    assert len(set(messages)) == 1
    file = target / "iter_0000002.building" / f"__{limited[0]}_0.distcp"
    assert messages[0] == f"rank {limited[0]} cannot write {file}: File too large"
    assert contents(target) == before and not list(target.glob("*.building"))


def save_on_full_disks(source: str, targets: str) -> list[str]:
    """Save once for each ``fsync`` of a save, which reports a full disk; what each save says, until one succeeds."""
    messages = [""]
    fsync = os.fsync
    while not messages[1:] or messages[-1]:
        left = len(messages)

        def fail_once(descriptor: int) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fsync(descriptor)

        target = f"{targets}/{left}"
        shutil.copytree(source, target)
        os.fsync = fail_once  # type: ignore[assignment]
        try:
            copy_checkpoint(STYLES["llama"], source, target)
            messages.append("")
        except CheckpointError as error:
            messages.append(str(error))
        finally:
            os.fsync = fsync
    return messages[1:-1]


def test_a_full_disk_at_any_file_of_a_save_keeps_a_complete_checkpoint(source: Path, tmp_path: Path) -> None:
    messages = run_ranks(save_on_full_disks, 1, str(source), str(tmp_path))[0]
    assert all("No space left on device" in message and "free space there" in message for message in messages)
    for name in ("__0_0.distcp", ".metadata", "state.json", "manifest.json", files.TRACKER):
        assert any(f"/{name}: No space" in message for message in messages), (name, messages)
    for number in range(1, len(messages) + 1):
        found = files.find_checkpoint(tmp_path / str(number))
        assert found and found.iteration == 2
        assert not any(files.describe_damage(found.path / name, entry)
                       for name, entry in files.read_manifest(found.path).items())
        assert not list((tmp_path / str(number)).glob("**/*.building"))


# ---------------------------------------------------------------- directories that are not shared

def private_directory(path: str) -> None:
    """Put an empty file system over a directory, for this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_namespace, private, recursive = 0x00020000, 1 << 18, 1 << 14
    if libc.unshare(new_namespace) or libc.mount(b"none", b"/", None, private | recursive, None):
        raise OSError(ctypes.get_errno(), "no mount namespaces here")
    if libc.mount(b"tmpfs", path.encode(), b"tmpfs", 0, None):
        raise OSError(ctypes.get_errno(), "no mounts here")


def use_private_directory(source: str, target: str) -> tuple[str, str]:
    """What this rank is told at start and in a save when rank 1 sees another directory than rank 0."""
    if dist.get_rank() == 1:
        private_directory(target)
    run = tiny_run(STYLES["llama"].split(), dist.get_world_size())
    run = replace(run, checkpoint=replace(run.checkpoint, save=target))
    messages = []
    try:
        with reserve_save_directory(run, patience=0.3):
            messages.append("")
    except CheckpointError as error:
        messages.append(str(error))
    try:
        copy_checkpoint(STYLES["llama"], source, target)
        messages.append("")
    except CheckpointError as error:
        messages.append(str(error))
    if dist.get_rank() == 1:
        messages[1] += f" and {len(os.listdir(target))} files are left"
    return messages[0], messages[1]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_directory_that_ranks_do_not_share_is_refused(source: Path, tmp_path: Path) -> None:
    try:
        (start, save), (start_1, save_1) = run_ranks(use_private_directory, 2, str(source), str(tmp_path))
    except AssertionError as error:
        if "mounts here" in str(error) or "namespaces here" in str(error):
            pytest.skip("mounts are not allowed here")
        raise
    assert start == start_1 and "not the same directory on all ranks: rank 1 of 2 cannot see" in start
    assert "rank 1 wrote" in save and "rank 0 does not find it there" in save
    assert save_1 == f"{save} and 0 files are left"
    assert contents(tmp_path) == {}


# ---------------------------------------------------------------- old runs

def test_a_run_must_continue_what_its_directory_holds(source: Path, tmp_path: Path) -> None:
    directory = tmp_path / "save"
    shutil.copytree(source, directory)
    before = contents(directory)
    other = f"{LLAMA} --load {source} --save {directory}"
    changed = LLAMA.replace("--num-layers 2", "--num-layers 3")
    for flags, words in [(f"{LLAMA} --save {directory}", "holds checkpoints of an earlier run (iterations 2)"),
                         (other, f"Give --load {directory} to continue that run"),
                         (f"{changed} --load {directory} --save {directory}", "--num-layers is 3 here")]:
        messages = run_ranks(train, 2, flags)
        assert words in messages[0] and messages[0] == messages[1]
        assert contents(directory) == before, flags
    theirs = directory / "iter_0000004" / "mp_rank_00"
    theirs.mkdir(parents=True)
    resume = f"{LLAMA} --load {directory} --save {directory} --train-iters 3 --override-opt_param-scheduler"
    assert "holds iter_0000004 without manifest.json" in run_ranks(train, 1, resume)[0]
    theirs.rename(directory / "mp_rank_00")
    theirs.parent.rename(directory / "iter_0000001")      # before the iteration that is resumed: never in the way
    assert run_ranks(train, 1, resume) == [""]
    assert (directory / "mp_rank_00").is_dir() and files.complete_iterations(directory) == [2, 3]
    assert not (directory / "run.lock").exists()


# ---------------------------------------------------------------- untrusted files

class Payload:
    """An object whose pickle creates a file when it is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


def rewrite(checkpoint: Path, name: str, data: bytes) -> None:
    """Change a file and the manifest with it, as a forger would."""
    (checkpoint / name).write_bytes(data)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][name] = files.manifest_entry(checkpoint / name)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def test_a_checkpoint_runs_no_code(source: Path, tmp_path: Path) -> None:
    checkpoint, trap = tmp_path / "save" / "iter_0000002", tmp_path / "trap"
    metadata = pickle.loads((source / "iter_0000002" / ".metadata").read_bytes())
    hidden = replace(metadata, planner_data=Payload(trap))
    outside = replace(metadata, storage_data={index: replace(place, relative_path="../../elsewhere")
                                              for index, place in metadata.storage_data.items()})
    for forged, words in [(Payload(trap), "it names io.open"), (hidden, "it names io.open"),
                          ([1], "does not describe tensors"), (outside, "the file '../../elsewhere'")]:
        shutil.rmtree(tmp_path / "save", ignore_errors=True)
        shutil.copytree(source, tmp_path / "save")
        rewrite(checkpoint, ".metadata", pickle.dumps(forged))
        messages = run_ranks(train, 2, f"{LLAMA} --load {tmp_path / 'save'}")
        assert messages[0] == messages[1] and f"cannot read {checkpoint / '.metadata'}" in messages[0]
        assert words in messages[0], messages[0]
        assert not trap.exists()
