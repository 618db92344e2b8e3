"""Which operations a pipeline rank performs in a step that goes chunk by chunk: what it computes, sends and receives.

Two ranks that send to each other while neither receives wait for ever. How many sends may be open, and whether a send
may pass another one, depends on the transport. So the order of all sends and receives is fixed here for all ranks
together, on one time line: the work of all ranks is simulated, and when a piece of work ends, its send and the
neighbour's receive both get their place at that moment::

    time ->      1          2               3                  4
    rank 0   K0  send K0    K1   send K1    ...
    rank 1       receive K0 K0   receive K1 send B7 ...
                 `- the same moment of the line

Each rank performs its part of the line. Take the first transfer of the line that is not done: everything before it is
done on both of its ranks, so it can take place. This holds for every transport, any number of open sends, and also when
the real work takes longer or shorter than the simulated. ``rendezvous.py`` checks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from heapq import heappop, heappush
from typing import NamedTuple

#: Simulated times, in forwards of a chunk. Their only effect is how early a transfer stands in the order.
TIMES = {"K": 1, "F": 1, "B": 2, "E": 1}


class Work(NamedTuple):
    """A piece of work of a rank.

    Attributes:
        kind: K (first pass: forward that keeps keys and values), F (forward of the second pass), B (its backward) or
            E (forward of an evaluation).
        unit: a chunk of a microbatch, numbered ``microbatch * chunks + chunk``.
    """

    kind: str
    unit: int


class Transfer(NamedTuple):
    """The start of a send or a receive.

    Attributes:
        action: "send" or "receive".
        peer: place of the other rank in the pipeline.
        work: what the tensor comes from on the sender and is used for on the receiver.
    """

    action: str
    peer: int
    work: Work


Operation = Work | Transfer


def training_order(pp: int, rank: int, microbatches: int, chunks: int) -> list[Work]:
    """Return what a pipeline rank computes in a training step, in order.

    K goes through all chunks of a sequence but the last, in order; F and B go through all of them in reverse. F and B
    alternate as in 1F1B, so that rank r holds the activations of at most ``pp - r`` chunks. One microbatch of 4 chunks
    on 2 ranks::

        rank 0   K0 K1 K2 F3 F2 .. .. B3 -- F1 B2 -- F0 B1 -- .. B0 --
        rank 1   .. K0 K1 K2 F3 B3 -- F2 B2 -- F1 B1 -- F0 B0 -- .. ..

    One rank and one chunk are plain accumulation: F0 B0 F1 B1 ...
    """
    forward = [step for first in range(0, microbatches * chunks, chunks) for step in (
        *(Work("K", first + chunk) for chunk in range(chunks - 1)),
        *(Work("F", first + chunk) for chunk in reversed(range(chunks))))]
    order: list[Work] = []
    position = 0

    def add_forwards(number: int) -> None:
        """Add the next steps of the forward direction, up to so many forwards of the second pass."""
        nonlocal position
        while number and position < len(forward):
            order.append(forward[position])
            number -= forward[position].kind == "F"
            position += 1

    add_forwards(pp - rank)
    for unit in [step.unit for step in forward if step.kind == "F"]:
        order.append(Work("B", unit))
        add_forwards(1)
    return order


@cache
def operations(pp: int, microbatches: int, chunks: int, *, training: bool = True) -> list[list[Operation]]:
    """Return for each rank of a pipeline the operations of a training step or an evaluation, in order.

    Args:
        chunks: of each microbatch.
    """
    if training:
        return with_transfers([training_order(pp, rank, microbatches, chunks) for rank in range(pp)])
    return with_transfers([[Work("E", unit) for unit in range(microbatches * chunks)]] * pp)


def with_transfers(orders: Sequence[Sequence[Work]]) -> list[list[Operation]]:
    """Return for each rank its work with all sends and receives, in the order of one time line of all ranks.

    Args:
        orders: the work of each rank of the pipeline. A rank begins a piece of work when the one before has ended and
            its input is there.
    """
    pp = len(orders)
    left = [list(reversed(order)) for order in orders]
    found: list[list[Operation]] = [[] for _ in orders]
    arrived: list[set[Work]] = [set() for _ in orders]
    running: list[tuple[int, int, Work]] = []  # end, rank, work
    idle, now = set(range(pp)), 0
    while any(left) or running:
        for rank in sorted(rank for rank in idle if left[rank]):
            work = left[rank][-1]
            if source_of(work, rank, pp) is None or work in arrived[rank]:
                heappush(running, (now + TIMES[work.kind], rank, left[rank].pop()))
                idle.remove(rank)
        now, rank, work = heappop(running)
        idle.add(rank)
        found[rank].append(work)
        peer = target_of(work, rank, pp)
        if peer is not None:
            found[rank].append(Transfer("send", peer, work))
            found[peer].append(Transfer("receive", rank, work))
            arrived[peer].add(work)
    return found


def source_of(work: Work, rank: int, pp: int) -> int | None:
    """Return the rank that sends the input of a piece of work; None where the work begins on this rank."""
    source = rank + 1 if work.kind == "B" else rank - 1
    return source if 0 <= source < pp else None


def target_of(work: Work, rank: int, pp: int) -> int | None:
    """Return the rank that a piece of work is sent to; None where it ends on this rank."""
    target = rank - 1 if work.kind == "B" else rank + 1
    return target if 0 <= target < pp else None
