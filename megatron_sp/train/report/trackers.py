"""Open TensorBoard and Weights & Biases when flags ask for them; they and torch are imported only then."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_sp.checkpoint.writing import write_durably
from megatron_sp.config.schema import Run
from megatron_sp.config.serialize import to_dict
from megatron_sp.errors import ConfigError
from megatron_sp.train.checkpoints.state import TrainState

#: File beside the checkpoints with the id of the run on Weights & Biases.
WANDB_ID = "wandb_run_id"


class TensorBoard:
    """Write each value twice: by iteration, and by consumed samples as ``NAME vs samples``.

    A resumed run hides older points of the steps that it repeats. TensorBoard can hide points of a directory only from
    one step number on, for all its curves. Iterations and samples are different numbers, so the curves by samples have
    a directory of their own, ``DIR/samples``.
    """

    def __init__(self, directory: str, queue_size: int, resumed_at: tuple[int, int] | None):
        """
        Args:
            directory: value of ``--tensorboard-dir``.
            queue_size: pending events.
            resumed_at: iteration and consumed samples after which older points are hidden; None: hide nothing.

        Raises:
            ConfigError: the directory cannot be written.
        """
        from torch.utils.tensorboard import SummaryWriter

        self.directory = directory
        first_iteration, first_sample = (count + 1 for count in resumed_at) if resumed_at else (None, None)
        try:
            self._by_iteration = SummaryWriter(directory, max_queue=queue_size, purge_step=first_iteration)
            self._by_samples = SummaryWriter(str(Path(directory) / "samples"), max_queue=queue_size,
                                             purge_step=first_sample)
        except OSError as error:
            raise ConfigError(f"--tensorboard-dir {directory} cannot be written ({error.strerror}); give a directory "
                              "with write permission and free space") from None

    def add(self, values: Mapping[str, float], iteration: int, consumed_samples: int) -> None:
        """Add one point for each value. Raises OSError when events can no longer be written."""
        for name, value in values.items():
            self._by_iteration.add_scalar(name, value, iteration)
            self._by_samples.add_scalar(f"{name} vs samples", value, consumed_samples)

    def close(self) -> None:
        self._by_iteration.close()
        self._by_samples.close()


def open_tensorboard(run: Run, state: TrainState) -> TensorBoard | None:
    """Open TensorBoard, if ``--tensorboard-dir`` is given. A run that only evaluates hides no earlier points."""
    flags = run.logging
    if not flags.tensorboard_dir:
        return None
    makes_steps_again = state.iteration > 0 and not run.train.skip_train
    return TensorBoard(flags.tensorboard_dir, flags.tensorboard_queue_size,
                       (state.iteration, state.consumed_samples) if makes_steps_again else None)


def open_wandb(run: Run, state: TrainState) -> Any:
    """Start a Weights & Biases run, or continue the one of ``--save``, if ``--wandb-project`` is given.

    The run's id is in ``SAVE/wandb_run_id``. A training that starts at iteration 0 is a new run and replaces the id.

    Raises:
        ConfigError: its directory or the file with its id cannot be written.
    """
    flags, save = run.logging, run.checkpoint.save
    if not flags.wandb_project:
        return None
    import wandb

    directory = flags.wandb_save_dir or str(Path(save or ".") / "wandb")
    id_file = Path(save) / WANDB_ID if save else None
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        known = id_file.read_text().strip() if id_file and state.iteration and id_file.is_file() else ""
    except OSError as error:
        raise ConfigError(f"the Weights & Biases directory {directory} cannot be made ({error.strerror}); give "
                          "--wandb-save-dir a directory with write permission") from None
    started = wandb.init(project=flags.wandb_project, name=flags.wandb_exp_name or None,
                         entity=flags.wandb_entity or None, dir=directory, config=to_dict(run), id=known or None,
                         resume="allow")
    if id_file and started.id != known:
        try:
            id_file.parent.mkdir(parents=True, exist_ok=True)
            write_durably(id_file, f"{started.id}\n")
        except OSError as error:
            raise ConfigError(f"{id_file} cannot be written ({error.strerror}); give --save a directory with write "
                              "permission and free space") from None
    return started
