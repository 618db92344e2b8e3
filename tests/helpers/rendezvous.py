"""Decide whether the sends and receives of several ranks finish under the rules of a transport.

A transfer is done when both sides have started it: no send has a buffer of its own. The transfers that a rank starts at
once are a batch. A queue of a rank starts its next batch when the one before is done; a batch is done as a whole.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from typing import NamedTuple


class Transfer(NamedTuple):
    """One end of a transfer: on which rank, to or from whom, and what."""

    rank: int
    peer: int
    sends: bool
    what: Hashable

    @property
    def other_end(self) -> Transfer:
        return Transfer(self.peer, self.rank, not self.sends, self.what)


class Step(NamedTuple):
    """One step of a rank: start a batch, or wait until the batches with some transfers are done."""

    starts: bool
    transfers: tuple[Transfer, ...]


#: Name the queue of a transfer on its rank.
TRANSPORTS: dict[str, Callable[[Transfer], Hashable]] = {
    "gloo": lambda end: end,  # every transfer by itself
    "nccl, queue per group": lambda end: "group",
    "nccl, queue per pair": lambda end: end.peer,
    "nccl, queue per direction": lambda end: (end.peer, end.sends),
}


def finishes(programs: list[list[Step]], transport: str) -> bool:
    """Return whether all ranks come to the end of their programs with nothing left open."""
    queue_of = TRANSPORTS[transport]
    position = [0] * len(programs)
    queues: dict[tuple[int, Hashable], deque[list[Transfer]]] = defaultdict(deque)
    active: set[Transfer] = set()
    done: set[Transfer] = set()

    def complete(end: Transfer) -> bool:
        return end in active and end.other_end in active

    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while position[rank] < len(program):
                step = program[position[rank]]
                if step.starts:
                    batches: dict[Hashable, list[Transfer]] = defaultdict(list)
                    for end in step.transfers:
                        batches[queue_of(end)].append(end)
                    for name, batch in batches.items():
                        queues[rank, name].append(batch)
                elif not done.issuperset(step.transfers):
                    break
                position[rank] += 1
                moved = True
        for key in list(queues):
            queue = queues[key]
            active.update(queue[0])
            if all(complete(end) for end in queue[0]):
                done.update(queue.popleft())
                moved = True
                if not queue:
                    del queues[key]
        moved = moved or any(not active.issuperset(queue[0]) for queue in queues.values())
    return not queues and all(at == len(program) for at, program in zip(position, programs))
