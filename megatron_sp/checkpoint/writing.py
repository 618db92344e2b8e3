"""Write checkpoint directories so that each is complete or absent at every instant. Imports no torch.

The order of a save, and what a kill after each step leaves (``find_checkpoint`` is what a restart sees)::

    1. write iter_N.building, fsync, manifest last         previous checkpoints, untouched
    2. rename iter_N -> iter_N.replaced                    the same ones: .replaced counts while iter_N is missing
       (only when iteration N is saved again)
    3. rename iter_N.building -> iter_N                    the new one, complete
    4. move the tracker to N                               the new one, named by the tracker
    5. remove iter_N.replaced
    6. remove old checkpoints: rename iter_M -> iter_M.removing, then remove its files (see saving/retention.py)
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_sp.checkpoint.files import (
    BUILDING,
    FORMAT,
    MANIFEST,
    OWN_FILE,
    REMOVING,
    REPLACED,
    TOKENIZER,
    TRACKER,
    directory_name,
    file_names,
    is_ours,
    iteration_directories,
    sync_directory,
)
from megatron_sp.checkpoint.saving.removal import remove_rest
from megatron_sp.errors import CheckpointError


def write_durably(path: Path, text: str) -> None:
    """Replace the content of a file. After a crash at any instant it holds the old content or the new, both complete.

    Raises:
        OSError: the file cannot be written; the error names the file.
    """
    aside = path.with_name(path.name + BUILDING)
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None
    sync_directory(path.parent)


def _ignore(sentence: str) -> None:
    """Do nothing with a warning, for callers that give no function to report it."""


def start_building(directory: Path, iteration: int, warn: Callable[[str], None] = _ignore) -> Path:
    """Create and return the empty directory ``iter_N.building``, after removing what killed saves left behind.

    Args:
        warn: is given a sentence for each thing that should go, cannot be removed and is in nobody's way.

    Raises:
        CheckpointError: ``iter_N`` exists without a manifest. Another program wrote it, so it is not replaced.
        OSError: the directory cannot be made.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / (directory_name(iteration) + BUILDING)
    leftovers = [*_finish_interrupted_replacements(directory), *iteration_directories(directory, REMOVING).values()]
    leftovers += [each for each in iteration_directories(directory, BUILDING).values() if each != path]
    for sentence in map(remove_rest, leftovers):
        if sentence:
            warn(sentence)
    remove_unfinished(path)
    refuse_to_replace_unknown(directory / directory_name(iteration))
    path.mkdir(exist_ok=True)
    return path


def refuse_to_replace_unknown(path: Path) -> None:
    """Raise CheckpointError when ``path`` exists and is not a checkpoint of this program."""
    if os.path.lexists(path) and not is_ours(path):
        raise CheckpointError(f"{path} exists without {MANIFEST}: this program did not write it and does not replace "
                              "it. Move it away, or give another --save")


def _finish_interrupted_replacements(directory: Path) -> list[Path]:
    """Finish each replacement of a checkpoint that a kill interrupted, and return the directories to remove.

    When the new ``iter_N`` is complete, nobody needs the old ``iter_N.replaced``. Otherwise the old one gets its name
    ``iter_N`` back. Every ``iter_N.replaced`` was a checkpoint of this program when it got this name.
    """
    obsolete = []
    for iteration, replaced in iteration_directories(directory, REPLACED).items():
        final = directory / directory_name(iteration)
        if (final / MANIFEST).is_file():
            obsolete.append(replaced)
        elif not os.path.lexists(final):
            os.rename(replaced, final)
    return obsolete


def remove_unfinished(building: Path) -> None:
    """Remove a ``.building`` directory of a save that did not finish, or empty it where NFS still holds a file.

    Raises:
        CheckpointError: the directory holds files that no save of this program writes. Nothing is removed then.
        OSError: a file cannot be removed.
    """
    with contextlib.suppress(FileNotFoundError):
        names = file_names(building)
        for name in names:
            if not OWN_FILE.fullmatch(name):
                raise CheckpointError(f"{building} holds {name}, which this program did not write; move it away")
        for name in names:
            (building / name).unlink(missing_ok=True)
        if (building / TOKENIZER).is_dir():
            (building / TOKENIZER).rmdir()
        if not any(building.glob(".nfs*")):
            building.rmdir()


def finish_building(building: Path, iteration: int, files: dict[str, dict[str, Any]],
                    warn: Callable[[str], None] = _ignore) -> Path:
    """Write the manifest, give the directory its final name and move the tracker to it.

    Args:
        files: the manifest's entry of every file, by name.
        warn: is given a sentence when the replaced checkpoint cannot be removed.

    Returns:
        the checkpoint's final path
    """
    manifest = {"format": FORMAT, "iteration": iteration, "files": dict(sorted(files.items()))}
    write_durably(building / MANIFEST, json.dumps(manifest, indent=1))
    directory = building.parent
    final = directory / directory_name(iteration)
    replaced = directory / (directory_name(iteration) + REPLACED)
    refuse_to_replace_unknown(final)
    if final.exists():     # a run that went back with --ckpt-step saves this iteration for the second time
        os.rename(final, replaced)
        sync_directory(directory)
    os.rename(building, final)
    sync_directory(directory)
    write_durably(directory / TRACKER, f"{iteration}\n")
    if os.path.lexists(replaced) and (sentence := remove_rest(replaced)):
        warn(sentence)
    return final
