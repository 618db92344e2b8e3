"""Wrap an attention core for the mesh: with Ulysses exchanges, as a ring, as both, or not at all.

The wrapped core has the call signature of a core. So the model's attention layer is the same under every layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_sp.layout.heads import HeadSplit, are_equal_groups
from megatron_sp.layout.masks.attention_mask import CAUSAL, AttentionMask
from megatron_sp.parallel.collectives import copy_heads, sum_copied_heads
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.ring import BlockKernel, Once, Ring, RingAttention, Triple, every_time
from megatron_sp.parallel.ulysses import Core, UlyssesAttention, UlyssesExchange
from megatron_sp.parallel.ulysses_overlap import HeadGroup, OverlappedQueries, OverlappedUlysses

CPU = torch.device("cpu")
#: Returns the core that attends with this rank's part of some heads.
CoreOf = Callable[[HeadSplit], Core]


class HeadCopyingCore:
    """A core that copies to each query head its key/value head, for heads that do not form equal groups in order.

    Args:
        kv_indices: for each query head the index of its key/value head.
    """

    def __init__(self, core: Core, kv_indices: tuple[int, ...], device: torch.device):
        self.core, self.index = core, torch.tensor(kv_indices, device=device)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: AttentionMask = CAUSAL,
                 **how: Any) -> torch.Tensor:
        """Attend: q [b, s, n, d], k, v [b, s, g, d] -> [b, s, n, d]."""
        return self.core(q, copy_heads(k, self.index), copy_heads(v, self.index), mask=mask, **how)


class HeadCopyingKernel:
    """A block kernel that gives each query head a copy of its key/value head, as ``HeadCopyingCore`` does.

    The copies are made after the ring has sent keys and values, so the ring sends each head once.
    """

    def __init__(self, kernel: BlockKernel, kv_indices: tuple[int, ...], device: torch.device):
        self.kernel, self.index = kernel, torch.tensor(kv_indices, device=device)
        self.description = kernel.description

    def _copy(self, x: torch.Tensor) -> torch.Tensor:
        """Return for each query head its key/value head: [b, t, g, d] -> [b, t, n, d]."""
        return x.index_select(2, self.index)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the key/value heads, then attend to one block of keys; see ``ring.BlockKernel``."""
        return self.kernel.forward(q, self._copy(k), self._copy(v), causal)

    def backward(self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
                 lse: torch.Tensor, causal: bool) -> Triple:
        """Return the gradients for one block of keys; those of a head's copies are summed in fp32."""
        dq, dk, dv = self.kernel.backward(grad, q, self._copy(k), self._copy(v), o, lse, causal)
        return dq, sum_copied_heads(dk, self.index, k.shape[2]), sum_copied_heads(dv, self.index, v.shape[2])


def match_heads_in_kernel(kernel: BlockKernel, kv_indices: tuple[int, ...], device: torch.device = CPU) -> BlockKernel:
    """Return the kernel itself when the heads form equal groups, else one that copies key/value heads first."""
    return kernel if are_equal_groups(kv_indices) else HeadCopyingKernel(kernel, kv_indices, device)


def match_heads(core: Core, kv_indices: tuple[int, ...], device: torch.device = CPU) -> Core:
    """Return the core itself when the heads form equal groups, else one that copies key/value heads first."""
    return core if are_equal_groups(kv_indices) else HeadCopyingCore(core, kv_indices, device)


def parallel_attention(core: CoreOf, kernel: BlockKernel, heads: HeadSplit, mesh: ParallelMesh, *,
                       overlap: int = 0, compiled: bool = False, once: Once = every_time) -> Core:
    """Wrap a core for this mesh.

    ::

                          ring size 1      ring size above 1
        Ulysses size 1    core             ring of kernels
        above 1           Ulysses(core)    Ulysses(ring of kernels)

    A ring uses the block kernel instead of the core, because it merges the results of several blocks of keys.

    Args:
        core: returns for some heads the core that attends with this rank's part of them,
            ``(q [b, s, n, d], k, v [b, s, g, d], mask=..., **how) -> o [b, s, n, d]``.
        kernel: attends to one block of keys of a ring.
        heads: the heads of this tensor-parallel rank and their split over the Ulysses ranks.
        overlap: number of head groups whose Ulysses exchanges overlap with attention; 0 lets ``default_overlap``
            choose.
        compiled: whether the layer is compiled; then only functional collectives are used, which Dynamo can trace.
        once: runs attention, or takes its result where recomputation kept it; see ``ring.Once``.
    """
    if mesh.size("ring") > 1:
        kv_indices = heads.kv_indices(mesh.rank("ulysses"))
        ring = Ring(mesh.group("ring"), match_heads_in_kernel(kernel, kv_indices, mesh.device))
        inner: Core = RingAttention(ring, once)
    else:
        count = 1 if compiled or mesh.size("ulysses") == 1 else overlap or default_overlap(heads, mesh)
        if count > 1:
            return overlapped_ulysses(core, heads, mesh, count)
        inner = core(heads)
    if mesh.size("ulysses") == 1:
        return inner
    return UlyssesAttention(inner, UlyssesExchange(mesh.channel("ulysses", compiled=compiled), heads))


def default_overlap(heads: HeadSplit, mesh: ParallelMesh) -> int:
    """Return the number of head groups where the user gives none.

    Two groups on a GPU, if each rank has a query head for each. One group on a CPU, which cannot send while it attends.
    """
    return min(2, heads.fewest_query_heads) if mesh.device.type == "cuda" else 1


def overlapped_ulysses(core: CoreOf, heads: HeadSplit, mesh: ParallelMesh,
                       count: int) -> OverlappedUlysses | OverlappedQueries:
    """Wrap a core with Ulysses exchanges of ``count`` groups of heads, which overlap with attention.

    The groups cut the key/value heads too, where that sends no more than one exchange of all heads.
    """
    channel = mesh.channel("ulysses")

    def groups(parts: list[HeadSplit]) -> list[HeadGroup]:
        return [HeadGroup(part, UlyssesExchange(channel, part), core(part), first_query_head(part, mesh))
                for part in parts]

    if heads.can_cut_keys(count) or heads.fewest_query_heads < count:
        return OverlappedUlysses(heads, groups(heads.in_groups(count)))
    return OverlappedQueries(heads, groups(heads.in_groups_of_each_rank(count)))


def first_query_head(heads: HeadSplit, mesh: ParallelMesh) -> int:
    """Return the number, within the model, of the first query head that this rank attends with."""
    return heads.query[0] + heads.ulysses_query[mesh.rank("ulysses")][0]
