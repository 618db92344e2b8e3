"""Ulysses: turn "my tokens, all heads" into "all tokens, my heads" around any attention core.

DeepSpeed-Ulysses (Jacobs et al., PODC '24, arXiv 2309.14509), section 3.1. Just before attention
one all-to-all exchanges q, k and v together; the core then attends over the whole sequence with
this rank's heads; a second all-to-all brings the output back. Per rank and layer the forward
sends ``(P-1)/P * s/P * d * (2n + 2 g_eff)`` elements, ``g_eff = g if g >= P else P``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_sp.parallel.collectives import all_to_all
from megatron_sp.parallel.heads import HeadSplit

Core = Callable[..., torch.Tensor]


@dataclass
class BytesSent:
    """Bytes this rank sent to *other* ranks in forward exchanges; backward sends the same again."""

    forward: int = 0
    exchanges: int = 0

    def add(self, x: torch.Tensor, send: list[int], own: int) -> None:
        rows = sum(send) - send[own]
        self.forward += rows * x[0].numel() * x.element_size() if len(x) else 0
        self.exchanges += 1

    def add_tensor(self, x: torch.Tensor) -> None:
        """A whole tensor sent to one other rank."""
        self.forward += x.numel() * x.element_size()
        self.exchanges += 1


@dataclass
class UlyssesExchange:
    """The two layout changes of one attention layer.

    Args:
        group: the Ulysses ranks, whose shards are adjacent pieces of the sequence.
        heads: the split of the heads this tp rank computes.
    """

    group: dist.ProcessGroup
    heads: HeadSplit
    sent: BytesSent = field(default_factory=BytesSent)

    def __post_init__(self) -> None:
        self.size = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        self.num_query = [stop - start for start, stop in self.heads.ulysses_query]
        self.num_kv = [stop - start for start, stop in self.heads.ulysses_kv]
        covered = [head for start, stop in self.heads.ulysses_kv for head in range(start, stop)]
        num_local = self.heads.kv[1] - self.heads.kv[0]
        # None: each key/value head goes to exactly one rank and nothing must be copied.
        self.kv_copies = None if covered == list(range(num_local)) else covered

    def sequence_to_heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                          ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One all-to-all for q, k and v together.

        Args:
            q: [b, s/P, n, d], k, v: [b, s/P, g, d]
        Returns:
            q [b, s, n_p, d], k, v [b, s, g_p, d] with the heads of this rank
        """
        batch, tokens, _, width = q.shape
        assert k.shape[:2] == v.shape[:2] == (batch, tokens), "q, k and v must hold the same tokens"
        q, k, v = (x.permute(2, 0, 1, 3) for x in (q, k, v))  # [b, s/P, n, d] -> [n, b, s/P, d]
        if self.kv_copies is not None:
            index = torch.tensor(self.kv_copies, device=k.device)
            k, v = k.index_select(0, index), v.index_select(0, index)
        parts = zip(q.split(self.num_query), k.split(self.num_kv), v.split(self.num_kv))
        packed = torch.cat([x for part in parts for x in part])  # for each rank its q, k and v heads
        send = [nq + 2 * nk for nq, nk in zip(self.num_query, self.num_kv)]
        mine = send[self.rank]
        self.sent.add(packed, send, self.rank)
        packed = all_to_all(packed, send, [mine] * self.size, self.group)  # -> [P*(n_p+2g_p), b, s/P, d]
        packed = packed.view(self.size, mine, batch, tokens, width)
        packed = packed.permute(2, 0, 3, 1, 4)  # -> [b, P, s/P, n_p+2g_p, d]
        nq, nk = self.num_query[self.rank], self.num_kv[self.rank]
        q, k, v = (x.reshape(batch, self.size * tokens, x.shape[3], width) for x in packed.split([nq, nk, nk], dim=3))
        return q, k, v

    def heads_to_sequence(self, o: torch.Tensor) -> torch.Tensor:
        """The way back.

        Args:
            o: [b, s, n_p, d]
        Returns:
            [b, s/P, n, d]
        """
        batch, total, mine, width = o.shape
        tokens = total // self.size
        o = o.view(batch, self.size, tokens, mine, width).permute(1, 3, 0, 2, 4)  # -> [P, n_p, b, s/P, d]
        o = o.reshape(self.size * mine, batch, tokens, width)
        send = [mine] * self.size
        self.sent.add(o, send, self.rank)
        o = all_to_all(o, send, self.num_query, self.group)  # -> [n, b, s/P, d]
        return o.permute(1, 2, 0, 3)


class UlyssesAttention:
    """An attention core behind the two exchanges; same signature as the core."""

    def __init__(self, core: Core, exchange: UlyssesExchange):
        self.core, self.exchange = core, exchange

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
        """[b, s/P, n, d] -> [b, s/P, n, d]"""
        q, k, v = self.exchange.sequence_to_heads(q, k, v)  # [b, s/P, n, d] -> [b, s, n/P, d]
        return self.exchange.heads_to_sequence(self.core(q, k, v, **how))  # [b, s, n/P, d] -> [b, s/P, n, d]
