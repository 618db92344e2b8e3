"""Find and verify checkpoints on disk: names, tracker, manifest. Imports no torch; ``writing.py`` is the other half.

::

    SAVE/latest_checkpointed_iteration.txt     the tracker: which iteration to load
    SAVE/config.json                           the configuration of the last run that wrote here
    SAVE/run.lock                              which run writes here now (see lock.py)
    SAVE/iter_0000008/manifest.json            name, size and checksum of every other file
    SAVE/iter_0000008/state.json, .metadata, *.distcp
    SAVE/iter_0000008/tokenizer/*              copies of the tokenizer's files
    SAVE/iter_0000008/damaged.txt              why a run refused to load it
    SAVE/iter_0000016.building/                a save that has not finished
    SAVE/iter_0000016.replaced/                the earlier checkpoint of an iteration that is saved again
    SAVE/iter_0000004.removing/                an old checkpoint that is being deleted

``iter_N`` and ``iter_N.replaced`` are complete when they hold a manifest, because a save writes the manifest last and
only then takes away the suffix ``.building``.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_sp.config.rules.other_systems import other_system_problem
from megatron_sp.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
STATE = "state.json"
CONFIG = "config.json"
DAMAGED = "damaged.txt"
BUILDING = ".building"
REPLACED = ".replaced"
REMOVING = ".removing"
TOKENIZER = "tokenizer"
FORMAT = 1

#: Names of the files that this program writes into a checkpoint's directory, also while it is ``.building``.
OWN_FILE = re.compile(rf"__\d+_\d+\.distcp|\.metadata(\.tmp)?|(state|manifest)\.json(\.building)?|{DAMAGED}|"
                      rf"{TOKENIZER}/[^/]+")

_READ_SIZE = 1 << 24


class DamagedCheckpoint(CheckpointError):
    """A checkpoint of this program whose files are not what the save wrote."""


@dataclass(frozen=True)
class FoundCheckpoint:
    """The checkpoint that a run loads.

    Attributes:
        path: its directory.
        iteration: the iteration it holds.
        notes: sentences for the log about how it was found.
    """

    path: Path
    iteration: int
    notes: list[str] = field(default_factory=list)


def directory_name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def iteration_directories(directory: Path, suffix: str = "") -> dict[int, Path]:
    """Return the directories named ``iter_N`` + suffix by their iteration N, ascending."""
    matches = ((re.fullmatch(rf"iter_(\d+){re.escape(suffix)}", path.name), path) for path in directory.glob("iter_*"))
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def complete_checkpoints(directory: Path) -> dict[int, Path]:
    """Return the complete checkpoints of a directory by iteration, ascending.

    A save that replaces an iteration first renames the old checkpoint to ``iter_N.replaced``. When the run is killed
    right after that, ``iter_N`` is missing, and ``iter_N.replaced`` is the checkpoint of iteration N.
    """
    candidates = iteration_directories(directory, REPLACED) | iteration_directories(directory)
    return {number: path for number, path in sorted(candidates.items()) if (path / MANIFEST).is_file()}


def complete_iterations(directory: Path) -> list[int]:
    """Return the iterations of the complete checkpoints in a directory, ascending."""
    return list(complete_checkpoints(directory))


def directories_without_manifest(directory: Path, *, after: int = -1) -> list[str]:
    """Return the names of ``iter_N`` directories that other programs wrote, for example Megatron-LM.

    Args:
        after: leave out this iteration and earlier ones.
    """
    return [path.name for iteration, path in iteration_directories(directory).items()
            if iteration > after and not is_ours(path)]


def is_ours(path: Path) -> bool:
    """Return whether this program wrote an ``iter_N`` directory: it has a manifest, or only the manifest is lost."""
    return (path / MANIFEST).is_file() or (
        (path / STATE).is_file() and all(OWN_FILE.fullmatch(name) for name in file_names(path)))


def read_tracker(directory: Path) -> int | None:
    """Return the iteration that the tracker names; None when there is no tracker.

    Raises:
        DamagedCheckpoint: it holds something else than a number.
        CheckpointError: it cannot be read.
    """
    path = directory / TRACKER
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise DamagedCheckpoint(f"cannot read the tracker {path}: {error}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read the tracker {path}: {error}") from None
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise DamagedCheckpoint(f"the tracker {path} holds {text[:40]!r}, not an iteration; {choices(directory)}")
    return int(text)


def find_checkpoint(directory: str | Path, iteration: int | None = None) -> FoundCheckpoint | None:
    """Find the checkpoint to load; see ``find_candidates``, of which this is the first."""
    found = find_candidates(directory, iteration)
    return found[0] if found else None


def find_candidates(directory: str | Path, iteration: int | None = None) -> list[FoundCheckpoint]:
    """Find the checkpoint to load, and the earlier ones to load instead if it is damaged.

    The checkpoint is that of ``iteration`` or of a directory ``.../iter_N``; then it has no substitutes. Otherwise it
    is the one that the tracker names. Where the tracker is missing, as after a kill during the first save, or damaged,
    or names a checkpoint that is not there, it is the newest complete one that is not newer than the tracker says.

    Args:
        directory: the ``--save`` directory of a run, or the directory of one checkpoint.

    Returns:
        the checkpoints, best first; empty when the directory holds nothing that looks like one

    Raises:
        CheckpointError: the checkpoint of ``iteration`` is missing or incomplete, or there are only directories that
            this program did not finish.
    """
    source = f"--ckpt-step {iteration}" if iteration is not None else f"--load {directory}"
    directory, iteration = split_directory(directory, iteration)
    complete = complete_checkpoints(directory)
    if not complete and (problem := other_system_problem(directory)):
        raise CheckpointError(problem.rstrip("."))
    if iteration is not None:
        if iteration not in complete:
            raise CheckpointError(f"{_incomplete(directory, iteration)}, but {source} names it; {choices(directory)}")
        return [FoundCheckpoint(complete[iteration], iteration, _newer(directory, complete, iteration))]
    notes, limit = [], max(complete, default=0)
    try:
        tracked = read_tracker(directory)
    except DamagedCheckpoint as error:
        if not complete:
            raise CheckpointError(str(error)) from None
        tracked = None
        notes.append(f"{error}. The newest complete checkpoint is used: iteration {limit}")
    else:
        if tracked is None:
            if not complete:
                _refuse_unknown(directory)
                return []
            notes.append(f"{directory} has no tracker ({TRACKER}), as after a kill during the first save; its newest "
                         f"complete checkpoint is used: iteration {limit}")
    limit = limit if tracked is None else tracked
    usable = sorted((number for number in complete if number <= limit), reverse=True)
    if not usable:
        raise CheckpointError(f"{_incomplete(directory, limit)}, but the tracker {directory / TRACKER} names it; "
                              f"{choices(directory)}")
    if usable[0] != limit:
        notes.append(f"{_incomplete(directory, limit)}, but the tracker {directory / TRACKER} names it. THE CHECKPOINT "
                     f"BEFORE IS USED: iteration {usable[0]}")
    notes += _newer(directory, complete, usable[0])
    return [FoundCheckpoint(complete[number], number, notes) for number in usable]


def split_directory(directory: str | Path, iteration: int | None = None) -> tuple[Path, int | None]:
    """Return the ``--save`` directory and the iteration that a path names: ``SAVE/iter_0000030`` is SAVE and 30.

    Args:
        iteration: value of ``--ckpt-step``. It chooses the checkpoint if the path is a ``--save`` directory.

    Raises:
        CheckpointError: path and ``iteration`` name different checkpoints.
    """
    path = Path(directory)
    match = re.fullmatch(r"iter_(\d+)", path.name or path.absolute().name)
    if not match or (path / TRACKER).exists():
        return path, iteration
    if iteration not in (None, int(match[1])):
        raise CheckpointError(f"{path} is the checkpoint of iteration {int(match[1])}, but --ckpt-step {iteration} "
                              "asks for another; give one of the two")
    return path.absolute().parent, int(match[1])


def _incomplete(directory: Path, iteration: int) -> str:
    """Return a clause on a checkpoint that is not among the complete ones."""
    path = directory / directory_name(iteration)
    return f"{path} " + (f"is not complete (no {MANIFEST})" if path.is_dir() else "does not exist")


def _newer(directory: Path, complete: dict[int, Path], iteration: int) -> list[str]:
    """Return a note on complete checkpoints of later iterations, if there are any."""
    newer = [str(number) for number in complete if number > iteration]
    return [f"{directory} also has complete checkpoints of later iterations: {', '.join(newer)}. To load one give "
            "--ckpt-step; otherwise they stay until this run saves the same iteration again"] if newer else []


def _refuse_unknown(directory: Path) -> None:
    """Raise CheckpointError when a directory holds ``iter_N`` directories, but none with a manifest.

    A run that started afresh there could replace them.
    """
    if unknown := directories_without_manifest(directory):
        raise CheckpointError(f"{directory} holds {', '.join(unknown)} without {MANIFEST}: not a complete checkpoint "
                              "of this program. Move it away to start afresh, or give another directory")


def choices(directory: Path) -> str:
    """Return a clause for error messages that names the complete checkpoints of a directory."""
    found = complete_iterations(directory)
    if not found:
        return "there is no complete checkpoint in the directory"
    return f"complete checkpoints here: {', '.join(map(str, found))}; choose one with --ckpt-step"


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        DamagedCheckpoint: the file is missing or is not JSON.
        CheckpointError: the file system does not let it be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"cannot read {path}: {error}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None


def read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    """Return the size and checksum of each file of a checkpoint, by file name.

    Raises:
        DamagedCheckpoint: the manifest is missing, damaged, or names another iteration than the directory.
        CheckpointError: it cannot be read, or has a format that this version does not know.
    """
    manifest = read_json(path / MANIFEST)
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if isinstance(files, dict) and isinstance(manifest.get("format"), int) and manifest["format"] > FORMAT:
        raise CheckpointError(f"{path / MANIFEST} has format {manifest['format']}; this version reads format {FORMAT}. "
                              "Load it with the newer version that wrote it")
    if not isinstance(files, dict) or manifest.get("format") != FORMAT or not isinstance(
            manifest.get("iteration"), int) or not all(
            isinstance(entry, dict) and {"bytes", "crc32"} <= entry.keys() for entry in files.values()):
        raise DamagedCheckpoint(f"{path / MANIFEST} is damaged: not a manifest of format {FORMAT}")
    if foreign := [name for name in files if Path(name.removeprefix(f"{TOKENIZER}/")).name != name.removeprefix(
            f"{TOKENIZER}/")]:
        raise DamagedCheckpoint(f"{path / MANIFEST} is damaged: {foreign[0]!r} is not the name of a file beside it")
    match = re.fullmatch(rf"iter_(\d+)({re.escape(REPLACED)})?", path.name)
    if match and manifest.get("iteration") != int(match[1]):
        raise DamagedCheckpoint(f"{path} holds the checkpoint of iteration {manifest.get('iteration')} under the name "
                                "of another one; give the directory its own name back, or load another checkpoint")
    return files


def checksum(path: Path) -> str:
    """Return the CRC-32 of a file's bytes, as hexadecimal text."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(_READ_SIZE):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


