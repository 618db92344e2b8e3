"""Copies through shared memory: placement, sums, cut messages, and what happens when a rank ends or is slow."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_sp.errors import PeerLostError
from megatron_sp.layout.heads import HeadSplit
from megatron_sp.model.attention.cores import SDPACore
from megatron_sp.parallel.sequence import match_heads
from megatron_sp.parallel.ulysses import UlyssesAttention, UlyssesExchange
from megatron_sp.transport import shared_memory
from megatron_sp.transport.shared_memory import SharedMemoryLink, open_link
from tests.distributed.parallel.test_ulysses import HEADS, TOKENS, WIDTH
from tests.helpers.spawn import RunRanks


def world() -> tuple[SharedMemoryLink, int, int]:
    link = open_link(dist.group.WORLD, timedelta(seconds=30))  # type: ignore[arg-type]
    assert link is not None
    return link, dist.get_world_size(), dist.get_rank()


def check_exchange(link: SharedMemoryLink, size: int, rank: int, rows: int) -> None:
    """Pieces of all kinds, strided ones too; rank p sends rank q pieces of p + q + 1 times ``rows`` rows."""
    def pieces(source: int, target: int) -> list[torch.Tensor]:
        count = (source + target + 1) * rows
        whole = torch.arange(count * 6, dtype=torch.float64).view(6, count).t() + 1e6 * source + 1e3 * target
        return [whole[:, ::2], whole[:, 1:2].contiguous().view(-1), whole[:0]]

    for add in (False, True):
        receive = [[torch.ones_like(x) for x in pieces(source, rank)] for source in range(size)]
        link.exchange([pieces(rank, target) for target in range(size)], receive, add=add)
        for source in range(size):
            for got, sent in zip(receive[source], pieces(source, rank)):
                assert torch.equal(got, sent + add), (source, rank, add)


def check_sums(link: SharedMemoryLink, size: int, rank: int) -> None:
    """Tensors smaller than the number of ranks, empty ones, and some larger than all slots."""
    shapes = [(), (1,), (0, 3), (3,), (300, 1001), (5, 7, 2)]
    def own(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    tensors = [own(rank, shape) for shape in shapes]
    link.all_reduce(tensors)
    for tensor, shape in zip(tensors, shapes):
        torch.testing.assert_close(tensor, sum(own(each, shape) for each in range(size)))
    copies = [torch.empty_like(tensors[4]) for _ in range(size)]
    dist.all_gather(copies, tensors[4])
    assert all(torch.equal(copies[0], copy) for copy in copies)  # the same bits everywhere


def check_attention(link: SharedMemoryLink, size: int, rank: int) -> None:
    """The Ulysses exchange through memory and through the group's all-to-all: the same bits and bytes."""
    for (n, g), batch in ((heads, batch) for heads in HEADS for batch in (1, 2)):
        split = HeadSplit.of(n, g, ulysses=size)
        core = match_heads(SDPACore(), split.groups(rank))
        whole = [torch.randn(batch, TOKENS, count, WIDTH, dtype=torch.float64,
                             generator=torch.Generator().manual_seed(count)) for count in (n, g, g)]
        found = []
        for how in (None, link):
            exchange = UlyssesExchange(dist.group.WORLD, split, how)  # type: ignore[arg-type]
            mine = [x.chunk(size, 1)[rank].clone().requires_grad_() for x in whole]
            out = UlyssesAttention(core, exchange)(*mine)
            gradients = torch.autograd.grad((out * torch.arange(float(out.shape[1]))[:, None, None]).sum(), mine)
            found.append([out, *gradients, torch.tensor([exchange.sent.forward, exchange.sent.exchanges])])
        for packed, direct in zip(*found):
            assert torch.equal(packed, direct), (n, g, batch)


def check_all(slot: int) -> None:
    shared_memory.SLOT = slot  # small ones need several messages
    link, size, rank = world()
    for rows in (1, 300):
        check_exchange(link, size, rank, rows)
    check_sums(link, size, rank)
    check_attention(link, size, rank)
    link.close()


@pytest.mark.parametrize("size, slot", [(2, 1 << 20), (4, 1 << 12)])
def test_link(ranks: RunRanks, size: int, slot: int) -> None:
    ranks(check_all, size, slot)


def told(action: str) -> str:
    link = open_link(dist.group.WORLD, timedelta(seconds=1))  # type: ignore[arg-type]
    assert link is not None
    if dist.get_rank() == 1:
        if action == "end":
            link.close()
        time.sleep(3)
        return ""
    with pytest.raises(PeerLostError) as error:
        link.all_reduce([torch.ones(3)])
    assert error.value.exit_code == 1
    return str(error.value)


def test_a_rank_that_ends_or_is_late_is_named(ranks: RunRanks) -> None:
    assert ranks(told, 2, "end")[0] == "rank 1 ended while rank 0 waited for its data"
    late = ranks(told, 2, "sleep")[0]
    assert late.startswith("rank 0 waited 0:00:01 for rank 1") and "--distributed-timeout-minutes" in late


def mismatched() -> str:
    link = open_link(dist.group.WORLD, timedelta(seconds=10))  # type: ignore[arg-type]
    assert link is not None
    count = 4 if dist.get_rank() else 8
    try:
        link.all_reduce([torch.ones(count)])
    except (AssertionError, PeerLostError) as error:
        return str(error)
    return ""


def test_ranks_that_disagree_about_a_size_stop(ranks: RunRanks) -> None:
    assert any("bytes where" in said for said in ranks(mismatched, 2))


def refused() -> bool:
    if dist.get_rank() == 1:
        shared_memory._machine = lambda: "another"  # type: ignore[assignment]
    return open_link(dist.group.WORLD, timedelta(seconds=1)) is None  # type: ignore[arg-type]


def refused_late() -> bool:
    shared_memory.HANDSHAKE = 1.0
    if dist.get_rank() == 1:
        def fail(*_: object) -> None:
            raise OSError("no memory")
        shared_memory._connect = fail  # type: ignore[assignment]
    return open_link(dist.group.WORLD, timedelta(seconds=1)) is None  # type: ignore[arg-type]


def test_all_ranks_agree_not_to_share(ranks: RunRanks) -> None:
    assert ranks(refused, 2) == [True, True]
    assert ranks(refused_late, 2) == [True, True]
