"""Whole training runs within a test: on the ranks of a pool, through the same set-up as the program."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_sp.checkpoint.state import model_pieces, optimizer_pieces
from megatron_sp.checkpoint.store import load_checkpoint, save_checkpoint
from megatron_sp.config.load import load_run
from megatron_sp.model.build import build_model
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.runtime import Environment
from megatron_sp.train.optimizer import build_optimizer
from megatron_sp.train.report.metrics_file import read_metrics
from megatron_sp.train.setup import pretrain
from megatron_sp.train.signals import StopSignals
from tests.helpers.configs import TRAINING, tiny_run


def train(flags: str) -> str:
    """Run the program on this rank; the text of the user's mistake, if any. Ends the process group."""
    return train_and_tell(flags)[1]


def train_and_tell(flags: str) -> tuple[str, str]:
    """What this rank prints, and the text of the user's mistake, if any; see ``train``."""
    from megatron_sp.errors import UserError

    rank, world, output = dist.get_rank(), dist.get_world_size(), io.StringIO()
    try:
        run, _ = load_run([*TRAINING, "--log-interval", "1", *flags.split()], world)
        with contextlib.redirect_stdout(output), scratch():
            pretrain(run, Environment(rank, world, rank), StopSignals(()), started=time.monotonic())
    except UserError as error:
        return output.getvalue(), f"{type(error).__name__}: {error}"
    return output.getvalue(), ""


@contextlib.contextmanager
def scratch() -> Iterator[None]:
    """A place for what a run without --save writes where it starts."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        try:
            yield
        finally:
            os.chdir(before)


def steps(directory: Path, *names: str) -> list[tuple[Any, ...]]:
    """These values of each logged step, in order."""
    return [tuple(row[name] for name in names) for row in read_metrics(directory / "metrics.jsonl") if "lm_loss" in row]


def copy_checkpoint(flags: str, source: str, target: str) -> bool:
    """Load a checkpoint into another layout on this rank and save it from there.

    Returns:
        whether the padding of the vocabulary is zero everywhere, in weights and moments
    """
    run = tiny_run(["--seed", "99", *flags.split()], dist.get_world_size())     # other initial weights
    mesh = ParallelMesh.build(run.parallel)
    model = build_model(run, mesh)
    optimizer = build_optimizer(run, model)
    for piece in model_pieces(model, run.model).values():
        if piece.padding is not None:
            piece.padding.fill_(7.0)      # loading must not leave it
    state = load_checkpoint(source, model, optimizer, run)
    assert state is not None
    pieces = model_pieces(model, run.model) | optimizer_pieces(model, optimizer, run.model)
    plain = {name: state[name] for name in ("train", "schedule", "loss_scaler")}
    save_checkpoint(target, state["iteration"], model, optimizer, plain, run)
    return all(not piece.padding.any() for piece in pieces.values() if piece.padding is not None)


def full_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole, read without any process group and without our reading code."""
    reader = FileSystemReader(checkpoint)
    tensors = {name: torch.full(tuple(entry.size), float("nan"), dtype=entry.properties.dtype)
               for name, entry in reader.read_metadata().state_dict_metadata.items()
               if isinstance(entry, TensorStorageMetadata)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")      # it says that there is no process group
        load(tensors, storage_reader=reader, no_dist=True)
    return tensors
