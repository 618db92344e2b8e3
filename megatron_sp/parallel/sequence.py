"""Sequence parallelism around an attention core: composes what the mesh asks for.

At degree 1 the core itself is returned; the model does not know the difference.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_sp.parallel.heads import HeadSplit
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.ulysses import Core, UlyssesAttention, UlyssesExchange


class MatchedHeads:
    """A core for query heads whose key/value heads do not come in equal, aligned groups."""

    def __init__(self, core: Core, groups: tuple[int, ...]):
        self.core, self.groups = core, groups

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
        """q [b, s, n, d] with k, v [b, s, g, d]; each query head gets a copy of its key/value head."""
        index = torch.tensor(self.groups, device=k.device)
        return self.core(q, k.index_select(2, index), v.index_select(2, index), **how)


def match_heads(core: Core, groups: tuple[int, ...]) -> Core:
    """The core itself when the heads are evenly grouped, else one that pairs them first."""
    num_kv = groups[-1] + 1
    even = len(groups) % num_kv == 0 and groups == tuple(i * num_kv // len(groups) for i in range(len(groups)))
    return core if even else MatchedHeads(core, groups)


def parallel_attention(core: Core, heads: HeadSplit, mesh: ParallelMesh) -> Core:
    """The core wrapped for this mesh: ``core`` | ``Ulysses(core)``.

    Args:
        core: ``(q [b, s, n, d], k, v [b, s, g, d], **how) -> o [b, s, n, d]`` on one rank.
        heads: the heads of this tp rank and their split over the Ulysses ranks.
    """
    assert mesh.size("ring") == 1
    core = match_heads(core, heads.groups(mesh.rank("ulysses")))
    if mesh.size("ulysses") == 1:
        return core
    return UlyssesAttention(core, UlyssesExchange(mesh.group("ulysses"), heads))


def first_query_head(heads: HeadSplit, mesh: ParallelMesh) -> int:
    """Global number of the first query head that this rank attends with."""
    return heads.query[0] + heads.ulysses_query[mesh.rank("ulysses")][0]
