"""The exchange itself: placement, gradients, and the bytes it sends."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from megatron_sp.layout.heads import HeadSplit
from megatron_sp.model.attention.cores import SDPACore
from megatron_sp.parallel.sequence import match_heads
from megatron_sp.parallel.ulysses import UlyssesAttention, UlyssesExchange
from megatron_sp.transport.channel import CollectiveChannel
from tests.helpers.spawn import RunRanks

HEADS = [(8, 8), (8, 4), (8, 2), (8, 1), (6, 6), (6, 3), (6, 2), (7, 7), (5, 1)]
TOKENS, WIDTH = 16, 4


def world_channel() -> CollectiveChannel:
    return CollectiveChannel(dist.group.WORLD, torch.device("cpu"))  # type: ignore[arg-type]


def numbered(batch: int, heads: int, name: int) -> torch.Tensor:
    """[b, s, n, d] in which every element is distinct."""
    shape = (batch, TOKENS, heads, WIDTH)
    return torch.arange(batch * TOKENS * heads * WIDTH, dtype=torch.float64).view(shape) + name * 1e6


def check_placement() -> None:
    channel, size, rank = world_channel(), dist.get_world_size(), dist.get_rank()
    for (n, g), batch in itertools.product(HEADS, (1, 2, 3)):
        heads = HeadSplit.of(n, g, ulysses=size)
        exchange = UlyssesExchange(channel, heads)
        whole = [numbered(batch, count, name) for name, count in enumerate((n, g, g))]
        mine = [x.chunk(size, 1)[rank] for x in whole]
        q, k, v = exchange.sequence_to_heads(*mine)
        assert torch.equal(q, whole[0][:, :, slice(*heads.ulysses_query[rank])]), (n, g, batch)
        assert torch.equal(k, whole[1][:, :, slice(*heads.ulysses_kv[rank])]), (n, g, batch)
        assert torch.equal(v, whole[2][:, :, slice(*heads.ulysses_kv[rank])]), (n, g, batch)
        assert torch.equal(exchange.heads_to_sequence(q), mine[0]), (n, g, batch)


def check_bytes() -> None:
    channel, size = world_channel(), dist.get_world_size()
    for n, g in ((8, 8), (8, 4), (8, 2), (8, 1)):
        exchange = UlyssesExchange(channel, HeadSplit.of(n, g, ulysses=size))
        q, k, v = (torch.zeros(2, TOKENS // size, count, WIDTH, dtype=torch.float32) for count in (n, g, g))
        exchange.heads_to_sequence(exchange.sequence_to_heads(q, k, v)[0])
        effective = max(g, size)  # each of fewer key/value heads goes to several ranks
        formula = (size - 1) / size * (2 * TOKENS / size) * 4 * WIDTH * (2 * n + 2 * effective)
        assert exchange.sent.forward == formula, (n, g)
        assert exchange.sent.exchanges == 2


def check_attention() -> None:
    channel, size, rank = world_channel(), dist.get_world_size(), dist.get_rank()
    for n, g in HEADS:
        generator = torch.Generator().manual_seed(0)
        whole = [torch.randn(2, TOKENS, count, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
                 for count in (n, g, g)]
        weight = torch.randn(2, TOKENS, n, WIDTH, dtype=torch.float64, generator=generator)
        expected = match_heads(SDPACore(), tuple(i * g // n for i in range(n)))(*whole)
        gradients = torch.autograd.grad((expected * weight).sum(), whole)
        heads = HeadSplit.of(n, g, ulysses=size)
        core = UlyssesAttention(match_heads(SDPACore(), heads.kv_indices(rank)), UlyssesExchange(channel, heads))
        mine = [x.detach().chunk(size, 1)[rank].clone().requires_grad_() for x in whole]
        actual = core(*mine)
        torch.testing.assert_close(actual, expected.chunk(size, 1)[rank])
        got = torch.autograd.grad((actual * weight.chunk(size, 1)[rank]).sum(), mine)
        for x, y in zip(got, gradients):
            torch.testing.assert_close(x, y.chunk(size, 1)[rank], rtol=1e-10, atol=1e-12)


def check_all() -> None:
    check_placement()
    check_bytes()
    check_attention()


@pytest.mark.parametrize("world", [2, 4])
def test_exchange(ranks: RunRanks, world: int) -> None:
    ranks(check_all, world)
