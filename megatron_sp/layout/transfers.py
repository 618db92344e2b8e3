"""Put the sends and receives of a pipeline into an order in which no two ranks can wait for each other.

All ranks compute the same time line of the whole pipeline. When a piece of work ends, its result is sent: the send and
the neighbour's receive are both placed at that moment, so the list of each rank is a part of one line. The first
transfer of the line that is not done has only finished transfers before it, on both of its ranks, so it can always run.
This holds for every transport, whatever it queues, and however long the work really takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

Work = tuple[str, int]  # kind K, F or B, and the unit, as in ``layout.schedules.chunk_order``


class Operation(NamedTuple):
    """One operation of a rank.

    Attributes:
        name: "compute", "send" (the result of the work) or "receive" (the input of the work).
        work: what is computed, or whose tensor is transferred.
        peer: the other rank of a transfer; -1 where nothing is transferred.
    """

    name: str
    work: Work
    peer: int = -1


def with_transfers(work: Sequence[Sequence[Work]]) -> list[list[Operation]]:
    """Return the operations of every rank: its work in the given order, with the sends and receives in between.

    A gradient (B) goes to the rank before, everything else to the next rank. A backward is taken as two forwards long.

    Args:
        work: what each rank computes, in order.

    Raises:
        ValueError: some work needs a result that no rank computes before it.
    """
    operations: list[list[Operation]] = [[] for _ in work]
    position = [0] * len(work)
    arrived: list[set[Work]] = [set() for _ in work]
    running: list[tuple[int, int]] = []  # end of the current work, rank
    now = 0

    def start(rank: int) -> None:
        """Let an idle rank begin its next work if the input is there."""
        if position[rank] == len(work[rank]):
            return
        item = work[rank][position[rank]]
        source = rank + 1 if item[0] == "B" else rank - 1
        if item in arrived[rank] or not 0 <= source < len(work):
            heappush(running, (now + (2 if item[0] == "B" else 1), rank))

    for rank in range(len(work)):
        start(rank)
    while running:
        now, rank = heappop(running)
        item = work[rank][position[rank]]
        position[rank] += 1
        operations[rank].append(Operation("compute", item))
        peer = rank - 1 if item[0] == "B" else rank + 1
        if 0 <= peer < len(work):
            operations[rank].append(Operation("send", item, peer))
            operations[peer].append(Operation("receive", item, rank))
            arrived[peer].add(item)
            if position[peer] < len(work[peer]) and work[peer][position[peer]] == item:
                start(peer)
        start(rank)
    if position != [len(items) for items in work]:
        stuck = [rank for rank, items in enumerate(work) if position[rank] < len(items)]
        raise ValueError(f"the work of ranks {stuck} never starts")
    return operations
