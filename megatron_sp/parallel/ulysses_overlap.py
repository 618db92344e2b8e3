"""Ulysses whose exchanges run beside attention: by groups of heads.

While one group of heads is attended with, the next one's queries, keys and values are on their way here and
the one before's result is on its way back. So all but the first and the last exchange are hidden where
attention takes longer than they do. Autograd runs the last-made node first, so backward has the same
overlap in the opposite order.
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
    """Some heads, the exchange that distributes them and a core that fits a rank's share.

    Args:
        first_head: global number of the first query head this rank attends with.
    """

    heads: HeadSplit
    exchange: UlyssesExchange
    core: Core
    first_head: int


class OverlappedUlysses:
    """An attention core behind exchanges of groups of heads; same signature as the core.

    Args:
        heads: all heads of this tp rank.
        groups: the same heads in runs.
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
