"""Decide whether the sends and receives of all ranks end, under the rules of a transport, or some wait for ever.

Every rank runs a program: it posts transfers, several at once as a batch, and waits for them. A transfer is done when
both of its ranks have begun it, because no transport here promises a buffer for a send. The transports differ in what
must be done before a posted transfer begins: each has a rule that names the queue of a transfer, and within a queue a
batch begins when the batch before is done.

The simulation has no clock. A transfer that can take place stays possible until it does, so it does not matter in which
order the simulation tries them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_sp.layout.transfers import Operation, Transfer, operations, source_of

#: Sends that a rank leaves open: before it starts another, the oldest must be done.
MOST_SENDS = 4


class Message(NamedTuple):
    """One side of a transfer.

    Attributes:
        sends: whether this side sends.
        peer: the other rank.
        name: of the tensor; both sides use the same.
    """

    sends: bool
    peer: int
    name: Hashable


class Post(NamedTuple):
    """A step of a program: begin these messages together, as one batch, and go on at once."""

    messages: tuple[Message, ...]


class Wait(NamedTuple):
    """A step of a program: stop until a message that was posted before is done."""

    message: Message


Program = list[Post | Wait]
#: Names the queue of a message: (rank, message, its batch) -> queue; None: each message begins at once.
Rule = Callable[[int, Message, Post], Hashable]

#: gloo begins each transfer by itself. NCCL runs the transfers of a communicator in the order of their start, and torch
#: uses one for the group, or one for each pair of ranks; one for each direction would be possible.
TRANSPORTS: dict[str, Rule] = {
    "gloo": lambda rank, message, post: None,
    "NCCL with one queue for all ranks": lambda rank, message, post: "all",
    "NCCL with one queue for each pair": lambda rank, message, post: frozenset((rank, message.peer)),
    "NCCL with one queue for each direction": lambda rank, message, post: (
        (rank, message.peer) if message.sends else (message.peer, rank)),
}


@dataclass(eq=False)
class _Batch:
    """The messages of one post in one queue."""

    messages: list[Message]
    open: int


def waiting(programs: Sequence[Program], rule: Rule) -> list[str]:
    """Run all programs as far as they go, and return a sentence for each rank that does not come to its end."""
    place = [0] * len(programs)
    queues: list[dict[Hashable, deque[_Batch]]] = [defaultdict(deque) for _ in programs]
    done: list[set[Message]] = [set() for _ in programs]
    begun: dict[tuple[int, Message], tuple[_Batch, Hashable]] = {}
    ready = list(range(len(programs)))

    def begin(rank: int, queue: Hashable) -> None:
        """Begin the first batch of a queue, and end each of its messages that the other rank has begun too."""
        batch = queues[rank][queue][0]
        for message in batch.messages:
            begun[rank, message] = batch, queue
        for message in batch.messages:
            other = Message(not message.sends, rank, message.name)
            if (message.peer, other) in begun:
                end(message.peer, other)
                end(rank, message)

    def end(rank: int, message: Message) -> None:
        """End a message, and with the last one of its batch the batch; then begin the next batch of the queue."""
        batch, queue = begun.pop((rank, message))
        batch.open -= 1
        if not batch.open:
            done[rank].update(batch.messages)
            ready.append(rank)
            queues[rank][queue].popleft()
            if queues[rank][queue]:
                begin(rank, queue)

    while ready:
        rank = ready.pop()
        while place[rank] < len(programs[rank]):
            step = programs[rank][place[rank]]
            if isinstance(step, Wait):
                if step.message not in done[rank]:
                    break
                place[rank] += 1
                continue
            place[rank] += 1
            parts: dict[Hashable, list[Message]] = defaultdict(list)
            for message in step.messages:
                name = rule(rank, message, step)
                parts[("alone", message) if name is None else name].append(message)
            for name, messages in parts.items():
                queues[rank][name].append(_Batch(messages, len(messages)))
                if len(queues[rank][name]) == 1:
                    begin(rank, name)
    return [f"rank {rank} waits for {_said(step)}" for rank, program in enumerate(programs)
            if place[rank] < len(program) for step in [program[place[rank]]] if isinstance(step, Wait)]


def _said(step: Wait) -> str:
    action = "the send to" if step.message.sends else "the receive from"
    return f"{action} rank {step.message.peer} of {step.message.name}"


def program_of(own: Sequence[Operation], rank: int, pp: int, most_sends: int = MOST_SENDS) -> Program:
    """Return how a rank performs its operations: each transfer alone, work when its input is there.

    Args:
        own: its list of ``transfers.operations``.
    """
    program: Program = []
    sends: deque[Message] = deque()
    for each in own:
        if isinstance(each, Transfer):
            message = Message(each.action == "send", each.peer, each.work)
            program.append(Post((message,)))
            if message.sends:
                sends.append(message)
                if len(sends) > most_sends:
                    program.append(Wait(sends.popleft()))
        elif (source := source_of(each, rank, pp)) is not None:
            program.append(Wait(Message(False, source, each)))
    return [*program, *map(Wait, sends)]


def problem_of(pp: int, microbatches: int, chunks: int) -> str:
    """Return a sentence if a step or an evaluation of a pipeline of chunks would wait for ever; else ""."""
    for training in (True, False):
        programs = [program_of(own, rank, pp) for rank, own in enumerate(
            operations(pp, microbatches, chunks, training=training))]
        for name, rule in TRANSPORTS.items():
            if stuck := waiting(programs, rule):
                return f"with {name}, {stuck[0]} for ever"
    return ""
