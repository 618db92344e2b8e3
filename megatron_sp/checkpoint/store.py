"""Save and load checkpoints, all ranks together; see docs/reference/checkpoints.md for the format.

Whatever goes wrong on one rank is raised on every rank, so that none is left waiting.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_sp.checkpoint import compare, files
from megatron_sp.checkpoint.state import (
    Piece,
    PieceLoadPlanner,
    PieceSavePlanner,
    create_optimizer_state,
    finish_loading,
    model_pieces,
    optimizer_pieces,
)
from megatron_sp.config.schema import Run
from megatron_sp.config.serialize import to_dict
from megatron_sp.errors import CheckpointError

T = TypeVar("T")


def save_checkpoint(directory: str | Path, iteration: int, model: nn.Module, optimizer: torch.optim.Optimizer,
                    state: dict[str, Any], run: Run) -> Path:
    """Write ``directory/iter_NNNNNNN`` and let the tracker point to it. All ranks call it.

    Args:
        state: counters and other plain values (JSON); comes back from ``load_checkpoint``.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: it could not be written; what was there before is untouched.
    """
    directory = Path(directory)
    optimizer_state = optimizer_pieces(model, optimizer, run.model)
    pieces = model_pieces(model, run.model) | optimizer_state
    plain = {"format": files.FORMAT, "iteration": iteration, "vocab_size": run.model.vocab_size,
             "optimizer": type(optimizer).__name__ if optimizer_state else None, **state, "config": to_dict(run)}
    building = directory / (files.directory_name(iteration) + files.BUILDING)
    _first_rank(f"cannot write to {directory}", lambda: files.start_building(directory, iteration))
    _together(f"cannot write {building}", lambda: _write_tensors(building, pieces))
    own = _together(f"cannot read back {building}", lambda: _describe_own(building))
    entries = {name: entry for part in own for name, entry in part.items()}
    return _first_rank(f"cannot finish {building}", lambda: _finish(building, iteration, plain, entries))


def _write_tensors(building: Path, pieces: dict[str, Piece]) -> None:
    dcp.save(pieces, storage_writer=dcp.FileSystemWriter(building, sync_files=True), planner=PieceSavePlanner())


def _describe_own(building: Path) -> dict[str, dict[str, Any]]:
    """Size and checksum of the files this rank wrote."""
    return {path.name: files.describe(path) for path in building.glob(f"__{dist.get_rank()}_*")}


def _finish(building: Path, iteration: int, state: dict[str, Any], entries: dict[str, dict[str, Any]]) -> Path:
    files.write_durably(building / files.STATE, json.dumps(state, indent=1))
    for path in building.iterdir():
        if path.name not in entries:
            entries[path.name] = files.describe(path)
    return files.finish_building(building, iteration, entries)


def load_checkpoint(directory: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, run: Run, *,
                    iteration: int | None = None) -> dict[str, Any] | None:
    """Fill a model (and optimizer) from the newest checkpoint, or from that of one iteration. All ranks call it.

    The layout it was saved under does not matter.

    Args:
        optimizer: one that has made no step, or None to load weights only.

    Returns:
        The plain state that was saved, or None when the directory has no tracker.

    Raises:
        CheckpointError: damaged, incomplete, or of another model.
    """
    path = _first_rank("cannot look for a checkpoint", lambda: files.find_checkpoint(directory, iteration))
    if path is None:
        return None
    state = _first_rank(f"cannot read {path}", lambda: files.read_state(path))
    compare.check_model(state["config"], run, str(path))
    _verify_files(path)
    pieces = model_pieces(model, run.model)
    has_optimizer = state["optimizer"] is not None
    if optimizer is not None and has_optimizer:
        kind = type(optimizer).__name__
        if kind != state["optimizer"]:
            raise CheckpointError(f"{path} holds the state of {state['optimizer']} but --optimizer asks for {kind}; "
                                  "give the checkpoint's --optimizer")
        create_optimizer_state(model, optimizer)
        pieces |= optimizer_pieces(model, optimizer, run.model)
    reader = dcp.FileSystemReader(path)
    _check_tensors(path, pieces, reader, expect_all=optimizer is not None)
    with torch.no_grad():
        _together(f"cannot read {path}", lambda: dcp.load(pieces, storage_reader=reader, planner=PieceLoadPlanner()))
        finish_loading(model, optimizer, run.model, pieces)
    return state


def _verify_files(path: Path) -> None:
    """Compare every file with the manifest; the ranks share the reading."""
    manifest = _first_rank(f"cannot read {path}", lambda: files.read_manifest(path))
    mine = list(manifest.items())[dist.get_rank()::dist.get_world_size()]
    found = _together(f"cannot verify {path}", lambda: [files.damage(path / name, entry) for name, entry in mine])
    damaged = [text for part in found for text in part if text]
    if damaged:
        raise CheckpointError(f"{'; '.join(damaged)}. Load another one with --ckpt-step; complete checkpoints here: "
                              f"{', '.join(map(str, files.complete_iterations(path.parent)))}")


def _check_tensors(path: Path, pieces: dict[str, Piece], reader: dcp.FileSystemReader, expect_all: bool) -> None:
    """Every tensor of the model is in the checkpoint with the same shape and type, and nothing else is."""
    saved = reader.read_metadata().state_dict_metadata
    own = {name: (tuple(piece.shape), str(piece.data.dtype)) for name, piece in pieces.items()}
    wanted = {name: entry for part in _gather(own) for name, entry in part.items()}
    problems = [f"{name} is not in the checkpoint" for name in sorted(wanted.keys() - saved.keys())]
    unknown = sorted(name for name in saved.keys() - wanted.keys() if expect_all or name.startswith("model."))
    problems += [f"the checkpoint's {name} has no place in the model" for name in unknown]
    for name in sorted(wanted.keys() & saved.keys()):
        entry = saved[name]
        assert isinstance(entry, TensorStorageMetadata)
        found = tuple(entry.size), str(entry.properties.dtype)
        if found != wanted[name]:
            problems.append(f"{name} is {found[1]} {list(found[0])} in the checkpoint and "
                            f"{wanted[name][1]} {list(wanted[name][0])} in the model")
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise CheckpointError(f"{path} does not fit the model: {'; '.join(problems[:5])}{more}")


def _gather(value: T) -> list[T]:
    """Every rank's value, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@dataclass(frozen=True)
