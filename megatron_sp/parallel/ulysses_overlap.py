"""Ulysses whose exchanges run beside attention, by groups of heads.

While a rank attends with one group of heads, the next group's queries, keys and values are on their way here and
the previous group's output is on its way back. All ranks do the same at the same time::

    this rank  start qkv0 |           | start qkv1 | attend 0 | start o0 | attend 1 | start o1 |        | concatenate
    network               [== qkv0 ==]             [= qkv1 ==]           [=== o0 ==]           [== o1 ==]

So all exchanges but the first and the last are hidden where attention takes longer than they do. Autograd runs the
node that was made last first, so backward has the same overlap in the opposite order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_sp.layout.heads import HeadSplit
from megatron_sp.parallel.ulysses import Core, UlyssesExchange


@dataclasses.dataclass(frozen=True)
class HeadGroup:
    """Some of the heads, the exchange that distributes them, and a core for the share of one rank.

    Args:
        first_head: global number of the first query head this rank attends with.
    """

    heads: HeadSplit
    exchange: UlyssesExchange
    core: Core
    first_head: int


class OverlappedUlysses:
    """An attention core between exchanges of groups of heads; it has the signature of a core.

    Args:
        heads: all heads of this tp rank.
        groups: the same heads, cut into runs.
    """

    def __init__(self, heads: HeadSplit, groups: Sequence[HeadGroup]):
        self.heads, self.groups = heads, list(groups)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, dropout: Any = None,
                 **how: Any) -> torch.Tensor:
        """[b, s/P, n, d] -> [b, s/P, n, d]"""
        arriving = self._start(self.groups[0], q, k, v)
        returning: list[Callable[[], torch.Tensor]] = []
        for group, following in zip(self.groups, [*self.groups[1:], None]):
            mine = arriving()  # [b, s/P, n_group, d] -> [b, s, n_group/P, d]
            if following is not None:
                arriving = self._start(following, q, k, v)
            own = dropout and dataclasses.replace(dropout, first_head=group.first_head)
            returning.append(group.exchange.start_to_sequence(group.core(*mine, dropout=own, **how)))
        return torch.cat([finish() for finish in returning], dim=2)  # -> [b, s/P, n, d]

    def _start(self, group: HeadGroup, q: torch.Tensor, k: torch.Tensor,
               v: torch.Tensor) -> Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        query, kv = (slice(part[0] - whole[0], part[1] - whole[0]) for part, whole in (
            (group.heads.query, self.heads.query), (group.heads.kv, self.heads.kv)))
        return group.exchange.start_to_heads(q[:, :, query], k[:, :, kv], v[:, :, kv])
