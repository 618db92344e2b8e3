"""Learning rate and weight decay as pure functions of the number of samples.

Everything is counted in **samples** (sequences). Flags in iterations are converted to the samples that these iterations
read, flags in tokens are divided by ``--seq-length``. So the learning rate depends on the data read so far, also when
the batch size changes during training.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_sp.config.schema import Run
from megatron_sp.layout.batch_size import BatchSize


class _HasGroups(Protocol):
    param_groups: list[dict[str, Any]]


@dataclass(frozen=True)
class Schedule:
    """The schedule flags, converted to samples. Every checkpoint stores it, and a resumed run compares it.

    ``decay_samples`` is the length of warm-up and decay together. It is a float, because a length in tokens need not be
    a multiple of the sequence length.
    """

    style: str
    peak: float
    minimum: float
    warmup_start: float
    warmup_samples: float
    decay_samples: float
    final_style: str
    final_samples: float
    weight_decay_style: str
    weight_decay_start: float
    weight_decay_end: float
    weight_decay_samples: float

    @classmethod
    def of(cls, run: Run) -> Schedule:
        """Build the schedule of a resolved configuration."""
        flags = run.schedule
        horizon = run.train.train_samples or BatchSize.of(run).samples(run.train.train_iters)
        decay = _samples(flags.lr_decay_tokens, flags.lr_decay_samples, flags.lr_decay_iters, run) or float(horizon)
        warmup = (flags.lr_warmup_fraction * decay if flags.lr_warmup_fraction else
                  _samples(flags.lr_warmup_tokens, flags.lr_warmup_samples, flags.lr_warmup_iters, run))
        constant = run.optimizer.weight_decay
        start, end = run.optimizer.start_weight_decay, run.optimizer.end_weight_decay
        return cls(
            style=flags.lr_decay_style, peak=flags.lr, minimum=flags.min_lr, warmup_start=flags.lr_warmup_init,
            warmup_samples=warmup, decay_samples=decay, final_style=flags.lr_wsd_decay_style,
            final_samples=_final_samples(flags.lr_wsd_decay_samples, flags.lr_wsd_decay_iters, run),
            weight_decay_style=run.optimizer.weight_decay_incr_style,
            weight_decay_start=start if start >= 0 else constant,
            weight_decay_end=end if end >= 0 else constant, weight_decay_samples=float(horizon))

    def lr(self, samples: float) -> float:
        """Return the learning rate of the step that starts after ``samples`` samples.

        The rate rises linearly from ``warmup_start`` to the peak. Then it decays in the way that ``style`` names. After
        ``decay_samples`` it is the minimum. With the style "constant" it stays at the peak.
        """
        if 0 < self.warmup_samples and samples <= self.warmup_samples:
            return self.warmup_start + (self.peak - self.warmup_start) * samples / self.warmup_samples
        if self.style == "constant":
            return self.peak
        if samples > self.decay_samples:
            return self.minimum
        if self.style == "inverse-square-root":
            rate = self.peak * math.sqrt(max(self.warmup_samples, 1)) / math.sqrt(max(samples, 1))
            return max(self.minimum, rate)
        return self.minimum + self._share_of_peak(samples) * (self.peak - self.minimum)

    def _share_of_peak(self, samples: float) -> float:
        """Return the learning rate's height above the minimum, as a share of (peak - minimum)."""
        if self.style == "WSD":
            start = self.decay_samples - self.final_samples
            if samples <= start:
                return 1.0
            return _final_share_of_peak(self.final_style, (samples - start) / self.final_samples)
        length = self.decay_samples - self.warmup_samples
        ratio = (samples - self.warmup_samples) / length if length else 0.0
        return 1.0 - ratio if self.style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1.0)

    def weight_decay(self, samples: float) -> float:
        """Return the weight decay of the step that starts after ``samples`` samples."""
        if self.weight_decay_style == "constant" or samples > self.weight_decay_samples:
            return self.weight_decay_end
        ratio = samples / self.weight_decay_samples
        if self.weight_decay_style == "cosine":
            ratio = 0.5 * (math.cos(math.pi * (1.0 - ratio)) + 1.0)
        return self.weight_decay_start + ratio * (self.weight_decay_end - self.weight_decay_start)

    def apply(self, optimizer: _HasGroups, samples: float) -> float:
        """Set learning rate and weight decay of the next step in the optimizer's groups; return the learning rate.

        Groups with ``decay=False`` keep a weight decay of 0.
        """
        lr, weight_decay = self.lr(samples), self.weight_decay(samples)
        for group in optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = weight_decay if group["decay"] else 0.0
        return lr

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Schedule:
        return cls(**values)

    def differences(self, other: Schedule) -> list[str]:
        """Return the names of the fields in which two schedules differ, without fields that have no effect here."""
        unused: set[str] = set()
        if self.style == "constant":
            unused |= {"minimum", "decay_samples"}
        if self.style != "WSD":
            unused |= {"final_style", "final_samples"}
        if not self.warmup_samples:
            unused |= {"warmup_start"}
        if self.weight_decay_style == "constant":
            unused |= {"weight_decay_start", "weight_decay_samples"}
        mine, theirs = self.to_dict(), other.to_dict()
        return [name for name in mine if name not in unused and mine[name] != theirs[name]]


def _samples(tokens: int, samples: int, iterations: int, run: Run) -> float:
    """Return a length given in tokens, samples or iterations (at most one is not 0) in samples; 0.0 when none is."""
    if tokens:
        return tokens / run.data.seq_length
    return float(samples or BatchSize.of(run).samples(iterations))


def _final_samples(samples: int, iterations: int, run: Run) -> float:
    """Return the length of WSD's final decay in samples.

    Args:
        samples, iterations: the length as given, one of them 0. Iterations are the last ones before
            ``--lr-decay-iters``, so they are converted with the batch size of that time, not with the one at the start.
    """
    batch, horizon = BatchSize.of(run), run.schedule.lr_decay_iters
    return float(samples or batch.samples(horizon) - batch.samples(max(horizon - iterations, 0)))


def _final_share_of_peak(style: str, ratio: float) -> float:
    """Return the share of (peak - minimum) during WSD's final decay: 1 at ratio 0, 0 at ratio 1."""
    if style == "linear":
        return 1.0 - ratio
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * ratio) + 1.0)
    if style == "minus_sqrt":
        return 1.0 - math.sqrt(ratio)
    return 2.0 * 0.5**ratio - 1.0
