"""Ulysses whose exchanges overlap with attention, one group of heads after another.

While a rank attends with one group of heads, the network exchanges the queries, keys and values of the next group and
the output of the previous group. All ranks do the same at the same time::

    this rank  start qkv0 |           | start qkv1 | attend 0 | start o0 | attend 1 | start o1 |        | concatenate
    network               [== qkv0 ==]             [= qkv1 ==]           [=== o0 ==]           [== o1 ==]

So attention hides all exchanges but the first and the last, where it takes longer than they do. Autograd runs the
nodes of the graph in the opposite order of their creation, so the backward pass has the same overlap in reverse.

Two classes differ in the heads of a group. ``OverlappedUlysses`` cuts query, key and value heads. With fewer key/value
heads than ranks this would send the same keys and values with every group. ``OverlappedQueries`` then sends all keys
and values with the first group, and only queries and outputs by groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_sp.layout.heads import HeadSplit, Range
from megatron_sp.layout.masks.attention_mask import CAUSAL, AttentionMask
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


class OverlappedQueries:
    """Attention with overlapped exchanges of groups of query heads, with the call signature of a core.

    Keys and values are exchanged once, with the first group, so all groups together send what one exchange sends.

    Args:
        heads: all heads of this tensor-parallel rank.
        groups: the parts of ``heads.in_groups_of_each_rank``.
    """

    def __init__(self, heads: HeadSplit, groups: Sequence[HeadGroup]):
        self.heads, self.groups = heads, list(groups)
        first = groups[0].exchange
        # The heads of the first group, with the keys and values of all groups.
        self.exchange = UlyssesExchange(
            first.channel, dataclasses.replace(heads, ulysses_query=groups[0].heads.ulysses_query), first.sent)
        mine = first.channel.rank
        start = heads.ulysses_kv[mine][0]
        self.kv = [slice(*(head - start for head in group.heads.ulysses_kv[mine])) for group in groups]

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: AttentionMask = CAUSAL,
                 dropout: Any = None, **how: Any) -> torch.Tensor:
        """Attend over the whole sequence: [b, s/P, n, d] -> [b, s/P, n, d]."""
        queries = [_select(q, group.heads.ulysses_query) for group in self.groups]
        finish_first = self.exchange.start_to_heads(queries[0], k, v)
        finish_query: Callable[[], torch.Tensor] | None = None
        finish_outputs: list[Callable[[], torch.Tensor]] = []
        for number, (group, kv) in enumerate(zip(self.groups, self.kv)):
            if finish_query is None:
                q, k, v = finish_first()  # [b, s/P, n_group, d] -> [b, s, n_group/P, d]; k, v of all groups
            else:
                q = finish_query()
            if number + 1 < len(self.groups):
                finish_query = self.groups[number + 1].exchange.start_queries(queries[number + 1])
            group_dropout = dropout and dataclasses.replace(dropout, first_head=group.first_head)
            output = group.core(q, k[:, :, kv], v[:, :, kv], mask=mask, dropout=group_dropout, **how)
            finish_outputs.append(group.exchange.start_to_sequence(output))
        return self._in_order([finish() for finish in finish_outputs])  # -> [b, s/P, n, d]

    def _in_order(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        """Concatenate the outputs of the groups, each in the order of the ranks, in the order of the heads."""
        by_rank = [output.split(group.exchange.num_query, dim=2) for group, output in zip(self.groups, outputs)]
        return torch.cat([part for of_rank in zip(*by_rank) for part in of_rank], dim=2)


def _select(x: torch.Tensor, ranges: Sequence[Range]) -> torch.Tensor:
    """Return these ranges of heads: [b, t, n, d] -> [b, t, sum of their lengths, d]."""
    return torch.cat([x[:, :, start:stop] for start, stop in ranges], dim=2)
