"""Warn that a step stands still before NCCL's watchdog ends the process.

When a collective on GPUs runs out of time, NCCL's watchdog thread aborts the process, and no Python code runs any more
that could say which rank was missing (``lost_peers.py`` does this for gloo, whose collectives raise an error). So a
thread on each rank looks at a counter that grows with every step. When it has not grown for most of the time-out, the
thread asks through the store which ranks still run, and prints a warning::

    rank 0:  step 7 ....... 0.8 x time-out | store "0" | wait | "rank 1 (tensor parallel) does not run" | NCCL aborts
    rank 1:  suspended .................................................................................
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from megatron_sp.parallel.lost_peers import GRACE_SECONDS, names_of, silent_ranks
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.torch_internals import default_store

#: The share of the time-out of a collective after which a step counts as standing still.
SHARE_OF_TIMEOUT = 0.8


@contextlib.contextmanager
def warning_of_stalls(mesh: ParallelMesh, steps_done: Callable[[], int], warn: Callable[[str], None],
                      patience: float | None = None, grace: float = GRACE_SECONDS) -> Iterator[None]:
    """Watch a counter of steps in a thread during the ``with`` statement; warn once for each step that stands still.

    Args:
        steps_done: returns the number of steps that are finished; called from the thread.
        warn: prints a line on this rank, without waiting for other ranks; called from the thread.
        patience: seconds without a finished step; default: 0.8 of the time-out of a collective.
        grace: seconds to wait for other ranks to write into the store that they still run.
    """
    if patience is None:
        patience = SHARE_OF_TIMEOUT * mesh.timeout.total_seconds()
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(mesh, steps_done, warn, patience, grace, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def _watch(mesh: ParallelMesh, steps_done: Callable[[], int], warn: Callable[[str], None], patience: float,
           grace: float, ended: threading.Event) -> None:
    last, since, warned = steps_done(), time.monotonic(), False
    while not ended.wait(min(patience / 10, 5.0)):
        done = steps_done()
        if done != last:
            last, since, warned = done, time.monotonic(), False
        elif not warned and time.monotonic() - since >= patience:
            warned = True
            silent = silent_ranks(mesh, default_store(), grace, f"step {done} stands still")
            if silent or mesh.global_rank == 0:
                warn(_in_words(mesh, silent, done, time.monotonic() - since))


def _in_words(mesh: ParallelMesh, silent: list[int], done: int, seconds: float) -> str:
    """Return the warning: how long nothing was finished, and which ranks do not run."""
    if silent:
        who = f"These ranks do not answer: {names_of(mesh, silent)}; look at their logs and nodes"
    else:
        who = "All ranks of its groups still run: it may be a long step, evaluation or save, or a deadlock"
    return (f"WARNING: rank {mesh.global_rank} has finished no step for {seconds:.0f} s, after iteration {done}. "
            f"{who}. A collective that takes longer than {mesh.timeout} ends the run (--distributed-timeout-minutes)")
