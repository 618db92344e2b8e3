"""Ulysses whose exchanges overlap with attention, one group of heads after another.

While a rank attends with one group of heads, the network exchanges the queries, keys and values of the next group and
the output of the previous group. All ranks do the same at the same time::

    this rank  start qkv0 |           | start qkv1 | attend 0 | start o0 | attend 1 | start o1 |        | concatenate
    network               [== qkv0 ==]             [= qkv1 ==]           [=== o0 ==]           [== o1 ==]

So attention hides all exchanges but the first and the last, where it takes longer than they do. Autograd runs the
nodes of the graph in the opposite order of their creation, so the backward pass has the same overlap in reverse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_sp.layout.attention_mask import CAUSAL, AttentionMask
from megatron_sp.layout.heads import HeadSplit
from megatron_sp.parallel.ulysses import Core, UlyssesExchange


@dataclasses.dataclass(frozen=True)
class HeadGroup:
    """A group of heads, the exchange that distributes them over the ranks, and a core for this rank's heads of it.

    Args:
        first_head: number, within the model, of the first query head that this rank attends with.
    """

    heads: HeadSplit
    exchange: UlyssesExchange
    core: Core
    first_head: int


class OverlappedUlysses:
    """Attention with overlapped exchanges of groups of heads, with the call signature of a core.

    Args:
        heads: all heads of this tensor-parallel rank.
        groups: the same heads, cut into consecutive groups.
    """

    def __init__(self, heads: HeadSplit, groups: Sequence[HeadGroup]):
        self.heads, self.groups = heads, list(groups)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: AttentionMask = CAUSAL,
                 dropout: Any = None, **how: Any) -> torch.Tensor:
        """Attend over the whole sequence: [b, s/P, n, d] -> [b, s/P, n, d]."""
        finish_qkv = self._start_qkv(self.groups[0], q, k, v)
        finish_outputs: list[Callable[[], torch.Tensor]] = []
        for group, following in zip(self.groups, [*self.groups[1:], None]):
            qkv = finish_qkv()  # [b, s/P, n_group, d] -> [b, s, n_group/P, d]
            if following is not None:
                finish_qkv = self._start_qkv(following, q, k, v)
            group_dropout = dropout and dataclasses.replace(dropout, first_head=group.first_head)
            output = group.core(*qkv, mask=mask, dropout=group_dropout, **how)
            finish_outputs.append(group.exchange.start_to_sequence(output))
        return torch.cat([finish() for finish in finish_outputs], dim=2)  # -> [b, s/P, n, d]

    def _start_qkv(self, group: HeadGroup, q: torch.Tensor, k: torch.Tensor,
                   v: torch.Tensor) -> Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Start to exchange a group's heads of q, k and v; return the function that finishes the exchange."""
        query, kv = (slice(part[0] - whole[0], part[1] - whole[0]) for part, whole in (
            (group.heads.query, self.heads.query), (group.heads.kv, self.heads.kv)))
        return group.exchange.start_to_heads(q[:, :, query], k[:, :, kv], v[:, :, kv])
