"""Measure the time of named parts of a training step, and format the times for the log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


class Timers:
    """Measures named parts of steps, and occasions between steps such as saves (``--timing-log-level``).

    At level 0 nothing is measured. Above, the device is synchronized before and after each part, so that its time
    includes its own kernels and no others. In a profiler's trace the parts have these names at every level.
    """

    def __init__(self, level: int = 0, device: torch.device | None = None):
        self.level, self.device = level, device or torch.device("cpu")
        self._step: dict[str, float] = {}                # seconds of each part of the current step
        self._steps: dict[str, float] = {}               # seconds of each part, summed since the last ``take``
        self._occasions: dict[str, list[float]] = {}     # seconds of every occasion since the last ``take``
        self._latest: dict[str, float] = {}              # seconds of the last occasion of each name

    @contextmanager
    def __call__(self, name: str, level: int = 1, *, occasional: bool = False) -> Iterator[None]:
        """Measure the block when ``--timing-log-level`` is at least ``level``.

        Args:
            occasional: whether the block is not a part of every step, such as a save. Its times are averaged over
                occasions, and not over steps.
        """
        with torch.profiler.record_function(name):
            if self.level < level:
                yield
                return
            self._wait()
            start = time.perf_counter()
            yield
            self._wait()
            seconds = time.perf_counter() - start
            if occasional:
                self._occasions.setdefault(name, []).append(seconds)
                self._latest[name] = seconds
            else:
                self._step[name] = self._step.get(name, 0.0) + seconds

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def end_step(self) -> dict[str, float]:
        """Return the seconds of each part of the step that ends now, and start the next step."""
        step, self._step = self._step, {}
        for name, seconds in step.items():
            self._steps[name] = self._steps.get(name, 0.0) + seconds
        return step

    def latest_occasions(self) -> dict[str, float]:
        """Return the seconds of the last occasion of each name, among those since the last call."""
        latest, self._latest = self._latest, {}
        return latest

    def take(self, steps: int) -> dict[str, float]:
        """Return the mean milliseconds of each part per step and of each kind of occasion, and reset the sums.

        Args:
            steps: number of steps since the last call.
        """
        times = {name: 1000 * seconds / steps for name, seconds in self._steps.items()}
        times |= {name: 1000 * sum(seconds) / len(seconds) for name, seconds in self._occasions.items()}
        self._steps, self._occasions = {}, {}
        return times


def gather_times(own: dict[str, float]) -> dict[str, list[float]]:
    """Return for each part the milliseconds of all ranks, in rank order; 0 for a rank without the part.

    All ranks call it.
    """
    gathered = [own]
    if dist.is_initialized() and dist.get_world_size() > 1:
        gathered = [{}] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
    names = dict.fromkeys(name for times in gathered for name in times)
    return {name: [times.get(name, 0.0) for times in gathered] for name in names}


def times_in_words(times: dict[str, list[float]], option: str) -> str:
    """Return one line with the milliseconds of all parts.

    Args:
        option: "max" shows the slowest rank, "minmax" the fastest and the slowest rank, "all" every rank.
    """
    def show(values: list[float]) -> str:
        if option == "all":
            return " ".join(f"{value:.2f}" for value in values)
        return f"{max(values):.2f}" if option == "max" else f"{min(values):.2f} {max(values):.2f}"

    of_ranks = {"max": ", max over ranks", "minmax": ", min and max over ranks", "all": ", by rank"}[option]
    if all(len(values) == 1 for values in times.values()):
        option, of_ranks = "max", ""
    return f"times (ms{of_ranks}) | " + " | ".join(f"{name}: {show(values)}" for name, values in times.items())
