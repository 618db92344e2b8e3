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
    """Return the names of ``iter_N`` directories without a manifest, for example those that Megatron-LM wrote.

    Args:
        after: leave out this iteration and earlier ones.
    """
    return [path.name for iteration, path in iteration_directories(directory).items()
            if iteration > after and not (path / MANIFEST).is_file()]


def read_tracker(directory: Path) -> int | None:
    """Return the iteration that the tracker names; None when there is no tracker.

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


def find_checkpoint(directory: str | Path, iteration: int | None = None) -> FoundCheckpoint | None:
    """Find the checkpoint to load: that of ``iteration``, else the tracker's, else the newest complete one.

    The last case occurs when a run was killed during its first save, after the checkpoint was complete and before the
    tracker was written.

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
    return FoundCheckpoint(complete[named], named, notes)


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
        CheckpointError: the file is missing or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None


def read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    """Return the size and checksum of each file of a checkpoint, by file name.

    Raises:
        CheckpointError: the manifest cannot be read, is damaged, or names another iteration than the directory.
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
    """Return the CRC-32 of a file's bytes, as hexadecimal text."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(_READ_SIZE):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


def manifest_entry(path: Path) -> dict[str, Any]:
    """Return the manifest's entry for a file: its size and checksum."""
    return {"bytes": path.stat().st_size, "crc32": checksum(path)}


def describe_damage(path: Path, entry: dict[str, Any]) -> str:
    """Return a sentence on how a file differs from its entry in the manifest; "" when it does not."""
    if not path.is_file():
        return f"{path} is missing"
    size = path.stat().st_size
    if size != entry["bytes"]:
        return f"{path} has {size} bytes instead of {entry['bytes']}"
    if checksum(path) != entry["crc32"]:
        return f"{path} is damaged: its checksum differs from the manifest's"
    return ""


def unlisted_files(path: Path, manifest: dict[str, dict[str, Any]]) -> list[str]:
    """Return the names of the files in a checkpoint that its manifest does not list. Nothing reads these files."""
    return sorted(file.name for file in path.iterdir() if file.name != MANIFEST and file.name not in manifest)
