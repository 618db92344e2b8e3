"""Save and load checkpoints, all ranks together; docs/reference/checkpoints.md describes the format."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_sp.checkpoint import compare, files
from megatron_sp.checkpoint.agreement import gather, on_every_rank
from megatron_sp.checkpoint.saving.saver import Saver
from megatron_sp.checkpoint.state import (
    Piece,
    PieceLoadPlanner,
    create_optimizer_state,
    finish_loading,
    model_pieces,
    optimizer_pieces,
)
from megatron_sp.checkpoint.verification import choose_checkpoint
from megatron_sp.config.schema import Run
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
    saved = Saver(directory, model, optimizer, run).save(iteration, state)
    assert saved is not None
    return saved.path


def load_checkpoint(directory: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, run: Run, *,
                    iteration: int | None = None) -> dict[str, Any] | None:
    """Fill a model (and optimizer) from the newest checkpoint, or from that of one iteration. All ranks call it.

    The checkpoint may have been saved under another layout. When the newest one is damaged, the one before is used,
    and a note says so.

    Args:
        directory: a ``--save`` directory, or the directory of one checkpoint in it.
        optimizer: one that has made no step, or None to load weights only.

    Returns:
        The ``state`` that was given to ``save_checkpoint``, plus ``notes``: sentences for the log, and ``path``: the
        checkpoint's directory. None when there is no checkpoint.

    Raises:
        CheckpointError: on all ranks, when no checkpoint is whole, or the one that ``iteration`` names is not, or it is
            of another model.
    """
    home, saves = files.split_directory(directory)[0], run.checkpoint.save
    chosen = choose_checkpoint(directory, iteration, run.checkpoint.verify_checkpoint,
                               is_own=bool(saves) and os.path.realpath(home) == os.path.realpath(saves))
    if chosen is None:
        return None
    path, state = chosen.path, chosen.state
    compare.check_model(state["config"], run, str(path))
    if optimizer is not None and state["config"].get("checkpoint", {}).get("save_optimizer") is False:
        raise CheckpointError(f"{path} holds no state of an optimizer: it was saved with --no-save-optim. Add "
                              "--no-load-optim to go on with a fresh optimizer, or --finetune to start at iteration 0")
    pieces = model_pieces(model, run.model)
    if optimizer is not None and state["optimizer"] is not None:
        kind = type(optimizer).__name__
        if kind != state["optimizer"]:
            raise CheckpointError(f"{path} holds the state of {state['optimizer']} but --optimizer asks for {kind}; "
                                  "give the checkpoint's --optimizer")
        create_optimizer_state(model, optimizer)
        pieces |= optimizer_pieces(model, optimizer, run.model)
    _check_tensors(path, pieces, chosen.tensors, expect_all=optimizer is not None)
    with torch.no_grad():
        on_every_rank(f"cannot read {path}",
                      lambda: dcp.load(pieces, storage_reader=chosen.reader(), planner=PieceLoadPlanner()))
        finish_loading(model, optimizer, run.model, pieces)
    return state | {"notes": chosen.notes, "path": str(path)}


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
