"""When the trainer saves, what it says about it, and what happens when a save fails."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron_sp.checkpoint.saving.saver import Saved, SaveError, Saver
from megatron_sp.config.schema import Run
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.train.checkpoints.state import TrainState
from megatron_sp.train.report.recorder import Recorder

#: Seconds that a run which ends with an error waits for a save that is under way.
PATIENCE = 300.0


class Checkpoints:
    """The checkpoints that a run saves; none without ``--save``. All ranks call the methods together.

    Args:
        state: the counters of the run.
    """

    def __init__(self, run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: ParallelMesh,
                 state: TrainState, recorder: Recorder):
        self.flags, self.state, self.recorder = run.checkpoint, state, recorder
        self.saved_iteration = state.iteration
        self._saver: Saver | None = None
        self._failure, self._samples = "", state.consumed_samples
        if run.checkpoint.save and not run.train.skip_train:
            group = mesh.new_background_group() if run.checkpoint.async_save else None
            self._saver = Saver(run.checkpoint.save, model, optimizer, run, group)

    def save(self, content: dict[str, Any], *, is_last: bool) -> None:
        """Save a checkpoint, if this iteration is not saved yet.

        With ``--async-save`` training waits only until its state is copied, and for the save before, if that is still
        under way. The last checkpoint of a run is complete when this returns.

        Args:
            content: the plain part of the checkpoint (see ``Saver.save``).
            is_last: whether training ends here.

        Raises:
            SaveError: it could not be written, and ``--on-save-failure`` is stop or training ends here.
        """
        saver = self._saver
        if saver is None:
            return
        with self.recorder.timers("save", occasional=True):
            self._finish()
            if self._failure:
                raise SaveError(self._failure)
            if self.saved_iteration == self.state.iteration:
                return
            try:
                self._samples = self.state.consumed_samples
                saved = saver.save(self.state.iteration, content, wait=is_last or not self.flags.async_save)
            except SaveError as error:
                self._failed(error, is_last=is_last)
                return
        self.saved_iteration = self.state.iteration
        if saved:
            self._say(saved)

    def after_step(self) -> None:
        """Report a background save that has ended. It does not wait, and does nothing else.

        When the save failed and ``--on-save-failure`` is stop, ``vote`` tells the other ranks in the next step.
        """
        if self._saver is not None and self._saver.poll():
            self._finish(wants_vote=True)

    def vote(self) -> float:
        """Return 1 when a background save has failed and the run must end for it, else 0."""
        return float(bool(self._failure))

    def give_up(self) -> None:
        """Raise the error of the background save for which a rank has voted.

        Raises:
            SaveError: on all ranks.
        """
        self._finish(wants_vote=True)
        raise SaveError(self._failure)

    def abandon(self) -> None:
        """Wait a while for a save that is under way, when the run ends with an error. Other ranks may be gone."""
        if self._saver is None or self._saver.pending is None:
            return
        self.recorder.say(f"waiting for the save of iteration {self._saver.pending}, at most {PATIENCE:g} s")
        iteration = self._saver.pending
        try:
            saved = self._saver.finish(PATIENCE)
        except Exception as error:      # the run ends with another error already, which may be the cause of this one
            self.recorder.say(f"WARNING: the save of iteration {iteration} failed: {error}")
            return
        if saved:
            self._say(saved)

    def _finish(self, *, wants_vote: bool = False) -> None:
        """Wait for the save that is under way, if there is one, and report it.

        Args:
            wants_vote: keep a failure for ``vote`` instead of raising it, because only this rank knows of it yet.
        """
        assert self._saver is not None
        try:
            saved = self._saver.finish()
        except SaveError as error:
            self.saved_iteration = -1
            if wants_vote and self.flags.on_save_failure == "stop":
                self._failure = str(error)
                return
            self._failed(error, is_last=False)
            return
        if saved:
            self._say(saved)

    def _failed(self, error: SaveError, *, is_last: bool) -> None:
        if is_last or self.flags.on_save_failure == "stop":
            raise error
        self.recorder.say(f"WARNING: {error}. Training goes on (--on-save-failure continue); the checkpoint before "
                          "stays in force until a save succeeds")

    def _say(self, saved: Saved) -> None:
        waited = f", of which training waited {saved.blocked:.1f} s" if self.flags.async_save else ""
        self.recorder.say(f"saved {saved.path} in {saved.seconds:.1f} s{waited}")
        for note in saved.notes:
            self.recorder.say(note)
        self.recorder.progress(f"saved iteration {saved.iteration}, {self._samples} samples")
