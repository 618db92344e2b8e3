"""TensorBoard and Weights & Biases: opened when asked for. Imports neither them nor torch before that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_sp.config.schema import Logging, Run
from megatron_sp.config.serialize import to_dict


def open_tensorboard(flags: Logging, start_iteration: int) -> Any:
    """A SummaryWriter, or None. On resume, points after ``start_iteration`` are dropped from view."""
    if not flags.tensorboard_dir:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(flags.tensorboard_dir, max_queue=flags.tensorboard_queue_size,
                         purge_step=start_iteration + 1 if start_iteration else None)


def open_wandb(run: Run) -> Any:
    """A Weights & Biases run, or None."""
    flags = run.logging
    if not flags.wandb_project:
        return None
    import wandb

    directory = flags.wandb_save_dir or str(Path(run.checkpoint.save or ".") / "wandb")
    Path(directory).mkdir(parents=True, exist_ok=True)
    return wandb.init(project=flags.wandb_project, name=flags.wandb_exp_name or None,
                      entity=flags.wandb_entity or None, dir=directory, config=to_dict(run))
