"""Say in one line which rank does not answer when a collective times out.

torch's own message is a traceback about a socket, which names neither the rank nor the axis. The store through which
the ranks met still works then. So each rank whose collective times out writes its number into the store, waits a
moment, and reads which ranks of its groups have written nothing. Those hang, are suspended, or wait for another rank::

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
#: Seconds to wait for the reports of other ranks, whose collectives time out at about the same time.
GRACE_SECONDS = 3.0
AXIS_NAMES = {"pp": "pipeline", "dp": "data parallel", "ring": "ring", "ulysses": "Ulysses", "tp": "tensor parallel"}


@contextlib.contextmanager
def naming_lost_peers(mesh: ParallelMesh) -> Iterator[None]:
    """Replace torch's error about a collective that timed out by one that names the ranks that do not answer.

    Raises:
        PeerLostError: a collective timed out. The message names the ranks and their axes.
    """
    try:
        yield
    except RuntimeError as error:  # the base class of the errors of torch.distributed
        if not has_timed_out(error):
            raise
        raise PeerLostError(describe(mesh, silent_ranks(mesh, default_store(), GRACE_SECONDS))) from error


def has_timed_out(error: BaseException | None) -> bool:
    """Return whether this error, or an error that led to it, says that a peer did not answer in time."""
    seen: list[BaseException] = []  # errors can be the cause of each other; without this the loop would not end
    while error is not None and error not in seen:
        if any(words in str(error) for words in TIMED_OUT):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def silent_ranks(mesh: ParallelMesh, store: dist.Store, grace: float, event: str = "lost peers") -> list[int]:
    """Return the ranks of this rank's groups that do not report the same event within ``grace`` seconds.

    The list is empty where the store does not answer either.

    Args:
        event: part of the keys in the store; each event needs its own.
    """
    mine = mesh.global_rank
    peers = {rank for axis in AXES for rank in mesh.grid.ranks(axis, mine)} - {mine}
    silent: list[int] = []

    def ask() -> None:
        store.set(f"{event}/{mine}", "seen")
        time.sleep(grace)
        silent.extend(rank for rank in sorted(peers) if not store.check([f"{event}/{rank}"]))

    asking = threading.Thread(target=ask, daemon=True)  # blocks when the store's process is suspended
    asking.start()
    asking.join(2 * grace + 1)
    return silent


def names_of(mesh: ParallelMesh, ranks: list[int]) -> str:
    """Return the numbers of these ranks, each with the axes on which it shares a group with this rank."""
    mine = mesh.global_rank
    return ", ".join(
        f"rank {rank} ({', '.join(AXIS_NAMES[axis] for axis in AXES if rank in mesh.grid.ranks(axis, mine))})"
        for rank in ranks)


def describe(mesh: ParallelMesh, silent: list[int]) -> str:
    """Return one line for the user: which ranks this rank waited for, on which axes, and what to look at."""
    who = f"{names_of(mesh, silent)}, which {'has' if len(silent) == 1 else 'have'} reported nothing" if silent else \
        "a rank of its groups"
    return (f"rank {mesh.global_rank} waited {mesh.timeout} for {who} (--distributed-timeout-minutes): look whether it "
            "is suspended, swapping or still busy, and at its log")
