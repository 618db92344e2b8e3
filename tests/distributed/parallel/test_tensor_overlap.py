"""The form of a gather and a scatter that torch's compiler can overlap computes what the other form computes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_sp.parallel.collectives import gather_sequence, reduce_scatter_sequence
from tests.helpers.spawn import run_ranks


def _differences() -> float:
    """On a rank: the largest difference between the two forms, of results and gradients."""
    largest, world, group = 0.0, dist.get_world_size(), dist.group.WORLD
    assert group is not None
    for collective, tokens in ((gather_sequence, 2), (reduce_scatter_sequence, 2 * world)):
        for batch in (1, 2):
            generator = torch.Generator().manual_seed(dist.get_rank())
            x = torch.randn(batch, tokens, 4, generator=generator, dtype=torch.float64, requires_grad=True)
            found = []
            for pieces in (False, True):
                y = collective(x, group, pieces=pieces)
                weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
                found.append((y.detach(), *torch.autograd.grad((y * weights).sum(), x)))
            largest = max(largest, *(float((one - other).abs().max()) for one, other in zip(*found, strict=True)))
    return largest


def test_both_forms_of_the_collectives_agree() -> None:
    assert run_ranks(_differences, 3) == [0.0] * 3
