"""Choose the checkpoint to load, all ranks together, and prove that its files are those that the save wrote.

What is checked, in this order: the manifest and ``state.json``; every file's size and checksum, each rank a share of
the files; ``.metadata``; that the stored chunks make up every tensor. A checkpoint that fails is skipped for the one
before, unless the user named it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_sp.checkpoint import files
from megatron_sp.checkpoint.agreement import on_every_rank, on_rank_zero
from megatron_sp.checkpoint.files import DamagedCheckpoint, FoundCheckpoint
from megatron_sp.checkpoint.metadata import CheckpointReader
from megatron_sp.checkpoint.state_file import read_state
from megatron_sp.errors import CheckpointError

#: What --verify-checkpoint may ask for: compare sizes and checksums of all files, or sizes, or nothing.
FULL, SIZE, OFF = "full", "size", "off"


@dataclass(frozen=True)
class ChosenCheckpoint:
    """A checkpoint that was found whole.

    Attributes:
        state: the content of ``state.json``.
        manifest: size and checksum of each file by name.
        tensors: shape, type and chunks of each stored tensor by name.
        notes: sentences for the log.
    """

    path: Path
    state: dict[str, Any]
    manifest: dict[str, dict[str, Any]]
    tensors: dict[str, TensorStorageMetadata]
    notes: list[str]

    def reader(self) -> CheckpointReader:
        """Return a reader of the tensors, which reads no file that the manifest does not list."""
        return CheckpointReader(self.path, self.manifest)


def choose_checkpoint(directory: str | Path, iteration: int | None, verify: str, *,
                      is_own: bool = False) -> ChosenCheckpoint | None:
    """Return the checkpoint to load, the same on all ranks; None when there is none.

    Args:
        directory: a ``--save`` directory, or the directory of one checkpoint in it.
        iteration: the one that the user named; None for the newest.
        verify: FULL, SIZE or OFF.
        is_own: whether the run saves there. Then it notes in a checkpoint that this one is damaged, so that the
            deletion of old checkpoints (``saving/retention.py``) does not count it, also after a restart.

    Raises:
        CheckpointError: on all ranks, when no checkpoint is whole, or the one that the user named is not.
    """
    candidates = on_rank_zero("cannot look for a checkpoint", lambda: files.find_candidates(directory, iteration))
    damages: list[str] = []
    for candidate in candidates:
        try:
            chosen = _verified(candidate, verify)
        except DamagedCheckpoint as error:
            damages.append(str(error))
            if is_own:
                _note_damage(candidate.path, str(error))
            continue
        if is_own and verify == FULL:
            _note_damage(candidate.path, "")
        skipped = [f"{damage}. THE CHECKPOINT BEFORE IS USED: iteration {candidate.iteration}" for damage in damages]
        return ChosenCheckpoint(chosen.path, chosen.state, chosen.manifest, chosen.tensors, skipped + chosen.notes)
    if damages:
        home = candidates[0].path.parent
        others = [str(number) for number in files.complete_iterations(home)
                  if number not in {candidate.iteration for candidate in candidates}]
        cure = (f"Load another one with --ckpt-step; complete checkpoints here: {', '.join(others)}" if others else
                f"{home} holds no other checkpoint")
        raise CheckpointError(f"{'; '.join(damages)}. {cure}")
    return None


def _note_damage(path: Path, text: str) -> None:
    """On rank 0, write into a checkpoint that it is damaged, or remove this note; without effect where not allowed."""
    if dist.get_rank() == 0:
        with contextlib.suppress(OSError):
            if text:
                (path / files.DAMAGED).write_text(text + "\n", encoding="utf-8")
            else:
                (path / files.DAMAGED).unlink(missing_ok=True)


def _verified(found: FoundCheckpoint, verify: str) -> ChosenCheckpoint:
    """Return a checkpoint after checking it. All ranks call it.

    Raises:
        DamagedCheckpoint: on all ranks, naming each file that is not what the save wrote.
    """
    path = found.path
    state, manifest = on_rank_zero(f"cannot read {path}", lambda: (read_state(path), files.read_manifest(path)))
    if verify != OFF:
        mine = list(manifest.items())[dist.get_rank()::dist.get_world_size()]
        damages = on_every_rank(f"cannot verify {path}", lambda: damaged_files(path, mine, verify))
        if listed := [text for texts in damages for text in texts]:
            raise DamagedCheckpoint("; ".join(listed))
    tensors: dict[str, TensorStorageMetadata] = {}
    on_every_rank(f"cannot read {path}", lambda: tensors.update(read_tensors(path, manifest)))
    extra = on_rank_zero(f"cannot list {path}", lambda: files.unlisted_files(path, manifest))
    notes = found.notes + ([f"{path} holds files that its manifest does not list; they are not read: "
                            f"{', '.join(extra)}"] if extra else [])
    return ChosenCheckpoint(path, state, manifest, tensors, notes)


def damaged_files(path: Path, entries: Iterable[tuple[str, dict[str, Any]]], verify: str) -> list[str]:
    """Return a sentence for each of these files of a checkpoint that differs from its entry in the manifest."""
    found = (files.describe_damage(path / name, entry, with_checksum=verify == FULL) for name, entry in entries)
    return [text for text in found if text]


def read_tensors(path: Path, manifest: dict[str, dict[str, Any]]) -> dict[str, TensorStorageMetadata]:
    """Return the entries of a checkpoint's tensors.

    Raises:
        DamagedCheckpoint: a tensor's chunks do not make up the tensor.
    """
    tensors = CheckpointReader(path, manifest).read_tensor_entries()
    if problems := [text for name, entry in tensors.items() if (text := describe_gaps(name, entry))]:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise DamagedCheckpoint(f"{path}: {'; '.join(problems[:5])}{more}")
    return tensors


def describe_gaps(name: str, entry: TensorStorageMetadata) -> str:
    """Return a clause when the chunks of a tensor overlap, leave elements out, or lie outside it; else ""."""
    spans = [tuple((start, start + length) for start, length in zip(chunk.offsets, chunk.sizes))
             for chunk in entry.chunks]
    if any(stop > size for span in spans for (_, stop), size in zip(span, entry.size)):
        return f"a stored chunk of {name} lies outside the tensor"
    stored = sum(chunk.sizes.numel() for chunk in entry.chunks)
    if stored != entry.size.numel() or len(set(spans)) != len(spans):
        return f"the stored chunks of {name} hold {stored} elements of a tensor of {entry.size.numel()}"
    return ""
