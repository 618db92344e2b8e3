"""No two ranks of a chunk pipeline wait for each other, whatever the transport queues."""

from __future__ import annotations

from itertools import product

import pytest

from megatron_sp.layout.schedules import chunk_order
from megatron_sp.layout.transfers import Operation, Work, with_transfers
from tests.helpers.rendezvous import TRANSPORTS, Step, Transfer, finishes

MOST_SENDS = 4  # as in parallel/stage_links.py


def source(item: Work, rank: int) -> int:
    return rank + 1 if item[0] == "B" else rank - 1


def program(rank: int, size: int, operations: list[Operation]) -> list[Step]:
    """Return what the engine does: it waits for its input where it computes, and for its oldest sends."""
    steps: list[Step] = []
    sends: list[Transfer] = []
    for name, work, peer in operations:
        if name == "compute":
            if 0 <= source(work, rank) < size:
                steps.append(Step(False, (Transfer(rank, source(work, rank), False, work),)))
            continue
        end = Transfer(rank, peer, name == "send", work)
        steps.append(Step(True, (end,)))
        if end.sends:
            sends.append(end)
            if len(sends) > MOST_SENDS:
                steps.append(Step(False, (sends.pop(0),)))
    return [*steps, Step(False, tuple(sends))]


def receive_where_used(rank: int, size: int, work: list[Work]) -> list[Step]:
    """Return a program that receives where it computes, together with the sends that wait: it can hang."""
    steps: list[Step] = []
    waiting: list[Transfer] = []
    sends: list[Transfer] = []
    for item in work:
        peer = source(item, rank)
        receives = [Transfer(rank, peer, False, item)] if 0 <= peer < size else []
        steps.append(Step(True, (*waiting, *receives)))
        sends += waiting
        while len(sends) > MOST_SENDS:
            steps.append(Step(False, (sends.pop(0),)))
        steps.append(Step(False, tuple(receives)))
        to = rank - 1 if item[0] == "B" else rank + 1
        waiting = [Transfer(rank, to, True, item)] if 0 <= to < size else []
    return [*steps, Step(True, tuple(waiting)), Step(False, (*sends, *waiting))]


def orders(pp: int, microbatches: int, chunks: int) -> list[list[Work]]:
    return [chunk_order(pp, rank, microbatches, chunks) for rank in range(pp)]


def check(pp: int, microbatches: int, chunks: int) -> None:
    """Check training and evaluation of one size under every transport."""
    evaluation = [[("F", unit) for unit in range(microbatches * chunks)]] * pp
    for work in (orders(pp, microbatches, chunks), evaluation):
        lists = with_transfers(work)
        assert [[each.work for each in one if each.name == "compute"] for one in lists] == work
        for rank in range(pp - 1):  # a link delivers in the order of its sends
            for one, other in ((rank, rank + 1), (rank + 1, rank)):
                assert ([each.work for each in lists[one] if each[::2] == ("send", other)]
                        == [each.work for each in lists[other] if each[::2] == ("receive", one)])
        programs = [program(rank, pp, each) for rank, each in enumerate(lists)]
        for transport in TRANSPORTS:
            assert finishes(programs, transport), (pp, microbatches, chunks, transport)


@pytest.mark.parametrize("pp", [1, 2, 3, 5])
def test_a_chunk_pipeline_finishes(pp: int) -> None:
    for microbatches, chunks in product((1, 2, 3), (1, 3, 11, 12)):
        check(pp, microbatches, chunks)


@pytest.mark.slow
@pytest.mark.parametrize("pp", range(1, 9))
def test_every_chunk_pipeline_finishes(pp: int) -> None:
    for microbatches, chunks in product(range(1, 9), range(1, 17)):
        check(pp, microbatches, chunks)


@pytest.mark.parametrize(("chunks", "expected"), [(10, True), (11, False), (12, False)])
def test_receiving_where_a_tensor_is_used_hangs(chunks: int, expected: bool) -> None:
    programs = [receive_where_used(rank, 3, work) for rank, work in enumerate(orders(3, 2, chunks))]
    assert finishes(programs, "gloo") is expected


def test_work_that_cannot_start_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ranks \[1\] never starts"):
        with_transfers([[("F", 0)], [("F", 1)]])
