"""Handle SIGTERM, SIGUSR1 and ``--exit-signal``, which ask the run to save a checkpoint and to end.

Imports no torch, because the handlers are installed before torch is imported.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType

from megatron_sp.config.schema import Run

#: Signals that every run handles.
ALWAYS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Remembers a signal, whether it comes during set-up, a step or an evaluation.

    The handler only stores the signal's name. ``Trainer`` adds "this rank got a signal" to the reduction that every
    step makes anyway. So a signal to any one rank stops all ranks after the same step.
    """

    def __init__(self, signals: Sequence[signal.Signals] = ALWAYS):
        self.received: str = ""
        for number in signals:
            signal.signal(number, self._note)

    @classmethod
    def of(cls, run: Run) -> StopSignals:
        """Install handlers for ``ALWAYS`` and ``--exit-signal``, and return the object that remembers their signals."""
        return cls((*ALWAYS, signal.Signals[run.train.exit_signal]))

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name

    def __bool__(self) -> bool:
        return bool(self.received)
