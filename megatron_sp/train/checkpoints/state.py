"""The counters of a run, which a checkpoint stores and a resumed run continues. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass
class TrainState:
    """The progress of a training.

    Attributes:
        iteration: steps done, skipped ones included.
        consumed_samples: sequences read; the next step's samples start here.
        consumed_tokens: tokens read.
        scheduler_samples: sequences of steps that changed the weights; the schedule counts these.
        skipped_iterations, nan_iterations: steps without an update because fp16 overflowed, or because
            something was not finite.
        unlabelled_iterations: steps without an update because no token of the batch had a valid label.
        skipped_in_a_row: steps that were not finite since the last update.
        phase_length: tokens of a sequence in the current phase of ``--seq-length-schedule``; 0 without a schedule.
            Then samples above are counted in samples of ``--seq-length`` tokens.
        phase_first, phase_stop: sample with which the phase began, and the next one begins (0: no next one).
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    scheduler_samples: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0
    unlabelled_iterations: int = 0
    skipped_in_a_row: int = 0
    phase_length: int = 0
    phase_first: int = 0
    phase_stop: int = 0

    def advance(self, samples: int, tokens: int, *, updated: bool, failed: bool) -> None:
        """Count one step.

        Args:
            samples, tokens: size of the step's batch.
            updated: whether the step changed the weights.
            failed: whether the step's loss or gradients were not finite.
        """
        self.iteration += 1
        self.consumed_samples += samples
        self.consumed_tokens += tokens
        if updated:
            self.scheduler_samples += samples
            self.skipped_in_a_row = 0
        elif failed:
            self.skipped_in_a_row += 1

    def to_dict(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainState:
        return cls(**{field.name: int(values[field.name]) for field in fields(cls) if field.name in values})
