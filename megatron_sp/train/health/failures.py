"""What becomes of a step whose loss or gradient norm is not finite: no rank changes its weights, and then?"""

from __future__ import annotations

import math
from collections.abc import Callable

from megatron_sp.config.schema import Run
from megatron_sp.train.health.loss_scale import LossScaler
from megatron_sp.train.state import TrainState

#: Steps in a row without an update after which going on makes no sense. From the default 2^32 they halve a dynamic
#: loss scale to 8; a model that trains finds its scale long before.
MAX_SKIPPED_IN_A_ROW = 30


class Failures:
    """Counts such steps and decides when they end the run. All ranks give it the same numbers.

    Attributes:
        tolerated: whether the run goes on after one.
        last: the last one that was looked into, in words.
    """

    def __init__(self, run: Run, scaler: LossScaler, state: TrainState):
        self.run, self.scaler, self.state = run, scaler, state
        self.tolerated = scaler.dynamic or not run.train.check_for_nan_in_loss_and_grad
        self.last = ""
        self._start = (state.iteration, state.scheduler_samples, scaler.scale)
        if state.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            state.skipped_in_a_row = 0      # the checkpoint of a run that gave up: a resume tries as often again

    def account(self, loss: float, grad_norm: float, describe: Callable[[], str]) -> str:
        """Count the step under way, which failed.

        Args:
            describe: where it came from; a collective that the ranks make where it is worth it.

        Returns:
            a line for the log, or ""
        """
        if self.scaler.dynamic:
            self.state.skipped_iterations += 1
        else:
            self.state.nan_iterations += 1
        ends_series = self.state.skipped_in_a_row + 1 >= MAX_SKIPPED_IN_A_ROW
        if self.scaler.dynamic and math.isfinite(loss) and not ends_series:
            return ""       # how a scale looks that is too high; the scale does not touch the loss
        self.last = f"iteration {self.state.iteration + 1}: loss {loss:g}, gradient norm {grad_norm:g}. {describe()}"
        return f"WARNING: {self.last}; the step is left out" if self.tolerated else ""

    def fatal(self) -> str:
        """After a step that failed: why the run must end, with advice, or ""."""
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

    def at_end(self) -> str:
        """At the end of a run: a warning when no step of it changed the weights, or ""."""
        iteration, samples, scale = self._start
        steps = self.state.iteration - iteration
        if not steps or self.state.scheduler_samples > samples:
            return ""
        cure = "look at the warnings above"
        if self.scaler.dynamic:
            cure = (f"the loss scale went from {scale:g} to {self.scaler.scale:g}; train longer, or give a lower "
                    "--initial-loss-scale")
        return (f"WARNING: none of the {steps} steps of this run changed the weights, their loss or gradients were not "
                f"finite: {cure}")

    def _static_scale(self) -> str:
        static = self.run.precision.fp16 and not self.scaler.dynamic
        return f"lower --loss-scale than {self.scaler.scale:g} (or none, for a dynamic one), a " if static else ""
