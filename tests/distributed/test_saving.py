"""Saving in the background, old checkpoints that are deleted, and saves that fail while training goes on."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_sp.checkpoint import files
from megatron_sp.checkpoint.inspection import damages_of
from megatron_sp.checkpoint.saving.plan import Planner, Staging
from megatron_sp.checkpoint.saving.tensor_file import TensorWriter
from megatron_sp.checkpoint.state import create_optimizer_state, model_pieces, optimizer_pieces
from megatron_sp.model.build import build_model
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.plan.memory import predict
from megatron_sp.train.optimizer import build_optimizer
from tests.helpers.configs import STYLES, tiny_run
from tests.helpers.spawn import run_ranks
from tests.helpers.training import full_tensors, steps, train, train_and_tell

FLAGS = f"{STYLES['llama']} --hidden-dropout 0.1 --lr 1e-2 --lr-decay-style constant --save-interval 2 --train-iters 7"


def train_with_slow_disk(flags: str, seconds: float, stopped_rank: int = -1) -> tuple[str, str]:
    """Train on this rank; every file of tensors takes some seconds to write.

    Args:
        stopped_rank: a rank that receives SIGTERM while it writes the first file.
    """
    write = TensorWriter.write

    def slowly(self: TensorWriter, *args: Any) -> Any:
        if dist.get_rank() == stopped_rank:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(seconds)
        return write(self, *args)

    TensorWriter.write = slowly  # type: ignore[method-assign,assignment]
    try:
        return train_and_tell(flags, (signal.SIGTERM,))
    finally:
        TensorWriter.write = write  # type: ignore[method-assign]


def train_on_full_disk(flags: str, iterations: tuple[int, ...]) -> tuple[str, str]:
    """Train on this rank; on the last rank the disk is full in the saves of these iterations."""
    write, asked = TensorWriter.write, os.fsync

    def fail(self: TensorWriter, *args: Any) -> Any:
        full = dist.get_rank() == dist.get_world_size() - 1 and int(self.directory.name[5:12]) in iterations

        def refuse(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        os.fsync = refuse if full else asked  # type: ignore[assignment]
        try:
            return write(self, *args)
        finally:
            os.fsync = asked

    TensorWriter.write = fail  # type: ignore[method-assign,assignment]
    try:
        return train_and_tell(flags)
    finally:
        TensorWriter.write = write  # type: ignore[method-assign]


def staged_bytes(layouts: list[str]) -> list[int]:
    """Return for each layout how many bytes this rank copies for a save in the background."""
    sizes = []
    for layout in layouts:
        run = tiny_run([*STYLES["llama"].split(), *layout.split()], dist.get_world_size())
        mesh = ParallelMesh.build(run.parallel)
        model = build_model(run, mesh)
        optimizer = build_optimizer(run, model)
        create_optimizer_state(model, optimizer)
        pieces = model_pieces(model, run.model) | optimizer_pieces(model, optimizer, run.model)
        copies = Staging().copy(pieces, Planner().plan(pieces))
        sizes.append(sum(piece.data.nbytes for piece in copies.values()))
        mesh.destroy()
    return sizes


def test_the_plan_knows_what_a_background_save_copies() -> None:
    layouts = ["--tensor-model-parallel-size 2", "--zero-stage 0"]
    for layout, found in zip(layouts, zip(*run_ranks(staged_bytes, 2, layouts))):
        run = tiny_run([*STYLES["llama"].split(), *layout.split(), "--async-save", "--save", "s",
                        "--save-interval", "1"], 2)
        # The plan counts the padding of the vocabulary, which is not saved, and norms on every tp rank.
        assert max(found) <= predict(run).host <= 1.06 * max(found), layout


@pytest.mark.parametrize("world, layout", [
    (2, "--tensor-model-parallel-size 2"), pytest.param(1, "", marks=pytest.mark.slow),
    pytest.param(3, "--zero-stage 3 --global-batch-size 3", marks=pytest.mark.slow)])
def test_a_background_save_holds_the_state_of_its_step(tmp_path: Path, world: int, layout: str) -> None:
    """The steps after it change the weights while the files are still written."""
    plain, behind = tmp_path / "plain", tmp_path / "behind"
    assert run_ranks(train, world, f"{FLAGS} {layout} --save {plain}") == [""] * world
    told = run_ranks(train_with_slow_disk, world, f"{FLAGS} {layout} --save {behind} --async-save", 0.2)
    assert [error for _, error in told] == [""] * world
    for iteration in (2, 4, 6, 7):
        expected, found = (full_tensors(place / f"iter_{iteration:07d}") for place in (plain, behind))
        assert found.keys() == expected.keys()
        assert [name for name in found if not torch.equal(found[name], expected[name])] == [], iteration
    assert steps(plain, "lm_loss", "grad_norm") == steps(behind, "lm_loss", "grad_norm")
    lines = [line for line in told[0][0].splitlines() if "saved" in line or "iteration " in line]
    assert sum("of which training waited" in line for line in lines) == 4
    first = next(index for index, line in enumerate(lines) if "saved" in line)
    assert any("iteration        3/" in line for line in lines[:first]), lines    # step 3 came before the save's end


def test_a_signal_during_a_background_save_ends_with_a_complete_checkpoint(tmp_path: Path) -> None:
    """Rank 1 alone gets the signal. All ranks finish the save under way, save the step they reached, and end well."""
    flags = f"{FLAGS} --zero-stage 3 --save {tmp_path} --async-save".replace("--train-iters 7", "--train-iters 40")
    told = run_ranks(train_with_slow_disk, 2, flags, 0.2, 1)
    assert [error for _, error in told] == ["", ""]
    reached = int(told[0][0].split("exiting at iteration ")[1].split(":")[0])
    assert 2 <= reached < 40 and "signal to another rank" in told[0][0]
    assert files.complete_iterations(tmp_path) == sorted({2, reached})
    assert files.read_tracker(tmp_path) == reached and not list(tmp_path.glob("iter_*.*"))
    assert all(damages_of(path) == [] for path in files.complete_checkpoints(tmp_path).values())


def test_each_step_is_saved_once(tmp_path: Path) -> None:
    """Also with accumulation, after a resume at each end, and beside files that are not this program's."""
    flags = f"{FLAGS} --save {tmp_path} --load {tmp_path} --save-interval 1 --train-iters 3"     # 4 microbatches
    for name in ("events.out.tfevents.1", "iter_0000009x", "notes"):
        (tmp_path / name).touch()
    lines = []
    for further in ("--exit-interval 1", "--exit-interval 2", "", ""):
        (text, error), = run_ranks(train_and_tell, 1, f"{flags} {further}")
        assert error == ""
        lines.append([line.split("saved ")[1].split(" in ")[0] for line in text.splitlines() if "] saved " in line])
    assert lines == [[str(tmp_path / files.directory_name(i))] for i in (1, 2, 3)] + [[]]
    assert [step[0] for step in steps(tmp_path, "iteration")] == [1, 2, 3]


