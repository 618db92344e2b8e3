"""Let ranks that srun or mpirun started check in at their store, and name the ranks that are missing or started twice.

torch counts processes only: with a rank started twice and another not at all, it sees the right number and hangs later.

    rank 0:  check in | wait ........ 30 s: "waiting for rank 2" ...... time-out: "rank 2 did not start"
    rank 1:  check in | wait ..........................................  time-out
    rank 1 (another process):  check in: "rank 1 was started twice"
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from megatron_sp.errors import ConfigError, PeerLostError

if TYPE_CHECKING:
    import torch.distributed as dist

#: Seconds between two messages in which rank 0 names the ranks that it waits for.
PATIENCE = 30.0
#: Longest pause, in seconds, before a waiting rank reads the store again.
LONGEST_PAUSE = 0.5
#: Largest number of missing ranks that a message names. When a node is missing, all of its ranks are.
RANKS_SHOWN = 16
EVERYBODY, MISTAKE = "all ranks have checked in", "a rank was started twice"


def check_in(store: dist.Store, rank: int, world_size: int, timeout: timedelta, warn: Callable[[str], None],
             patience: float = PATIENCE) -> None:
    """Return when all ranks have called this function with the same store.

    Args:
        timeout: how long to wait for the others.
        warn: function that prints a line. Only rank 0 calls it.
        patience: seconds between two warnings.

    Raises:
        ConfigError: two processes say that they are the same rank.
        PeerLostError: some ranks did not check in before the time-out; the message names them.
    """
    place = f"process {os.getpid()} of {socket.gethostname()}"
    if store.add(f"number of processes with rank {rank}", 1) > 1:
        first = store.get(f"process with rank {rank}").decode()
        twice = (f"rank {rank} was started twice: {first} and {place}. Start each of the ranks 0 to {world_size - 1} "
                 "once; look at the node ranks and at RANK, or let srun, mpirun or torchrun number the processes.")
        store.set(MISTAKE, twice)
        store.set(EVERYBODY, "no")
        raise ConfigError(twice)
    store.set(f"process with rank {rank}", place)
    if store.add("ranks", 1) == world_size:
        store.set(EVERYBODY, "yes")
    started, pause, warnings = time.monotonic(), 0.01, 0
    while not store.check([EVERYBODY]):     # store.wait would make torch print a warning when it times out
        time.sleep(pause)
        pause, waited = min(2 * pause, LONGEST_PAUSE), time.monotonic() - started
        if waited >= timeout.total_seconds():
            raise PeerLostError(f"rank {rank} waited {timeout} for {missing_ranks(store, world_size)} "
                                f"(--distributed-timeout-minutes). Look whether all {world_size} processes were "
                                "started, each on a node that reaches the others, and at their logs.")
        if rank == 0 and waited >= (warnings + 1) * patience:
            warnings += 1
            warn(f"rank 0 has waited {waited:.0f} s for {missing_ranks(store, world_size)} to start")
    if store.check([MISTAKE]):
        raise PeerLostError(f"rank {rank} stopped, because {store.get(MISTAKE).decode()}")


def missing_ranks(store: dist.Store, world_size: int) -> str:
    """Return text that names the ranks which have not checked in."""
    missing = [rank for rank in range(world_size) if not store.check([f"process with rank {rank}"])]
    shown = ", ".join(map(str, missing[:RANKS_SHOWN])) + (", ..." if len(missing) > RANKS_SHOWN else "")
    return f"rank {shown}" if len(missing) == 1 else f"{len(missing)} of {world_size} ranks ({shown})"
