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
        if torch.compiler.is_compiling():
            return  # a counter would make each call another program
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
        if self.kv_copies is not None:
            index = torch.tensor(self.kv_copies, device=k.device)
            k, v = k.index_select(2, index), v.index_select(2, index)
        send = [nq + 2 * nk for nq, nk in zip(self.num_query, self.num_kv)]
        mine = send[self.rank]
        packed = self._pack(q, k, v)  # -> [sum of heads, b*s/P*d]
        self.sent.add(packed, send, self.rank)
        packed = all_to_all(packed, send, [mine] * self.size, self.group)  # -> [P*(n_p+2g_p), b*s/P*d]
        packed = packed.view(self.size, batch, tokens, mine, width).transpose(0, 1)
        packed = packed.reshape(batch, self.size * tokens, mine, width)  # -> [b, s, n_p+2g_p, d], a view if b = 1
        nq, nk = self.num_query[self.rank], self.num_kv[self.rank]
        q, k, v = packed.split([nq, nk, nk], dim=2)
        return q, k, v

    def _pack(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """For each rank p a block [b, s/P, n_p+2g_p, d] of its q, k and v heads: token by token, so that
        the blocks received from all ranks are the whole sequence without another copy.

        The blocks follow each other as rows, one for each head of theirs: [sum of heads, b*s/P*d].
        """
        batch, tokens, _, width = q.shape
        row = batch * tokens * width
        if len(set(self.num_query)) == len(set(self.num_kv)) == 1:  # equal blocks: one copy
            q, k, v = (x.unflatten(2, (self.size, -1)).movedim(2, 0) for x in (q, k, v))  # [P, b, s/P, n_p, d]
            return torch.cat((q, k, v), dim=3).view(-1, row)
        parts = zip(q.split(self.num_query, 2), k.split(self.num_kv, 2), v.split(self.num_kv, 2))
        return torch.cat([torch.cat(part, dim=2).view(sum(x.shape[2] for x in part), row) for part in parts])

    def heads_to_sequence(self, o: torch.Tensor) -> torch.Tensor:
        """The way back.

        Args:
            o: [b, s, n_p, d]
        Returns:
            [b, s/P, n, d]
        """
        batch, total, mine, width = o.shape
        tokens = total // self.size
        o = o.view(batch, self.size, tokens, mine, width).transpose(0, 1)  # -> [P, b, s/P, n_p, d]
        o = o.reshape(self.size * mine, batch * tokens * width)  # a view if b = 1
        send = [mine] * self.size
        self.sent.add(o, send, self.rank)
        o = all_to_all(o, send, self.num_query, self.group)  # -> [n, b*s/P*d], for each rank a block [b, s/P, n_p, d]
        blocks = zip(o.split(self.num_query), self.num_query)
        return torch.cat([block.view(batch, tokens, heads, width) for block, heads in blocks], dim=2)


class UlyssesAttention:
    """An attention core behind the two exchanges; same signature as the core."""

    def __init__(self, core: Core, exchange: UlyssesExchange):
        self.core, self.exchange = core, exchange

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
        """[b, s/P, n, d] -> [b, s/P, n, d]"""
        q, k, v = self.exchange.sequence_to_heads(q, k, v)  # [b, s/P, n, d] -> [b, s, n/P, d]
        return self.exchange.heads_to_sequence(self.core(q, k, v, **how))  # [b, s, n/P, d] -> [b, s/P, n, d]
