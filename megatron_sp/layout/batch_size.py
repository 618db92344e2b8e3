"""How large the global batch is at each point of a run, and how many iterations a number of samples makes."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from megatron_sp.config.schema import Run
from megatron_sp.layout.batch_schedule import parse_batch_schedule


@dataclass(frozen=True)
class BatchSize:
    """Global batch size as a function of the samples consumed so far; it grows in steps.

    Attributes:
        full: the size after the last step; without steps the only one.
        unit: micro-batch-size x data-parallel size. Every size is a multiple of it, rounded down where
            ``--decrease-batch-size-if-needed`` allowed another value.
        ramp: ``(start, increment, samples)``: grow from ``start`` by ``increment`` in equal shares of ``samples``.
        steps: ``(first sample, size)`` of each step, the first from 0; instead of a ramp.
    """

    full: int
    unit: int
    ramp: tuple[int, int, int] | None = None
    steps: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, run: Run) -> BatchSize:
        """Build from a resolved and checked configuration."""
        train, length = run.train, run.data.seq_length
        # Samples of a length schedule are cut into parts, of which microbatches are made.
        unit = 1 if run.data.seq_length_schedule else train.micro_batch_size * run.parallel.dp
        if train.step_batch_size_schedule:
            # a step begins with the first batch that starts after its tokens
            steps = tuple((-(-tokens // length), size)
                          for tokens, size in parse_batch_schedule(train.step_batch_size_schedule))
            return cls(steps[-1][1], unit, steps=steps)
        ramp = (train.rampup_batch_size[0], train.rampup_batch_size[1], train.rampup_batch_size[2]) \
            if train.rampup_batch_size else None
        return cls(train.global_batch_size, unit, ramp)

    def size_steps(self) -> list[tuple[int, int]]:
        """Return ``(first sample, size)`` of each step, with sizes rounded down to multiples of ``unit``."""
        steps = list(self.steps) or [(0, self.full)]
        if self.ramp:
            start, increment, samples = self.ramp
            count = (self.full - start) // increment
            # Megatron's start + increment * int(c / (samples / count)), in whole numbers: no rounding at the edges
            steps = [(-(-step * samples // count) if step else 0, start + increment * step)
                     for step in range(count + 1)]
        return [(first, size // self.unit * self.unit) for first, size in steps]

    @property
    def last(self) -> int:
        """The size after the last step: that of evaluations."""
        return self.size_steps()[-1][1]

    def at(self, consumed_samples: int) -> int:
        """Return the global batch size of the iteration that starts after ``consumed_samples``."""
        steps = self.size_steps()
        return steps[bisect_right(steps, consumed_samples, key=lambda step: step[0]) - 1][1]

    def iterations(self, consumed_samples: int, train_samples: int) -> int:
        """Return the iterations from ``consumed_samples`` until ``train_samples``; a last partial batch is dropped."""
        iterations = 0
        for size, until_next in self._iterations_of_each_size(consumed_samples):
            fitting = max(train_samples - consumed_samples, 0) // size
            if until_next is None or fitting < until_next:
                return iterations + fitting
            iterations += until_next
            consumed_samples += until_next * size
        return iterations

    def samples(self, iterations: int, consumed_samples: int = 0) -> int:
        """Return the samples that ``iterations`` iterations after ``consumed_samples`` consume."""
        total = 0
        for size, until_next in self._iterations_of_each_size(consumed_samples):
            count = iterations if until_next is None else min(iterations, until_next)
            total += count * size
            iterations -= count
        return total

    def _iterations_of_each_size(self, consumed_samples: int) -> list[tuple[int, int | None]]:
        """Return each size from here on, and the number of iterations that have it (None: all further ones)."""
        steps, found = self.size_steps(), []
        for (_, size), (end, _) in zip(steps, steps[1:]):
            count = max(0, -(-(end - consumed_samples) // size))
            found.append((size, count))
            consumed_samples += count * size
        return [*found, (steps[-1][1], None)]
