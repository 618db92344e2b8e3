"""Sequence parallelism around an attention core: composes what the mesh asks for.

At degree 1 the core itself is returned; the model does not know the difference.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_sp.layout.heads import HeadSplit
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.ring import BlockKernel, Ring, RingAttention, Triple
from megatron_sp.parallel.ulysses import Core, UlyssesAttention, UlyssesExchange
from megatron_sp.parallel.ulysses_overlap import HeadGroup, OverlappedUlysses


class MatchedHeads:
    """A core for query heads whose key/value heads do not come in equal, aligned groups."""

    def __init__(self, core: Core, groups: tuple[int, ...]):
        self.core, self.groups = core, groups

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
        """q [b, s, n, d] with k, v [b, s, g, d]; each query head gets a copy of its key/value head."""
        index = torch.tensor(self.groups, device=k.device)
        return self.core(q, k.index_select(2, index), v.index_select(2, index), **how)


class MatchedKernel:
    """A block kernel for such heads; keys and values stay single until the block is computed."""

    def __init__(self, kernel: BlockKernel, groups: tuple[int, ...]):
        self.kernel, self.groups = kernel, groups
        self.description = kernel.description

    def _spread(self, x: torch.Tensor) -> torch.Tensor:
        """[b, t, g, d] -> [b, t, n, d]"""
        return x.index_select(2, torch.tensor(self.groups, device=x.device))

    def _collect(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """[b, t, n, d] -> [b, t, g, d], the copies' gradients summed"""
        return torch.zeros_like(like, dtype=x.dtype).index_add_(2, torch.tensor(self.groups, device=x.device), x)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``ring.BlockKernel``."""
        return self.kernel.forward(q, self._spread(k), self._spread(v), causal)

    def backward(self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
                 lse: torch.Tensor, causal: bool) -> Triple:
        """See ``ring.BlockKernel``."""
        dq, dk, dv = self.kernel.backward(grad, q, self._spread(k), self._spread(v), o, lse, causal)
        return dq, self._collect(dk, k), self._collect(dv, v)


def are_even(groups: tuple[int, ...]) -> bool:
    """Whether the query heads fall into equal, aligned groups, which all cores and kernels take."""
    num_kv = groups[-1] + 1
    return len(groups) % num_kv == 0 and groups == tuple(i * num_kv // len(groups) for i in range(len(groups)))


def match_heads_in_kernel(kernel: BlockKernel, groups: tuple[int, ...]) -> BlockKernel:
    """The kernel itself when the heads are evenly grouped, else one that pairs them first."""
    return kernel if are_even(groups) else MatchedKernel(kernel, groups)


def match_heads(core: Core, groups: tuple[int, ...]) -> Core:
    """The core itself when the heads are evenly grouped, else one that pairs them first."""
    return core if are_even(groups) else MatchedHeads(core, groups)


def parallel_attention(core: Core, kernel: BlockKernel, heads: HeadSplit, mesh: ParallelMesh, *,
                       overlap: int = 0, compiled: bool = False) -> Core:
    """The core wrapped for this mesh: ``core`` | ``Ring`` | ``Ulysses(core)`` | ``Ulysses(Ring)``.

    A ring is made of block kernels instead of the core: it merges their partial results.

    Args:
        core: ``(q [b, s, n, d], k, v [b, s, g, d], **how) -> o [b, s, n, d]`` on one rank.
        kernel: what a ring computes its blocks with.
        heads: the heads of this tp rank and their split over the Ulysses ranks.
        overlap: head groups whose exchange runs beside attention; 0: 2 on a GPU where that sends no more, else 1.
        compiled: only collectives that can be compiled.
    """
    groups = heads.groups(mesh.rank("ulysses"))
    if mesh.size("ring") > 1:
        core = RingAttention(Ring(mesh.group("ring"), match_heads_in_kernel(kernel, groups)))
    else:
        count = 1 if compiled or mesh.size("ulysses") == 1 else overlap or default_overlap(heads, mesh)
        if count > 1:
            return overlapped_ulysses(core, heads, mesh, count)
        core = match_heads(core, groups)
    if mesh.size("ulysses") == 1:
        return core
    link = None if compiled else mesh.link("ulysses")
    return UlyssesAttention(core, UlyssesExchange(mesh.group("ulysses"), heads, link))


def default_overlap(heads: HeadSplit, mesh: ParallelMesh) -> int:
    """Two groups on a GPU where that sends no more than one; a CPU has nothing that could run beside it."""
    return heads.free_groups(2) if mesh.device.type == "cuda" else 1


def overlapped_ulysses(core: Core, heads: HeadSplit, mesh: ParallelMesh, count: int) -> OverlappedUlysses:
    """Ulysses by ``count`` groups of heads."""
    rank, group = mesh.rank("ulysses"), mesh.group("ulysses")
    return OverlappedUlysses(heads, [HeadGroup(part, UlyssesExchange(group, part), match_heads(core, part.groups(rank)),
                                               first_query_head(part, mesh)) for part in heads.in_groups(count)])


def first_query_head(heads: HeadSplit, mesh: ParallelMesh) -> int:
    """Global number of the first query head that this rank attends with."""
    return heads.query[0] + heads.ulysses_query[mesh.rank("ulysses")][0]
