"""``--manual-gc``: make all ranks run Python's garbage collector at the same moments."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


class GarbageCollection:
    """Decides when Python's garbage collector runs.

    Automatic collections happen at different moments on different ranks. Every step waits for its slowest rank, so each
    of these collections delays all ranks.

    Args:
        manual: whether to switch automatic collections off and to collect here instead; False changes nothing.
        interval: iterations between collections; 0 collects only before training and around evaluations.
    """

    def __init__(self, manual: bool, interval: int):
        self.manual, self.interval = manual, interval

    @contextmanager
    def disabled_while_training(self) -> Iterator[None]:
        """Switch automatic collections off within the block, which is the whole training."""
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
        """Collect after every ``interval`` iterations."""
        if self.manual and self.interval and iteration % self.interval == 0:
            gc.collect()

    @contextmanager
    def around_evaluation(self) -> Iterator[None]:
        """Collect the youngest generation before and after the block; evaluation leaves little in the others."""
        if self.manual:
            gc.collect(0)
        yield
        if self.manual:
            gc.collect(0)
