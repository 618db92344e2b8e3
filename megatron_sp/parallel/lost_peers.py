"""Say in one line which rank does not answer when a collective runs out of time.

torch's message then is a traceback about a socket; it names neither the rank nor the axis. The store through which
the ranks met still works. So each rank whose collective fails leaves its number there, waits a moment, and looks
which ranks of its groups have left none: those hang, are suspended, or still wait for something else. ::

    rank 0:  all-reduce over tp .... time-out | store "0" | wait | "rank 1 (tensor parallel) does not answer"
    rank 1:  suspended ...................................................................................
    rank 2:  all-reduce over dp .... time-out | store "2" | wait | "ranks ... do not answer"
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import torch.distributed as dist

from megatron_sp.errors import PeerLostError
from megatron_sp.layout.grid import AXES
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.torch_internals import default_store

#: What gloo and NCCL say when a peer did not answer within the group's time-out.
TIMED_OUT = ("Timed out waiting", "Application timeout", "Watchdog caught collective operation timeout")
#: Seconds in which the other ranks' collectives run out of time as well.
GRACE = 3.0
AXIS_NAMES = {"pp": "pipeline", "dp": "data parallel", "ring": "ring", "ulysses": "Ulysses", "tp": "tensor parallel"}


@contextlib.contextmanager
def naming_lost_peers(mesh: ParallelMesh) -> Iterator[None]:
    """Turn torch's error about a collective that ran out of time into one line.

    Raises:
        PeerLostError: naming the ranks that do not answer, and their axes.
    """
    try:
        yield
    except RuntimeError as error:  # those of torch.distributed among them
        if not has_timed_out(error):
            raise
        raise PeerLostError(describe(mesh, silent_ranks(mesh, default_store(), GRACE))) from error


def has_timed_out(error: BaseException | None) -> bool:
    """Whether this error, or one that it was raised from, says that a peer did not answer in time."""
    seen: list[BaseException] = []  # a chain can be a circle
    while error is not None and error not in seen:
        if any(words in str(error) for words in TIMED_OUT):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def silent_ranks(mesh: ParallelMesh, store: dist.Store, grace: float) -> list[int]:
    """Ranks of this rank's groups that have not reported a failure; empty where the store does not answer either."""
    mine = mesh.global_rank
    peers = {rank for axis in AXES for rank in mesh.grid.ranks(axis, mine)} - {mine}
    silent: list[int] = []

    def ask() -> None:
        store.set(f"lost peers/{mine}", "failed")
        time.sleep(grace)
        silent.extend(rank for rank in sorted(peers) if not store.check([f"lost peers/{rank}"]))

    asking = threading.Thread(target=ask, daemon=True)  # the store may be in a process that is suspended
    asking.start()
    asking.join(2 * grace + 1)
    return silent


def describe(mesh: ParallelMesh, silent: list[int]) -> str:
    """One line for the log of this rank."""
    names = [f"rank {rank} ({', '.join(AXIS_NAMES[axis] for axis in AXES if rank in mesh.grid.ranks(axis, mine))})"
             for mine in (mesh.global_rank,) for rank in silent]
    who = f"{', '.join(names)}, which {'has' if len(names) == 1 else 'have'} reported nothing" if names else \
        "a rank of its groups"
    return (f"rank {mesh.global_rank} waited {mesh.timeout} for {who} (--distributed-timeout-minutes): look whether it "
            "is suspended, swapping or still busy, and at its log")
