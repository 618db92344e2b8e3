"""Find and verify checkpoints on disk: names, tracker, manifest. Imports no torch; ``writing.py`` is the other half.

::

    SAVE/latest_checkpointed_iteration.txt     the tracker: which iteration to load
    SAVE/config.json                           the configuration of the last run that wrote here
    SAVE/run.lock                              which run writes here now (see lock.py)
    SAVE/iter_0000008/manifest.json            name, size and checksum of every other file
    SAVE/iter_0000008/state.json, .metadata, *.distcp
    SAVE/iter_0000016.building/                a save that has not finished
    SAVE/iter_0000016.replaced/                the earlier checkpoint of an iteration that is saved again

``iter_N`` and ``iter_N.replaced`` are complete when they hold a manifest, because a save writes the manifest last and
only then takes away the suffix ``.building``.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_sp.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
STATE = "state.json"
CONFIG = "config.json"
BUILDING = ".building"
REPLACED = ".replaced"
FORMAT = 1

_READ_SIZE = 1 << 24


@dataclass(frozen=True)
class Found:
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
    """Directories named ``iter_N`` + suffix, by iteration, ascending; other names are ignored."""
    matches = ((re.fullmatch(rf"iter_(\d+){re.escape(suffix)}", path.name), path) for path in directory.glob("iter_*"))
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def complete_checkpoints(directory: Path) -> dict[int, Path]:
    """The complete checkpoints of a directory by iteration, ascending.

    A save that replaces an iteration first renames the old checkpoint to ``iter_N.replaced``. A kill right after that
    leaves only this name; then the checkpoint under it counts.
    """
    candidates = iteration_directories(directory, REPLACED) | iteration_directories(directory)
    return {number: path for number, path in sorted(candidates.items()) if (path / MANIFEST).is_file()}


def complete_iterations(directory: Path) -> list[int]:
    """Iterations of the complete checkpoints in a directory, ascending."""
    return list(complete_checkpoints(directory))


def directories_without_manifest(directory: Path, *, after: int = -1) -> list[str]:
    """Names of ``iter_N`` that no finished save of this program made, for example Megatron-LM's.

    Args:
        after: only those of later iterations.
    """
    return [path.name for iteration, path in iteration_directories(directory).items()
            if iteration > after and not (path / MANIFEST).is_file()]


def read_tracker(directory: Path) -> int | None:
    """Iteration the tracker points to; None when there is no tracker.

    Raises:
        CheckpointError: the tracker cannot be read or holds something else than a number.
    """
    path = directory / TRACKER
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read the tracker {path}: {error}") from None
    if not re.fullmatch(r"[0-9]+", text):
        raise CheckpointError(f"the tracker {path} holds {text[:40]!r}, not an iteration; {choices(directory)}")
    return int(text)


def find_checkpoint(directory: str | Path, iteration: int | None = None) -> Found | None:
    """Find the checkpoint to load: that of ``iteration``, else the tracker's, else the newest complete one.

    A kill between the first save and its tracker leaves a complete checkpoint without a tracker; it is used.

    Returns:
        the checkpoint, or None when the directory holds nothing that looks like one

    Raises:
        CheckpointError: the tracker cannot be read, the checkpoint it names is missing or incomplete, or there are
            only directories that this program did not finish.
    """
    directory = Path(directory)
    complete = complete_checkpoints(directory)
    named = iteration if iteration is not None else read_tracker(directory)
    notes = []
    if named is None:
        if not complete:
            _refuse_unknown(directory)
            return None
        named = max(complete)
        notes.append(f"{directory} has no tracker ({TRACKER}), as after a kill during the first save; its newest "
                     f"complete checkpoint is used: iteration {named}")
    if named not in complete:
        path = directory / directory_name(named)
        source = f"--ckpt-step {named}" if iteration is not None else f"the tracker {directory / TRACKER}"
        what = f"is not complete (no {MANIFEST})" if path.is_dir() else "does not exist"
        raise CheckpointError(f"{path}, named by {source}, {what}; {choices(directory)}")
    if newer := [number for number in complete if number > named]:
        listed = ", ".join(map(str, newer))
        notes.append(f"{directory} also has complete checkpoints of later iterations: {listed}. To load one give "
                     "--ckpt-step; otherwise they stay until this run saves the same iteration again")
    return Found(complete[named], named, notes)


def _refuse_unknown(directory: Path) -> None:
    """Raise where ``iter_N`` directories without a manifest are all there is: starting afresh could replace them."""
    if unknown := directories_without_manifest(directory):
        raise CheckpointError(f"{directory} holds {', '.join(unknown)} without {MANIFEST}: not a complete checkpoint "
                              "of this program. Move it away to start afresh, or give another directory")


def choices(directory: Path) -> str:
    """Tell the user which checkpoints of a directory could be loaded instead."""
    found = complete_iterations(directory)
    if not found:
        return "there is no complete checkpoint in the directory"
    return f"complete checkpoints here: {', '.join(map(str, found))}; choose one with --ckpt-step"


def read_json(path: Path) -> Any:
    """Raises CheckpointError when the file is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None


def read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    """Sizes and checksums of a checkpoint's files by name.

    Raises:
        CheckpointError: unreadable, not a manifest, or that of another iteration than the directory's name says.
    """
    manifest = read_json(path / MANIFEST)
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or manifest.get("format") != FORMAT or not all(
            isinstance(entry, dict) and {"bytes", "crc32"} <= entry.keys() for entry in files.values()):
        raise CheckpointError(f"{path / MANIFEST} is damaged: not a manifest of format {FORMAT}")
    if foreign := [name for name in files if Path(name).name != name]:
        raise CheckpointError(f"{path / MANIFEST} is damaged: {foreign[0]!r} is not the name of a file beside it")
    match = re.fullmatch(rf"iter_(\d+)({re.escape(REPLACED)})?", path.name)
    if match and manifest.get("iteration") != int(match[1]):
        raise CheckpointError(f"{path} holds the checkpoint of iteration {manifest.get('iteration')} under the name of "
                              "another one; give the directory its own name back, or load another checkpoint")
    return files


def checksum(path: Path) -> str:
    """CRC-32 of a file's bytes, as hexadecimal text."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(_READ_SIZE):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


def describe(path: Path) -> dict[str, Any]:
    """A file's entry in the manifest."""
    return {"bytes": path.stat().st_size, "crc32": checksum(path)}


def damage(path: Path, entry: dict[str, Any]) -> str:
    """Say how a file differs from its entry in the manifest; empty when it does not."""
    if not path.is_file():
        return f"{path} is missing"
    size = path.stat().st_size
    if size != entry["bytes"]:
        return f"{path} has {size} bytes instead of {entry['bytes']}"
    if checksum(path) != entry["crc32"]:
        return f"{path} is damaged: its checksum differs from the manifest's"
    return ""


def unlisted(path: Path, manifest: dict[str, dict[str, Any]]) -> list[str]:
    """Names of files in a checkpoint that its manifest does not list. Nothing reads them."""
    return sorted(file.name for file in path.iterdir() if file.name != MANIFEST and file.name not in manifest)
