"""Ring attention gives the outputs and gradients of one process, divides the work evenly and counts its bytes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist

from megatron_sp.layout.masks.attention_mask import CAUSAL, AttentionMask
from megatron_sp.layout.tokens import SequenceLayout
from megatron_sp.model.attention.block_kernels import CPUFlashBlockKernel, UnfusedBlockKernel
from megatron_sp.model.attention.cores import SDPACore
from megatron_sp.parallel.ring import BlockKernel, Ring, RingAttention
from megatron_sp.parallel.sequence import match_heads, match_heads_in_kernel
from tests.helpers.spawn import RunRanks

TOKENS, WIDTH = 48, 8
#: Documents that end inside chunks, at their ends, and after several of them; and a sequence of one document.
DOCUMENTS = AttentionMask(((0, 1, 8, 27, 30), (0,)))


@dataclass(frozen=True)
class CountingRing(Ring):
    """A ring that notes the number of elements of each tensor that it sends."""

    shifted: list[int] = field(default_factory=list)

    def start_shift(self, x: torch.Tensor) -> tuple[torch.Tensor, list[dist.Work]]:
        self.shifted.append(x.numel())
        return super().start_shift(x)


def check_ring() -> None:
    """Compare a ring with attention in one process: output and gradients of this rank's tokens, and bytes sent."""
    size, rank = dist.get_world_size(), dist.get_rank()
    kernels: tuple[BlockKernel, ...] = (UnfusedBlockKernel(), CPUFlashBlockKernel())
    cases = [(*case, CAUSAL) for case in itertools.product(kernels, (True, False), ((4, 4), (4, 2), (4, 1), (3, 2)))]
    cases += itertools.product(kernels, (True, False), ((4, 2),), (DOCUMENTS, DOCUMENTS.within(5), CAUSAL.within(20)))
    for kernel, zigzag, (n, g), mask in cases:
        groups = tuple(i * g // n for i in range(n))
        generator = torch.Generator().manual_seed(0)
        whole = [torch.randn(2, TOKENS, count, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
                 for count in (n, g, g)]
        weight = torch.randn(2, TOKENS, n, WIDTH, dtype=torch.float64, generator=generator)
        expected = match_heads(SDPACore(), groups)(*whole, mask=mask)
        gradients = torch.autograd.grad((expected * weight).sum(), whole)
        layout = SequenceLayout(TOKENS, ring=size, kind="zigzag" if zigzag else "contiguous")
        mine = torch.from_numpy(layout.positions(rank))
        local = [x.detach()[:, mine].clone().requires_grad_() for x in whole]
        ring = CountingRing(dist.distributed_c10d._get_default_group(), match_heads_in_kernel(kernel, groups), zigzag)
        actual = RingAttention(ring)(*local, mask=mask)
        torch.testing.assert_close(actual, expected[:, mine], rtol=1e-10, atol=1e-12)
        for x, y in zip(torch.autograd.grad((actual * weight[:, mine]).sum(), local), gradients, strict=True):
            torch.testing.assert_close(x, y[:, mine], rtol=1e-9, atol=1e-12)
        block = 2 * TOKENS // size * 2 * g * WIDTH  # elements of the keys and values of a rank
        assert ring.sent.forward == (size - 1) * block * 8
        assert ring.shifted == [block] * 3 * (size - 1), "forward: keys and values; backward: they and their gradients"


def count_work() -> list[int]:
    """Return the number of query-key pairs that this rank computes under the causal mask."""
    size = dist.get_world_size()
    ring, tokens = Ring(dist.distributed_c10d._get_default_group(), UnfusedBlockKernel()), 1024 // size // 2 * 2
    pairs = 0
    for owner in range(size):
        attended = ring.attended(owner, tokens)
        assert attended is not None
        queries, keys, masked = (len(range(*part.indices(tokens))) if isinstance(part, slice) else part
                                 for part in attended)
        pairs += queries * (keys + 1) // 2 if masked else queries * keys
    return [pairs]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ring(ranks: RunRanks, world: int) -> None:
    ranks(check_ring, world)
    work = [pairs for [pairs] in ranks(count_work, world)]
    tokens = 1024 // world // 2 * 2 * world
    assert max(work) == min(work) and sum(work) == tokens * (tokens + 1) // 2
