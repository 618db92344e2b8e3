"""Run whole trainings within a test, on ranks of ``run_ranks``, with the same set-up as pretrain_gpt.py."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
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
    """Train on this rank; return the message of the user error, or "". The process group is destroyed."""
    return train_and_tell(flags)[1]


def train_and_tell(flags: str, signals: Sequence[signal.Signals] = ()) -> tuple[str, str]:
    """Train as ``train`` does; return what this rank prints, and the message of the user error, or "".

    Args:
        signals: signals that ask this rank to stop.
    """
    from megatron_sp.errors import UserError

    rank, world, output = dist.get_rank(), dist.get_world_size(), io.StringIO()
    try:
        run, _ = load_run([*TRAINING, "--log-interval", "1", *flags.split()], world)
        with contextlib.redirect_stdout(output), scratch():
            pretrain(run, Environment(rank, world, rank), StopSignals(signals), started=time.monotonic())
    except UserError as error:
        return output.getvalue(), f"{type(error).__name__}: {error}"
    return output.getvalue(), ""


@contextlib.contextmanager
def scratch() -> Iterator[None]:
    """Work in a temporary directory, since a run without --save may write into the current one."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        try:
            yield
        finally:
            os.chdir(before)


def steps(directory: Path, *names: str) -> list[tuple[Any, ...]]:
    """Return the values with these names of each logged step, in order."""
    return [tuple(row[name] for name in names) for row in read_metrics(directory / "metrics.jsonl") if "lm_loss" in row]


def copy_checkpoint(flags: str, source: str, target: str) -> bool:
    """Load a checkpoint into another layout on this rank and save it from there.

    Returns:
        Whether all padding of the vocabulary is 0, in weights and in optimizer moments.
    """
    # The seed makes the initial weights differ from those of the checkpoint.
    run = tiny_run(["--seed", "99", *flags.split()], dist.get_world_size())
    mesh = ParallelMesh.build(run.parallel)
    model = build_model(run, mesh)
    optimizer = build_optimizer(run, model)
    for piece in model_pieces(model, run.model).values():
        if piece.padding is not None:
            piece.padding.fill_(7.0)      # loading must set it to 0
    state = load_checkpoint(source, model, optimizer, run)
    assert state is not None
    pieces = model_pieces(model, run.model) | optimizer_pieces(model, optimizer, run.model)
    plain = {name: state[name] for name in ("train", "schedule", "loss_scaler")}
    save_checkpoint(target, state["iteration"], model, optimizer, plain, run)
    return all(not piece.padding.any() for piece in pieces.values() if piece.padding is not None)


def full_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint by name, whole, read by torch alone and without a process group."""
    reader = FileSystemReader(checkpoint)
    tensors = {name: torch.full(tuple(entry.size), float("nan"), dtype=entry.properties.dtype)
               for name, entry in reader.read_metadata().state_dict_metadata.items()
               if isinstance(entry, TensorStorageMetadata)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")      # torch warns that there is no process group
        load(tensors, storage_reader=reader, no_dist=True)
    return tensors
