"""Sequence parallelism around an attention core: the Ulysses exchange, the ring, both or neither.

Which of them the mesh asks for. The result has the signature of a core, so the model sees no difference.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_sp.layout.heads import HeadSplit
from megatron_sp.parallel.collectives import copy_heads, sum_copied_heads
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.ring import BlockKernel, Ring, RingAttention, Triple
from megatron_sp.parallel.ulysses import Core, UlyssesAttention, UlyssesExchange
from megatron_sp.parallel.ulysses_overlap import HeadGroup, OverlappedUlysses

CPU = torch.device("cpu")


class MatchedHeads:
    """A core for query heads whose key/value heads do not come in equal, aligned groups.

    Args:
        groups: for each query head the index of its key/value head.
    """

    def __init__(self, core: Core, groups: tuple[int, ...], device: torch.device):
        self.core, self.index = core, torch.tensor(groups, device=device)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
        """q [b, s, n, d] with k, v [b, s, g, d]; each query head gets a copy of its key/value head."""
        return self.core(q, copy_heads(k, self.index), copy_heads(v, self.index), **how)


class MatchedKernel:
    """A block kernel for such heads. Keys and values travel uncopied and are copied only for the computation."""

    def __init__(self, kernel: BlockKernel, groups: tuple[int, ...], device: torch.device):
        self.kernel, self.index = kernel, torch.tensor(groups, device=device)
        self.description = kernel.description

    def _copy(self, x: torch.Tensor) -> torch.Tensor:
        """[b, t, g, d] -> [b, t, n, d]"""
        return x.index_select(2, self.index)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``ring.BlockKernel``."""
        return self.kernel.forward(q, self._copy(k), self._copy(v), causal)

    def backward(self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
                 lse: torch.Tensor, causal: bool) -> Triple:
        """See ``ring.BlockKernel``. The gradients of a head's copies are summed in fp32."""
        dq, dk, dv = self.kernel.backward(grad, q, self._copy(k), self._copy(v), o, lse, causal)
        return dq, sum_copied_heads(dk, self.index, k.shape[2]), sum_copied_heads(dv, self.index, v.shape[2])


def are_even(groups: tuple[int, ...]) -> bool:
    """Whether the query heads fall into equal, aligned groups, which all cores and kernels take."""
    num_kv = groups[-1] + 1
    return len(groups) % num_kv == 0 and groups == tuple(i * num_kv // len(groups) for i in range(len(groups)))


def match_heads_in_kernel(kernel: BlockKernel, groups: tuple[int, ...], device: torch.device = CPU) -> BlockKernel:
    """Return the kernel itself when the heads are evenly grouped, else one that copies key/value heads first."""
    return kernel if are_even(groups) else MatchedKernel(kernel, groups, device)


def match_heads(core: Core, groups: tuple[int, ...], device: torch.device = CPU) -> Core:
    """Return the core itself when the heads are evenly grouped, else one that copies key/value heads first."""
    return core if are_even(groups) else MatchedHeads(core, groups, device)


def parallel_attention(core: Core, kernel: BlockKernel, heads: HeadSplit, mesh: ParallelMesh, *,
                       overlap: int = 0, compiled: bool = False) -> Core:
    """Wrap a core for this mesh: ``core`` | ``Ring`` | ``Ulysses(core)`` | ``Ulysses(Ring)``.

    A ring uses the block kernel instead of the core, because it merges partial results.

    Args:
        core: ``(q [b, s, n, d], k, v [b, s, g, d], **how) -> o [b, s, n, d]`` on one rank.
        kernel: what a ring computes its blocks with.
        heads: the heads of this tp rank and their split over the Ulysses ranks.
        overlap: number of head groups whose exchanges run beside attention; 0: chosen by ``default_overlap``.
        compiled: the layer is compiled; then only functional collectives are used, which Dynamo can trace.
    """
    groups = heads.groups(mesh.rank("ulysses"))
    if mesh.size("ring") > 1:
        core = RingAttention(Ring(mesh.group("ring"), match_heads_in_kernel(kernel, groups, mesh.device)))
    else:
        count = 1 if compiled or mesh.size("ulysses") == 1 else overlap or default_overlap(heads, mesh)
        if count > 1:
            return overlapped_ulysses(core, heads, mesh, count)
        core = match_heads(core, groups, mesh.device)
    if mesh.size("ulysses") == 1:
        return core
    return UlyssesAttention(core, UlyssesExchange(mesh.channel("ulysses", compiled=compiled), heads))


def default_overlap(heads: HeadSplit, mesh: ParallelMesh) -> int:
    """Two groups on a GPU where two send no more than one; one on a CPU, which cannot send while it attends."""
    return heads.free_groups(2) if mesh.device.type == "cuda" else 1


def overlapped_ulysses(core: Core, heads: HeadSplit, mesh: ParallelMesh, count: int) -> OverlappedUlysses:
    """Wrap a core with Ulysses exchanges of ``count`` groups of heads."""
    rank, channel = mesh.rank("ulysses"), mesh.channel("ulysses")
    return OverlappedUlysses(heads, [
        HeadGroup(part, UlyssesExchange(channel, part), match_heads(core, part.groups(rank), mesh.device),
                  first_query_head(part, mesh)) for part in heads.in_groups(count)])


def first_query_head(heads: HeadSplit, mesh: ParallelMesh) -> int:
    """Global number of the first query head that this rank attends with."""
    return heads.query[0] + heads.ulysses_query[mesh.rank("ulysses")][0]
