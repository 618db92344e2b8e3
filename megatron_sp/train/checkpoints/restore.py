"""Load a trained model from a checkpoint, for tools that use it and do not train it further."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_sp import runtime
from megatron_sp.checkpoint import files
from megatron_sp.checkpoint.state_file import read_newest_state, read_part
from megatron_sp.checkpoint.store import load_checkpoint
from megatron_sp.checkpoint.tokenizer_files import with_existing_tokenizer
from megatron_sp.config.resolve import resolve, with_vocab
from megatron_sp.config.rules.sizes import check_parallel
from megatron_sp.config.schema import Memory, Parallel, Precision, Run
from megatron_sp.config.serialize import from_dict
from megatron_sp.errors import CheckpointError, ConfigError
from megatron_sp.model.build import build_model
from megatron_sp.model.gpt import GPT
from megatron_sp.parallel.mesh import ParallelMesh


def read_config(directory: Path, iteration: int | None, *, tp: int = 1) -> Run:
    """Return the configuration of the run that wrote a checkpoint, changed to ``tp`` tensor-parallel processes.

    Args:
        directory: the ``--save`` directory of the training run.
        iteration: the checkpoint's iteration; None for the newest.

    Raises:
        CheckpointError: there is no complete checkpoint.
        ConfigError: the model does not divide over ``tp``.
    """
    found = read_newest_state(directory, iteration)
    if found is None:
        raise CheckpointError(f"--load {directory} holds no checkpoint ({files.TRACKER} is missing); give the --save "
                              "directory of a training run")
    checkpoint, state = found
    saved = read_part(state, "config", from_dict)
    data, notes = with_existing_tokenizer(saved.data, checkpoint.path)
    for note in notes:
        print(note, file=sys.stderr)
    run = replace(saved, data=data, parallel=Parallel(tp=tp), model=replace(saved.model, padded_vocab_size=0),
                  memory=Memory())
    run = resolve(run, world_size=tp)
    if problems := check_parallel(run):
        raise ConfigError(problems)
    return with_vocab(run, saved.model.vocab_size)


def for_device(run: Run) -> Run:
    """Return the run in fp32 on a CPU, where fp32 is faster; unchanged, in the precision of the training, on a GPU."""
    return run if torch.cuda.is_available() else replace(run, precision=Precision())


def load_model(run: Run, directory: Path, iteration: int | None,
               environment: runtime.Environment | None = None) -> GPT:
    """Join the process group, build the model, fill it from the checkpoint and set it to evaluation mode."""
    device = runtime.start(run.parallel, environment or runtime.Environment())
    model = build_model(run, ParallelMesh.build(run.parallel, device))
    assert isinstance(model, GPT)
    state = load_checkpoint(directory, model, None, run, iteration=iteration)
    if state and dist.get_rank() == 0:
        for note in state["notes"]:
            print(f"WARNING: {note}", file=sys.stderr)
    return model.eval()
