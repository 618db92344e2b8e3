"""SIGTERM, SIGUSR1 and ``--exit-signal`` ask for a checkpoint and an end. Imports no torch: installed before it is."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType

from megatron_sp.config.schema import Run

#: Heeded in every run.
ALWAYS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Remembers that a stop was asked for, whenever the signal comes: set-up, step or evaluation.

    The handler only notes the signal. The ranks agree on it in the next reduction they make
    anyway (see ``Trainer``), so that a signal to any one rank stops all of them after the same
    step.
    """

    def __init__(self, signals: Sequence[signal.Signals] = ALWAYS):
        self.received: str = ""
        for number in signals:
            signal.signal(number, self._note)

    @classmethod
    def of(cls, run: Run) -> StopSignals:
        """Those of every run, and the one that the run names."""
        return cls((*ALWAYS, signal.Signals[run.train.exit_signal]))

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name

    def __bool__(self) -> bool:
        return bool(self.received)
