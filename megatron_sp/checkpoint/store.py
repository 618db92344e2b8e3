"""Save and load checkpoints, all ranks together; docs/reference/checkpoints.md describes the format."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_sp.checkpoint import compare, files, writing
from megatron_sp.checkpoint.agreement import error_in_words, gather, on_every_rank, on_rank_zero
from megatron_sp.checkpoint.lock import refuse_foreign_lock
from megatron_sp.checkpoint.metadata import METADATA, CheckpointReader
from megatron_sp.checkpoint.state import (
    Piece,
    PieceLoadPlanner,
    PieceSavePlanner,
    create_optimizer_state,
    finish_loading,
    model_pieces,
    optimizer_pieces,
)
from megatron_sp.checkpoint.state_file import read_state
from megatron_sp.config.schema import Run
from megatron_sp.config.serialize import to_dict
from megatron_sp.errors import CheckpointError


def save_checkpoint(directory: str | Path, iteration: int, model: nn.Module, optimizer: torch.optim.Optimizer,
                    state: dict[str, Any], run: Run) -> Path:
    """Write ``directory/iter_NNNNNNN`` and let the tracker point to it. All ranks call it.

    Args:
        state: ``train``, ``schedule``, ``loss_scaler`` and other values that JSON can hold; ``load_checkpoint``
            returns them.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: on all ranks, when the checkpoint could not be written. Earlier checkpoints are untouched, and
            the files of this one are removed.
    """
    directory = Path(directory)
    optimizer_state = optimizer_pieces(model, optimizer, run.model) if run.checkpoint.save_optimizer else {}
    pieces = model_pieces(model, run.model) | optimizer_state
    plain = {"format": files.FORMAT, "iteration": iteration, "vocab_size": run.model.vocab_size,
             "optimizer": type(optimizer).__name__ if optimizer_state else None, **state, "config": to_dict(run)}

    def start() -> Path:
        refuse_foreign_lock(directory)
        return writing.start_building(directory, iteration)

    building = on_rank_zero(f"cannot write to {directory}", start)
    try:
        on_every_rank(f"cannot write {building}", lambda: _write_tensors(building, pieces))
        entries = on_every_rank(f"cannot read back {building}", lambda: _describe_own(building))
        return on_rank_zero(f"cannot finish {building}", lambda: _finish(building, iteration, plain, entries))
    except CheckpointError:
        with contextlib.suppress(OSError, CheckpointError):
            _discard(building)
        raise


def _discard(building: Path) -> None:
    """Remove the files of a failed save.

    Each rank removes its own file, because rank 0 does not see it when the ranks do not share a file system.
    """
    for path in building.glob(f"__{dist.get_rank()}_*"):
        path.unlink()
    if dist.get_rank() == 0:
        writing.remove_unfinished(building)
    else:
        # The caller ignores an error here. It is usual: the directory still holds rank 0's files, or is gone already.
        building.rmdir()


class _Writer(dcp.FileSystemWriter):
    """Writes files durably. Its errors name the file and the cause, which torch would not send to the other ranks."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        with _naming_file_in_errors(Path(self.path) / f"__{dist.get_rank()}_0.distcp"):
            return super().write_data(plan, planner)

    def finish(self, metadata: Any, results: Any) -> None:
        with _naming_file_in_errors(Path(self.path) / METADATA):
            super().finish(metadata, results)


@contextlib.contextmanager
def _naming_file_in_errors(path: Path) -> Iterator[None]:
    """Turn an error within the block into a CheckpointError that names the file being written."""
    try:
        yield
    except Exception as error:      # file systems raise OSError, torch's writer RuntimeError
        raise CheckpointError(f"rank {dist.get_rank()} cannot write {path}: {error_in_words(error)}") from None


def _write_tensors(building: Path, pieces: dict[str, Piece]) -> None:
    dcp.save(pieces, storage_writer=_Writer(building, sync_files=True), planner=PieceSavePlanner())


def _describe_own(building: Path) -> dict[str, dict[str, Any]]:
    """Return the manifest entries of the files that this rank wrote, by file name."""
    return {path.name: files.manifest_entry(path) for path in building.glob(f"__{dist.get_rank()}_*")}


def _finish(building: Path, iteration: int, state: dict[str, Any],
            entries_of_ranks: list[dict[str, dict[str, Any]]]) -> Path:
    """Complete a checkpoint on rank 0: write ``state.json`` and the manifest, and give the directory its final name.

    Args:
        entries_of_ranks: for each rank, the manifest entries of the files that it wrote.
    """
    for rank, own_entries in enumerate(entries_of_ranks):
        for name in own_entries:
            if not (building / name).is_file():
                raise CheckpointError(f"rank {rank} wrote {building / name}, but rank 0 does not find it there: the "
                                      "directory must be the same one on all ranks, on a file system they share")
    entries = {name: entry for own_entries in entries_of_ranks for name, entry in own_entries.items()}
    writing.write_durably(building / files.STATE, json.dumps(state, indent=1))
    for path in building.iterdir():
        if path.name not in entries:
            entries[path.name] = files.manifest_entry(path)
    return writing.finish_building(building, iteration, entries)


