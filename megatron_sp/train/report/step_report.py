"""The values that describe one training step, their sums over an interval, and Megatron's log line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepReport:
    """One training step. All ranks have the same values, except ``step_time``.

    Attributes:
        iteration, consumed_samples, consumed_tokens: counters after the step.
        first_sample: global id of the first sample of the batch.
        global_batch_size: samples of the batch.
        lm_loss: mean loss per valid token in nats; NaN when the batch has no valid token.
        grad_norm: global norm of the gradient before clipping, without the loss scale.
        learning_rate: the rate of this step.
        step_time: seconds, data reading included.
        num_valid: number of tokens of the batch that have a valid label.
        loss_scale: the fp16 loss scale of this step.
        skipped: no update, because fp16 overflowed.
        nan: no update, because loss or gradient norm is not finite.
        extra: further values by name (params_norm, num_zeros, optimizer/...).
        attention_share: work of attention, relative to sequences of one document each.
        seq_length: tokens of each of the batch's samples in a phase of ``--seq-length-schedule``; 0 without a schedule.
    """

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    first_sample: int
    global_batch_size: int
    lm_loss: float
    grad_norm: float
    learning_rate: float
    step_time: float
    num_valid: int
    loss_scale: float
    skipped: bool = False
    nan: bool = False
    extra: dict[str, float] = field(default_factory=dict)
    attention_share: float = 1.0
    seq_length: int = 0

    @property
    def has_failed(self) -> bool:
        """Whether loss or gradients were not finite, so that no weight changed."""
        return self.skipped or self.nan

    @property
    def lacks_labels(self) -> bool:
        """Whether no token of the batch has a valid label, so that there is no loss and no weight changed."""
        return self.num_valid == 0


@dataclass
class Interval:
    """Sums over the steps since the last log line.

    Attributes:
        num_losses, loss: number and sum of the finite losses. A step skipped because fp16 gradients overflowed has a
            finite loss, which is included.
        unlabelled: steps whose batch had no valid label.
        attention: sum over the samples of the work of attention, relative to sequences of one document each.
    """

    steps: int = 0
    num_losses: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    samples: int = 0
    skipped: int = 0
    nans: int = 0
    unlabelled: int = 0
    attention: float = 0.0

    def add(self, step: StepReport) -> None:
        self.steps += 1
        self.seconds += step.step_time
        self.samples += step.global_batch_size
        self.skipped += step.skipped
        self.nans += step.nan
        self.unlabelled += step.lacks_labels
        self.attention += step.attention_share * step.global_batch_size
        if math.isfinite(step.lm_loss):
            self.num_losses += 1
            self.loss += step.lm_loss

    @property
    def mean_loss(self) -> float:
        """Return the mean of the finite losses; NaN when there is none."""
        return self.loss / self.num_losses if self.num_losses else math.nan

    @property
    def attention_share(self) -> float:
        """Return the mean over the samples of the work of attention."""
        return self.attention / self.samples

    @property
    def mean_seconds(self) -> float:
        return self.seconds / self.steps


def log_line(step: StepReport, interval: Interval, last_iteration: int, *,
             speed: Mapping[str, float] | None = None) -> str:
    """Write Megatron's log line. Loss, time and speed are means over the interval, the rest is the last step's.

    Args:
        step: the last step.
        interval: the steps since the last log line, this one included.
        last_iteration: where training ends.
        speed: ``Recorder.speed`` of the interval, for ``--log-throughput``.
    """
    parts = [f" iteration {step.iteration:8d}/{last_iteration:8d}",
             f"consumed samples: {step.consumed_samples:12d}",
             f"elapsed time per iteration (ms): {1000 * interval.mean_seconds:.1f}"]
    if speed:
        parts += [f"throughput per GPU (TFLOP/s/GPU): {speed['tflops_per_device']:.1f}",
                  f"tokens per second: {speed['tokens_per_s']:.0f}"]
        parts += [f"{name.upper()}: {100 * speed[name]:.1f}%" for name in ("mfu", "hfu") if name in speed]
    parts += [f"learning rate: {step.learning_rate:.6E}", f"global batch size: {step.global_batch_size:5d}",
              *([f"sequence length: {step.seq_length:5d}"] if step.seq_length else []),
              f"lm loss: {interval.mean_loss:.6E}", f"loss scale: {step.loss_scale:.1f}",
              f"grad norm: {step.grad_norm:.3f}"]
    # "optimizer/..." statistics are left out, because they would make the line unreadable. metrics.jsonl has them.
    parts += [f"{name.replace('_', ' ')}: {value:.3f}" for name, value in step.extra.items() if "/" not in name]
    parts += [f"number of skipped iterations: {interval.skipped:3d}", f"number of nan iterations: {interval.nans:3d}"]
    if interval.unlabelled:
        parts.append(f"number of iterations without labels: {interval.unlabelled:3d}")
    return " | ".join(parts) + " |"