class _Outcome(Generic[T]):
    """What an action gave on one rank: a value, or an error and whether its text needs no context."""

    value: T | None = None
    error: str = ""
    is_whole_story: bool = False

    @classmethod
    def of(cls, action: Callable[[], T]) -> _Outcome[T]:
        try:
            return cls(value=action())
        except CheckpointError as error:
            return cls(error=str(error), is_whole_story=True)
        except Exception as error:  # torch's checkpoint errors have no common base
            return cls(error=f"{type(error).__name__}: {error}")


def _together(what: str, action: Callable[[], T]) -> list[T]:
    """Do something on every rank and return all results by rank; a failure of any is raised on all."""
    outcomes = _gather(_Outcome.of(action))
    for rank, outcome in enumerate(outcomes):
        if outcome.error:
            raise CheckpointError(outcome.error if outcome.is_whole_story else f"{what}: rank {rank}: {outcome.error}")
    return [cast(T, outcome.value) for outcome in outcomes]


def _first_rank(what: str, action: Callable[[], T]) -> T:
    """Do something on rank 0 and give every rank the result; a failure is raised on all."""
    answer: list[Any] = [_Outcome.of(action) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(answer, src=0)
    outcome: _Outcome[T] = answer[0]
    if outcome.error:
        raise CheckpointError(outcome.error if outcome.is_whole_story else f"{what}: {outcome.error}")
    return cast(T, outcome.value)
