"""What Ulysses, ring and their product send per layer is what the formulas say, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from megatron_sp.model.build import build_model
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.ring import RingAttention
from megatron_sp.parallel.ulysses import UlyssesAttention
from megatron_sp.proof.data import batch, local_microbatches
from megatron_sp.train.forward_backward import build_engine
from tests.helpers.configs import STYLES, tiny_run
from tests.helpers.spawn import run_ranks


def bytes_of(ulysses: int, ring: int, *, tokens: int, heads: int, kv_heads: int, width: int, element: int) -> int:
    """Forward bytes a rank sends in one layer: ``(u-1)/u s/sp b (2A + 2 K_u) + (r-1) s/sp b 2 K_u``.

    A and K are the widths of all query and of all key/value heads; K_u counts key/value heads that several
    Ulysses ranks need once for each of them.
    """
    share = tokens // (ulysses * ring)
    query, kv = heads * width, max(kv_heads, ulysses) * width
    return (share * (2 * query + 2 * kv) * (ulysses - 1) // ulysses + (ring - 1) * share * 2 * kv) * element


def sent(flags: str) -> list[int]:
    """On a rank: bytes that the exchange of each layer counted in one forward pass."""
    run = tiny_run(flags.split(), dist.get_world_size())
    mesh = ParallelMesh.build(run.parallel)
    model = build_model(run, mesh)
    build_engine(run, model, mesh).evaluate(local_microbatches(run, mesh, *batch(run)))
    return [_of_core(block.attention.plan.core) for block in model.layers.values()]  # type: ignore[operator,union-attr]


def _of_core(core: Any) -> int:
    if isinstance(core, UlyssesAttention):
        return core.exchange.sent.forward + _of_core(core.core)
    return core.ring.sent.forward if isinstance(core, RingAttention) else 0


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
@pytest.mark.parametrize(("ulysses", "ring"), [(2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (4, 2), (2, 4)])
def test_bytes(ulysses: int, ring: int, kv_heads: int) -> None:
    flags = (f"{STYLES['eight_heads']} --ulysses-size {ulysses} --ring-size {ring} --micro-batch-size 4 "
             f"--num-key-value-heads {kv_heads}")
    expected = 4 * bytes_of(ulysses, ring, tokens=64, heads=8, kv_heads=kv_heads, width=8, element=4)
    for counted in run_ranks(sent, ulysses * ring, flags):
        assert counted == [2 * expected] * 2       # the two layers share their exchange and its counter
