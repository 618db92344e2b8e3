"""A trained model out of a checkpoint, for tools that read it and train no further."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from megatron_sp import runtime
from megatron_sp.checkpoint import files
from megatron_sp.checkpoint.store import load_checkpoint
from megatron_sp.config.resolve import resolve, with_vocab
from megatron_sp.config.rules.sizes import check_parallel
from megatron_sp.config.schema import Memory, Parallel, Precision, Run
from megatron_sp.config.serialize import from_dict
from megatron_sp.errors import CheckpointError, ConfigError
from megatron_sp.model.build import build_model
from megatron_sp.model.gpt import GPT
from megatron_sp.parallel.mesh import ParallelMesh


def read_config(directory: Path, iteration: int | None, *, tp: int = 1) -> Run:
    """The run that wrote the newest checkpoint (or that of one iteration), laid out anew: ``tp`` processes, no more.

    Raises:
        CheckpointError: there is no complete checkpoint.
        ConfigError: the model does not divide over ``tp``.
    """
    path = files.find_checkpoint(directory, iteration)
    if path is None:
        raise CheckpointError(f"--load {directory} holds no checkpoint ({files.TRACKER} is missing); give the --save "
                              "directory of a training run")
    saved = from_dict(files.read_state(path)["config"])
    run = replace(saved, parallel=Parallel(tp=tp), model=replace(saved.model, padded_vocab_size=0), memory=Memory())
    run = resolve(run, world_size=tp)
    if problems := check_parallel(run):
        raise ConfigError(problems)
    return with_vocab(run, saved.model.vocab_size)


def for_device(run: Run) -> Run:
    """In fp32 on a CPU, where it is faster; in the precision of the training on a GPU."""
    return run if torch.cuda.is_available() else replace(run, precision=Precision())


def load_model(run: Run, directory: Path, iteration: int | None,
               environment: runtime.Environment | None = None) -> GPT:
    """Join the process group, build the model and fill it; in evaluation mode."""
    device = runtime.start(run.parallel, environment or runtime.Environment())
    model = build_model(run, ParallelMesh.build(run.parallel, device))
    assert isinstance(model, GPT)
    load_checkpoint(directory, model, None, run, iteration=iteration)
    return model.eval()
