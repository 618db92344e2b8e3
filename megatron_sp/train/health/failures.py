"""Count steps that change no weight, and decide when they end the run."""

from __future__ import annotations

import math
from collections.abc import Callable

from megatron_sp.config.schema import Run
from megatron_sp.train.checkpoints.state import TrainState
from megatron_sp.train.health.loss_scale import LossScaler

#: The run ends after this many steps in a row whose loss or gradients are not finite. Each such step halves a dynamic
#: loss scale, so 30 of them bring it from the default of 2^24 to its minimum of 1. A working model needs fewer.
MAX_SKIPPED_IN_A_ROW = 30


class Failures:
    """Counts failed steps, which change no weight because loss or gradient norm is not finite.

    All ranks pass the same numbers, so all ranks decide alike.

    Attributes:
        tolerated: whether the run goes on after a failed step.
        last: a description of the last failed step, except for ordinary overflows of the loss scale.
    """

    def __init__(self, run: Run, scaler: LossScaler, state: TrainState):
        self.run, self.scaler, self.state = run, scaler, state
        self.tolerated = scaler.dynamic or not run.train.check_for_nan_in_loss_and_grad
        self.last = ""
        self._start = (state.iteration, state.scheduler_samples, scaler.scale)
        self._num_unlabelled = 0
        if state.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            state.skipped_in_a_row = 0      # the run that saved this checkpoint gave up; the resumed one tries again

    def count_failed_step(self, loss: float, grad_norm: float, describe: Callable[[], str]) -> str:
        """Count the current step, whose loss or gradient norm is not finite.

        Args:
            describe: returns where the number came from. It communicates between all ranks, so it is not called for
                an ordinary overflow of the loss scale.

        Returns:
            a line for the log, or "".
        """
        if self.scaler.dynamic:
            self.state.skipped_iterations += 1
        else:
            self.state.nan_iterations += 1
        ends_series = self.state.skipped_in_a_row + 1 >= MAX_SKIPPED_IN_A_ROW
        if self.scaler.dynamic and math.isfinite(loss) and not ends_series:
            return ""       # an ordinary overflow: the loss is finite, only the scaled gradients exceed fp16
        self.last = f"iteration {self.state.iteration + 1}: loss {loss:g}, gradient norm {grad_norm:g}. {describe()}"
        return f"WARNING: {self.last}; the step is left out" if self.tolerated else ""

    def count_unlabelled_step(self, first_sample: int, samples: int) -> str:
        """Count the current step, whose batch has no valid label; return a warning the first time, else ""."""
        self.state.unlabelled_iterations += 1
        self._num_unlabelled += 1
        if self._num_unlabelled > 1:
            return ""
        return (f"WARNING: iteration {self.state.iteration + 1}: no token of the batch (samples {first_sample} to "
                f"{first_sample + samples - 1}) has a label, because --eod-mask-loss masks all of them. There is no "
                "loss and the weights stay as they are; the log counts such iterations")

    def reason_to_end(self) -> str:
        """Return why the run must end after the failed step just counted, with advice; "" when it may go on."""
        if not self.tolerated:
            return (f"{self.last}. Weights are as they were before this step. Try a {self._static_scale()}lower --lr, "
                    "a longer warm-up or --clip-grad; --no-check-for-nan-in-loss-and-grad skips such steps instead")
        count = self.state.skipped_in_a_row
        if count < MAX_SKIPPED_IN_A_ROW:
            return ""
        return (f"the last {count} steps changed nothing, their loss or gradients were not finite; loss scale "
                f"{self.scaler.scale:g}. The last one is {self.last}. Try a {self._static_scale()}lower --lr, "
                f"{'--bf16 instead of --fp16, ' if self.run.precision.fp16 else ''}"
                "or go back to an earlier checkpoint with --ckpt-step")

    def warning_at_end(self) -> str:
        """Return a warning for the end of the run when none of its steps changed the weights, else ""."""
        iteration, samples, scale = self._start
        steps = self.state.iteration - iteration
        if not steps or self.state.scheduler_samples > samples:
            return ""
        if self._num_unlabelled == steps:
            return (f"WARNING: none of the {steps} steps of this run changed the weights, because no token of their "
                    "batches had a label: look at the data, or leave out --eod-mask-loss")
        cure = "look at the warnings above"
        if self.scaler.dynamic:
            cure = (f"the loss scale went from {scale:g} to {self.scaler.scale:g}; train longer, or give a lower "
                    "--initial-loss-scale")
        return (f"WARNING: none of the {steps} steps of this run changed the weights, their loss or gradients were not "
                f"finite: {cure}")

    def _static_scale(self) -> str:
        static = self.run.precision.fp16 and not self.scaler.dynamic
        return f"lower --loss-scale than {self.scaler.scale:g} (or none, for a dynamic one), a " if static else ""