def load_checkpoint(directory: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, run: Run, *,
                    iteration: int | None = None) -> dict[str, Any] | None:
    """Fill a model (and optimizer) from the newest checkpoint, or from that of one iteration. All ranks call it.

    The checkpoint may have been saved under another layout.

    Args:
        optimizer: one that has made no step, or None to load weights only.

    Returns:
        The ``state`` that was given to ``save_checkpoint``, plus ``notes``: sentences for the log. None when there is
        no checkpoint.

    Raises:
        CheckpointError: on all ranks, when the checkpoint is damaged, incomplete, or of another model.
    """
    found = on_rank_zero("cannot look for a checkpoint", lambda: files.find_checkpoint(directory, iteration))
    if found is None:
        return None
    path = found.path
    state = on_rank_zero(f"cannot read {path}", lambda: read_state(path))
    compare.check_model(state["config"], run, str(path))
    if optimizer is not None and state["config"].get("checkpoint", {}).get("save_optimizer") is False:
        raise CheckpointError(f"{path} holds no state of an optimizer: it was saved with --no-save-optim. Add "
                              "--no-load-optim to go on with a fresh optimizer, or --finetune to start at iteration 0")
    manifest = _verify_files(path)
    pieces = model_pieces(model, run.model)
    saved_tensors: dict[str, TensorStorageMetadata] = {}
    has_optimizer = state["optimizer"] is not None
    if optimizer is not None and has_optimizer:
        kind = type(optimizer).__name__
        if kind != state["optimizer"]:
            raise CheckpointError(f"{path} holds the state of {state['optimizer']} but --optimizer asks for {kind}; "
                                  "give the checkpoint's --optimizer")
        create_optimizer_state(model, optimizer)
        pieces |= optimizer_pieces(model, optimizer, run.model)
    reader = CheckpointReader(path, manifest)
    on_every_rank(f"cannot read {path}", lambda: saved_tensors.update(reader.read_tensor_entries()))
    _check_tensors(path, pieces, saved_tensors, expect_all=optimizer is not None)
    with torch.no_grad():
        on_every_rank(f"cannot read {path}",
                      lambda: dcp.load(pieces, storage_reader=reader, planner=PieceLoadPlanner()))
        finish_loading(model, optimizer, run.model, pieces)
    extra = on_rank_zero(f"cannot list {path}", lambda: files.unlisted_files(path, manifest))
    ignored = [f"{path} holds files that its manifest does not list; they are not read: {', '.join(extra)}"]
    return state | {"notes": found.notes + (ignored if extra else [])}


def _verify_files(path: Path) -> dict[str, dict[str, Any]]:
    """Check every file against the manifest, and return the manifest. Each rank checks a share of the files."""
    manifest = on_rank_zero(f"cannot read {path}", lambda: files.read_manifest(path))
    mine = list(manifest.items())[dist.get_rank()::dist.get_world_size()]
    damage_by_rank = on_every_rank(f"cannot verify {path}", lambda: [files.describe_damage(path / name, entry)
                                                                     for name, entry in mine])
    damaged = [text for texts in damage_by_rank for text in texts if text]
    if damaged:
        raise CheckpointError(f"{'; '.join(damaged)}. Load another one with --ckpt-step; complete checkpoints here: "
                              f"{', '.join(map(str, files.complete_iterations(path.parent)))}")
    return manifest


def _check_tensors(path: Path, pieces: dict[str, Piece], saved: dict[str, TensorStorageMetadata],
                   expect_all: bool) -> None:
    """Raise CheckpointError when names, shapes or types of the checkpoint's tensors differ from the model's.

    Args:
        expect_all: whether optimizer states that the run does not have are an error, too.
    """
    own = {name: (tuple(piece.shape), str(piece.data.dtype)) for name, piece in pieces.items()}
    wanted = {name: entry for part in gather(own) for name, entry in part.items()}
    problems = [f"{name} is not in the checkpoint" for name in sorted(wanted.keys() - saved.keys())]
    unknown = sorted(name for name in saved.keys() - wanted.keys() if expect_all or name.startswith("model."))
    problems += [f"the checkpoint's {name} has no place in the model" for name in unknown]
    for name in sorted(wanted.keys() & saved.keys()):
        found = tuple(saved[name].size), str(saved[name].properties.dtype)
        if found != wanted[name]:
            problems.append(f"{name} is {found[1]} {list(found[0])} in the checkpoint and "
                            f"{wanted[name][1]} {list(wanted[name][0])} in the model")
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise CheckpointError(f"{path} does not fit the model: {'; '.join(problems[:5])}{more}")