def manifest_entry(path: Path) -> dict[str, Any]:
    """Return the manifest's entry for a file: its size and checksum."""
    return {"bytes": path.stat().st_size, "crc32": checksum(path)}


def entry_of(size: int, crc: int) -> dict[str, Any]:
    """Return the manifest's entry for a file whose size and CRC-32 are known."""
    return {"bytes": size, "crc32": f"{crc:08x}"}


def describe_damage(path: Path, entry: dict[str, Any], *, with_checksum: bool = True) -> str:
    """Return a sentence on how a file differs from its entry in the manifest; "" when it does not.

    Args:
        with_checksum: whether to read the file and compare its checksum, besides its size.
    """
    if not path.is_file():
        return f"{path} is missing"
    size = path.stat().st_size
    if size != entry["bytes"]:
        return f"{path} has {size} bytes instead of {entry['bytes']}"
    if with_checksum and checksum(path) != entry["crc32"]:
        return f"{path} is damaged: its checksum differs from the manifest's"
    return ""


def sync_directory(path: Path) -> None:
    """Flush a directory to disk, so that new and changed file names survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_names(path: Path) -> list[str]:
    """Return the names of the files in a checkpoint directory, those of the tokenizer's copies with their folder.

    NFS renames a removed file that some process still has open to ``.nfs...`` and removes it later. It does not count.
    """
    found = [file.name for file in path.iterdir()
             if not (file.name == TOKENIZER and file.is_dir()) and not file.name.startswith(".nfs")]
    return sorted(found) + sorted(f"{TOKENIZER}/{file.name}" for file in (path / TOKENIZER).glob("*"))


def unlisted_files(path: Path, manifest: dict[str, dict[str, Any]]) -> list[str]:
    """Return the names of the files in a checkpoint that its manifest does not list. Nothing reads these files."""
    return [name for name in file_names(path) if name not in (MANIFEST, DAMAGED, *manifest)]
