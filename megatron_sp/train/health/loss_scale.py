"""The loss scale, a factor that keeps fp16 gradients inside the range of the format. Imports no torch."""

from __future__ import annotations

from typing import Any

from megatron_sp.config.schema import Precision


class LossScaler:
    """A constant or dynamic loss scale.

    A dynamic scale is halved when gradients overflow, but not below ``minimum`` and not at the first ``hysteresis`` - 1
    overflows. After ``window`` steps in a row without overflow it is doubled, and the next ``hysteresis`` - 1 overflows
    are tolerated again.
    """

    def __init__(self, precision: Precision):
        self.dynamic = precision.fp16 and not precision.loss_scale
        self.scale = 1.0
        if precision.fp16:
            self.scale = precision.loss_scale or precision.initial_loss_scale
        self.minimum = precision.min_loss_scale
        self.window = precision.loss_scale_window
        self.hysteresis = precision.hysteresis
        self.tolerance = self.hysteresis
        self.quiet_steps = 0

    def update(self, overflow: bool) -> None:
        """Adapt a dynamic scale after a step.

        Args:
            overflow: whether the step's gradients were not finite.
        """
        if not self.dynamic:
            return
        if overflow:
            self.quiet_steps = 0
            self.tolerance -= 1
            if self.tolerance <= 0:
                self.scale = max(self.scale / 2.0, self.minimum)
            return
        self.quiet_steps += 1
        if self.quiet_steps == self.window:
            self.quiet_steps = 0
            self.tolerance = self.hysteresis
            self.scale *= 2.0

    def state_dict(self) -> dict[str, Any]:
        return {"dynamic": self.dynamic, "scale": self.scale, "tolerance": self.tolerance,
                "quiet_steps": self.quiet_steps}

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """Continue the checkpoint's dynamic scale, if this run's scale is dynamic, too.

        In all other cases the scale stays as the command line says.

        Returns:
            a sentence for the log when this run's scale is dynamic and the checkpoint's was not, else ""
        """
        if not self.dynamic:
            return ""
        if not state.get("dynamic", True):      # older checkpoints lack the entry
            return (f"the checkpoint's run had no dynamic loss scale; it starts from --initial-loss-scale "
                    f"{self.scale:g}")
        self.scale = float(state["scale"])
        self.tolerance = int(state["tolerance"])
        self.quiet_steps = int(state["quiet_steps"])
        return ""
