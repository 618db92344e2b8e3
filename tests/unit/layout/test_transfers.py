"""No two ranks of a pipeline of chunks wait for each other, whatever the transport; the order of before made them."""

from __future__ import annotations

from collections import deque

import pytest

from megatron_sp.layout.rendezvous import MOST_SENDS, TRANSPORTS, Message, Post, Program, Wait, problem_of, waiting
from megatron_sp.layout.transfers import Transfer, Work, operations, source_of, target_of, training_order

#: Pipeline ranks, chunks and microbatches of the quick test; the slow one takes all up to 8, 16 and 8.
FEW = [(pp, chunks, microbatches) for pp in (2, 3, 5) for chunks in (1, 2, 3, 7, 11, 12) for microbatches in (1, 2, 4)]
ALL = [(pp, chunks, microbatches) for pp in range(1, 9) for chunks in range(1, 17) for microbatches in range(1, 9)]


@pytest.mark.parametrize("cases", [FEW, pytest.param(ALL, marks=pytest.mark.slow)], ids=["few", "all"])
def test_every_step_comes_to_its_end(cases: list[tuple[int, int, int]]) -> None:
    found = {case: problem_of(case[0], case[2], case[1]) for case in cases}
    assert {case: problem for case, problem in found.items() if problem} == {}


def old_program(pp: int, rank: int, microbatches: int, chunks: int, is_nccl: bool) -> Program:
    """What ranks did before: a send waits for the next receive, at most four sends of both directions are open."""
    program: Program = []
    held: list[Message] = []
    sends: deque[Message] = deque()

    def start(receive: list[Message]) -> None:
        batch = [*held, *receive]
        if batch:
            program.append(Post(tuple(batch)))
        if not is_nccl or not receive:
            sends.extend(held)
        held.clear()
        while len(sends) > MOST_SENDS:
            program.append(Wait(sends.popleft()))
        program.extend(map(Wait, batch if is_nccl and receive else receive))  # NCCL has one handle for a batch

    for work in training_order(pp, rank, microbatches, chunks):
        source, target = source_of(work, rank, pp), target_of(work, rank, pp)
        start([] if source is None else [Message(False, source, work)])
        if target is not None:
            held.append(Message(True, target, work))
    start([])
    return [*program, *map(Wait, sends)]


@pytest.mark.parametrize("transport, pp, chunks, microbatches, hangs", [
    ("gloo", 3, 11, 2, True), ("gloo", 3, 10, 2, False), ("gloo", 2, 12, 2, False), ("gloo", 3, 12, 1, False),
    ("NCCL with one queue for each pair", 2, 3, 2, True), ("NCCL with one queue for each pair", 2, 2, 2, False),
    ("NCCL with one queue for all ranks", 2, 3, 2, True), ("NCCL with one queue for each direction", 3, 3, 2, True),
    ("NCCL with one queue for each direction", 2, 6, 2, False),
    ("NCCL with one queue for each direction", 2, 7, 2, True)])
def test_the_simulator_sees_the_hangs_of_the_order_before(transport: str, pp: int, chunks: int, microbatches: int,
                                                          hangs: bool) -> None:
    """On gloo with 3 ranks and 2 microbatches, 10 chunks trained and 11 hung."""
    programs = [old_program(pp, rank, microbatches, chunks, transport != "gloo") for rank in range(pp)]
    assert bool(waiting(programs, TRANSPORTS[transport])) == hangs


def test_a_receive_at_its_place_of_use_can_hang() -> None:
    """Where a receive stands matters: moved from the line to the work that needs it, steps hang again."""
    stuck = 0
    for pp, chunks, microbatches in FEW:
        programs = []
        for rank, own in enumerate(operations(pp, microbatches, chunks)):
            program: Program = []
            for each in own:
                if isinstance(each, Transfer) and each.action == "send":
                    program.append(Post((Message(True, each.peer, each.work),)))
                elif isinstance(each, Work) and (source := source_of(each, rank, pp)) is not None:
                    program += [Post((Message(False, source, each),)), Wait(Message(False, source, each))]
            programs.append(program)
        stuck += bool(waiting(programs, TRANSPORTS["NCCL with one queue for each pair"]))
    assert stuck > len(FEW) // 2


@pytest.mark.parametrize("training", [True, False])
def test_each_transfer_has_two_sides_and_one_use(training: bool) -> None:
    pp, microbatches, chunks = 4, 3, 5
    found = operations(pp, microbatches, chunks, training=training)
    sent = {(rank, each.peer, each.work) for rank, own in enumerate(found) for each in own
            if isinstance(each, Transfer) and each.action == "send"}
    received = {(each.peer, rank, each.work) for rank, own in enumerate(found) for each in own
                if isinstance(each, Transfer) and each.action == "receive"}
    kinds = {"K": chunks - 1, "F": chunks, "B": chunks} if training else {"E": chunks}
    assert sent == received and len(sent) == (pp - 1) * microbatches * sum(kinds.values())
    for rank, own in enumerate(found):
        assert [each.kind for each in own if isinstance(each, Work)].count("B") == microbatches * kinds.get("B", 0)
        for place, each in enumerate(own):
            if isinstance(each, Work) and (source := source_of(each, rank, pp)) is not None:
                assert Transfer("receive", source, each) in own[:place]


def test_one_rank_accumulates_in_order() -> None:
    assert operations(1, 2, 1)[0] == [Work("F", 0), Work("B", 0), Work("F", 1), Work("B", 1)]
    assert [f"{work.kind}{work.unit}" for work in operations(1, 1, 3)[0] if isinstance(work, Work)] == [
        "K0", "K1", "F2", "B2", "F1", "B1", "F0", "B0"]
