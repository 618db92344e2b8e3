"""``--manual-gc``: Python's cyclic garbage is collected by all ranks at the same moments."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


class GarbageCollection:
    """Leaves Python's collector alone, or takes its place.

    Automatic collections come at another moment on each rank, and in a step that all ranks make
    together every one of them waits for the rank that collects.

    Args:
        manual: take its place.
        interval: iterations between collections; 0: only before training and around evaluations.
    """

    def __init__(self, manual: bool, interval: int):
        self.manual, self.interval = manual, interval

    @contextmanager
    def taken_over(self) -> Iterator[None]:
        """While training: no automatic collection."""
        if not self.manual:
            yield
            return
        was_enabled = gc.isenabled()
        gc.disable()
        gc.collect()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()

    def after_step(self, iteration: int) -> None:
        """Collect when it is due."""
        if self.manual and self.interval and iteration % self.interval == 0:
            gc.collect()

    @contextmanager
    def around_evaluation(self) -> Iterator[None]:
        """Collect before and after, the youngest generation only, as evaluation leaves little."""
        if self.manual:
            gc.collect(0)
        yield
        if self.manual:
            gc.collect(0)
