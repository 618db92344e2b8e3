"""Checkpoint directories on disk: names, tracker, manifest, durability. Imports no torch.

::

    DIR/latest_checkpointed_iteration.txt      the tracker: which one to load
    DIR/iter_0000008/manifest.json             names, sizes and checksums of all other files
    DIR/iter_0000008/state.json, *.distcp ...
    DIR/iter_0000016.building/                 a save that never finished

A directory without the suffix is complete: it was written under the other name, made durable and
renamed. The tracker is moved last.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

from megatron_sp.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
STATE = "state.json"
CONFIG = "config.json"
BUILDING = ".building"
FORMAT = 1

_READ_SIZE = 1 << 24


def directory_name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def complete_iterations(directory: Path) -> list[int]:
    """Iterations of the complete checkpoints in a directory, ascending; other names are ignored."""
    found = []
    for path in directory.glob("iter_*"):
        match = re.fullmatch(r"iter_(\d+)", path.name)
        if match and (path / MANIFEST).is_file():
            found.append(int(match[1]))
    return sorted(found)


def read_tracker(directory: Path) -> int | None:
    """Iteration the tracker points to; None when there is no tracker.

    Raises:
        CheckpointError: the tracker holds something else than a number.
    """
    path = directory / TRACKER
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read the tracker {path}: {error}") from None
    if not re.fullmatch(r"[0-9]+", text):
        raise CheckpointError(f"the tracker {path} holds {text[:40]!r}, not an iteration; {_choices(directory)}")
    return int(text)


def find_checkpoint(directory: str | Path, iteration: int | None = None) -> Path | None:
    """The directory to load: this iteration, else the tracker's; None when there is no tracker.

    Raises:
        CheckpointError: the tracker is unreadable, or missing beside checkpoints; or the checkpoint is not there or
            not complete.
    """
    directory = Path(directory)
    named = iteration if iteration is not None else read_tracker(directory)
    if named is None:
        if complete_iterations(directory):
            raise CheckpointError(f"{directory} has checkpoints but no tracker ({TRACKER}); {_choices(directory)}, or "
                                  "write its number into the tracker. To start afresh take another directory")
        return None
    path = directory / directory_name(named)
    if not (path / MANIFEST).is_file():
        source = f"--ckpt-step {named}" if iteration is not None else f"the tracker {directory / TRACKER}"
        what = "is not complete (no manifest)" if path.is_dir() else "does not exist"
        raise CheckpointError(f"{path}, named by {source}, {what}; {_choices(directory)}")
    return path


def _choices(directory: Path) -> str:
    found = complete_iterations(directory)
    if not found:
        return "there is no complete checkpoint in the directory"
    return f"complete checkpoints here: {', '.join(map(str, found))}; choose one with --ckpt-step"


def read_json(path: Path) -> Any:
    """Raises CheckpointError when the file is missing or not JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None


def read_state(path: Path) -> dict[str, Any]:
    """The plain state of a checkpoint: counters, configuration, unpadded vocabulary size.

    Raises:
        CheckpointError: damaged, unreadable, or written by a newer version.
    """
    if (entry := read_manifest(path).get(STATE)) is None:
        raise CheckpointError(f"{path / MANIFEST} is damaged: it does not list {STATE}; {_choices(path.parent)}")
    if harm := damage(path / STATE, entry):
        raise CheckpointError(f"{harm}; {_choices(path.parent)}")
    state = read_json(path / STATE)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(f"{path / STATE} has format {found!r}; this version reads format {FORMAT}")
    return state


def read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    """Sizes and checksums by file name.

    Raises:
        CheckpointError: unreadable or not a manifest.
    """
    manifest = read_json(path / MANIFEST)
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or manifest.get("format") != FORMAT or not all(
            isinstance(entry, dict) and {"bytes", "crc32"} <= entry.keys() for entry in files.values()):
        raise CheckpointError(f"{path / MANIFEST} is damaged: not a manifest of format {FORMAT}")
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
    """What is wrong with a file, compared with its entry in the manifest; empty when nothing is."""
    if not path.is_file():
        return f"{path} is missing"
    size = path.stat().st_size
    if size != entry["bytes"]:
        return f"{path} has {size} bytes instead of {entry['bytes']}"
    if checksum(path) != entry["crc32"]:
        return f"{path} is damaged: its checksum differs from the manifest's"
    return ""


def write_durably(path: Path, text: str) -> None:
    """Write a file under another name, make it durable and rename it: the old content or the new one."""
    aside = path.with_name(path.name + BUILDING)
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def start_building(directory: Path, iteration: int) -> Path:
    """An empty directory to write a checkpoint into; what unfinished saves left behind is removed."""
    directory.mkdir(parents=True, exist_ok=True)
    for stale in directory.glob(f"iter_*{BUILDING}"):
        shutil.rmtree(stale)
    path = directory / (directory_name(iteration) + BUILDING)
    path.mkdir()
    return path


def finish_building(building: Path, iteration: int, files: dict[str, dict[str, Any]]) -> Path:
    """Write the manifest, rename the directory and move the tracker to it; returns the final path."""
    manifest = {"format": FORMAT, "iteration": iteration, "files": dict(sorted(files.items()))}
    write_durably(building / MANIFEST, json.dumps(manifest, indent=1))
    directory = building.parent
    final = directory / directory_name(iteration)
    replaced = directory / (directory_name(iteration) + ".replaced" + BUILDING)
    if final.exists():     # the same iteration once more, after going back with --ckpt-step
        os.rename(final, replaced)
    os.rename(building, final)
    sync_directory(directory)
    write_durably(directory / TRACKER, f"{iteration}\n")
    if replaced.exists():
        shutil.rmtree(replaced)
    return final
