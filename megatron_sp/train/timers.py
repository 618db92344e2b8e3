"""Time of the named parts of a step, and how it is told."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


class Timers:
    """Time of the named parts of a step (``--timing-log-level``), summed since the last log line.

    At level 0 nothing is measured. Above, the device is waited for at both ends of each part, so that
    a part's time is its own. In a profiler's trace the parts have these names at every level.
    """

    def __init__(self, level: int = 0, device: torch.device | None = None):
        self.level, self.device = level, device or torch.device("cpu")
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str, level: int = 1) -> Iterator[None]:
        """Measure the block when ``--timing-log-level`` is at least ``level``."""
        with torch.profiler.record_function(name):
            if self.level < level:
                yield
                return
            self._wait()
            start = time.perf_counter()
            yield
            self._wait()
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def take(self, steps: int) -> dict[str, float]:
        """Milliseconds per step of each part, and start again."""
        times = {name: 1000 * seconds / steps for name, seconds in self.seconds.items()}
        self.seconds = {}
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