def test_old_checkpoints_are_deleted_and_one_always_stays(tmp_path: Path) -> None:
    keep, retain = tmp_path / "keep", tmp_path / "retain"
    flags = FLAGS.replace("--save-interval 2", "--save-interval 1")
    for directory, rule, left in ((keep, "--keep-last 2 --async-save", [6, 7]),
                                  (retain, "--save-retain-interval 3", [3, 6, 7])):
        assert run_ranks(train, 2, f"{flags} --save {directory} {rule}") == ["", ""]
        assert files.complete_iterations(directory) == left
        assert sorted(path.name for path in directory.glob("iter_*")) == [files.directory_name(i) for i in left]


def test_a_full_disk_while_training_goes_on(tmp_path: Path) -> None:
    """The last rank cannot write in the save of iteration 4. All ranks decide alike, and keep iteration 2."""
    for mode in ("", "--async-save"):
        stop, go = tmp_path / f"stop{mode}", tmp_path / f"go{mode}"
        told = run_ranks(train_on_full_disk, 2, f"{FLAGS} --save {stop} {mode}", (4,))
        assert told[0][1] == told[1][1] and "No space left on device" in told[0][1] and "rank 1 cannot" in told[0][1]
        assert files.complete_iterations(stop) == [2] and not list(stop.glob("*.building"))
        told = run_ranks(train_on_full_disk, 2, f"{FLAGS} --save {go} {mode} --on-save-failure continue", (4,))
        assert [error for _, error in told] == ["", ""]
        assert "WARNING: rank 1 cannot write" in told[0][0] and "Training goes on" in told[0][0]
        assert files.complete_iterations(go) == [2, 6, 7]
    told = run_ranks(train_on_full_disk, 2, f"{FLAGS} --save {tmp_path}/last --on-save-failure continue", (6, 7))
    assert "No space left on device" in told[0][1] and told[0][1] == told[1][1]
    assert files.complete_iterations(tmp_path / "last") == [2, 4]


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path) -> None:
    """All ranks fall back to the same one; a checkpoint that the user named has no substitute."""
    save = tmp_path / "save"
    flags = f"{FLAGS} --save {save} --load {save}"
    assert run_ranks(train, 2, f"{FLAGS} --save {save} --exit-interval 6") == ["", ""]
    expected = full_tensors(save / "iter_0000006")
    for iteration, name in ((6, "__1_0.distcp"), (4, "manifest.json")):
        path = save / files.directory_name(iteration) / name
        path.write_bytes(path.read_bytes().replace(b"e", b"f", 1))
    for named in ("--ckpt-step 6", f"--load {save}/iter_0000006"):
        for error in run_ranks(train, 2, f"{flags} {named}"):
            assert "__1_0.distcp is damaged: its checksum differs" in error and "WARNING" not in error
    assert "checksum differs" in (save / "iter_0000006" / files.DAMAGED).read_text()    # not to count later
    told = run_ranks(train_and_tell, 2, f"{flags} --exit-interval 6")
    assert [error for _, error in told] == ["", ""]
    text = told[0][0]
    assert "__1_0.distcp is damaged" in text and "THE CHECKPOINT BEFORE IS USED: iteration 2" in text
    assert "manifest.json" in text and f"resumed from {save} at iteration 2" in text
    again = full_tensors(save / "iter_0000006")
    assert [name for name in expected if not torch.equal(again[name], expected[name])] == []
    assert files.complete_iterations(save) == [2, 4, 6] and not (save / "iter_0000006" / files.DAMAGED).exists()
