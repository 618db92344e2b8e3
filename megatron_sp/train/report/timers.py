"""Time of the named parts of a step, and how it is told."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


class Timers:
    """Time of the named parts of steps, and of what happens now and then between them (``--timing-log-level``).

    At level 0 nothing is measured. Above, the device is waited for at both ends of each part, so that
    a part's time is its own. In a profiler's trace the parts have these names at every level.
    """

    def __init__(self, level: int = 0, device: torch.device | None = None):
        self.level, self.device = level, device or torch.device("cpu")
        self._step: dict[str, float] = {}                # seconds, of the step under way
        self._steps: dict[str, float] = {}               # of the steps since the last ``take``
        self._occasions: dict[str, list[float]] = {}     # each one's, since the last ``take``
        self._latest: dict[str, float] = {}              # the last one's, since the last ``latest_occasions``

    @contextmanager
    def __call__(self, name: str, level: int = 1, *, occasional: bool = False) -> Iterator[None]:
        """Measure the block when ``--timing-log-level`` is at least ``level``.

        Args:
            occasional: not a part of every step (a save, say): counts by itself.
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
        """Seconds of each part of the step that ends here."""
        step, self._step = self._step, {}
        for name, seconds in step.items():
            self._steps[name] = self._steps.get(name, 0.0) + seconds
        return step

    def latest_occasions(self) -> dict[str, float]:
        """Seconds of what happened between steps since the last call, the last one's of each name."""
        latest, self._latest = self._latest, {}
        return latest

    def take(self, steps: int) -> dict[str, float]:
        """Milliseconds of each part per step, and of what happened between steps per occasion; and start again."""
        times = {name: 1000 * seconds / steps for name, seconds in self._steps.items()}
        times |= {name: 1000 * sum(each) / len(each) for name, each in self._occasions.items()}
        self._steps, self._occasions = {}, {}
        return times


def gather_times(own: dict[str, float]) -> dict[str, list[float]]:
    """Every rank's milliseconds by part, in rank order; all ranks call it. Parts that a rank lacks count 0."""
    gathered = [own]
    if dist.is_initialized() and dist.get_world_size() > 1:
        gathered = [{}] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
    names = dict.fromkeys(name for times in gathered for name in times)
    return {name: [times.get(name, 0.0) for times in gathered] for name in names}


def times_in_words(times: dict[str, list[float]], option: str) -> str:
    """One line of the parts' milliseconds.

    Args:
        option: ``max`` the slowest rank's, ``minmax`` fastest and slowest rank's, ``all`` each rank's.
    """
    def show(values: list[float]) -> str:
        if option == "all":
            return " ".join(f"{value:.2f}" for value in values)
        return f"{max(values):.2f}" if option == "max" else f"{min(values):.2f} {max(values):.2f}"

    of_ranks = {"max": ", max over ranks", "minmax": ", min and max over ranks", "all": ", by rank"}[option]
    if all(len(values) == 1 for values in times.values()):
        option, of_ranks = "max", ""
    return f"times (ms{of_ranks}) | " + " | ".join(f"{name}: {show(values)}" for name, values in times.items())
