"""Ulysses: turn "my tokens, all heads" into "all tokens, my heads" around any attention core.

DeepSpeed-Ulysses (Jacobs et al., PODC '24, arXiv 2309.14509), section 3.1. Just before attention one all-to-all
exchanges q, k and v together. The core then attends over the whole sequence with this rank's heads, and a second
all-to-all brings the output back. With P ranks, s tokens, n query heads, g key/value heads and head width d::

                 heads 0 1 2 3                              heads 0 1 | 2 3
    rank 0  tokens 0-3 [x x x x]     sequence_to_heads   tokens 0-3 [x x] [x x]
    rank 1  tokens 4-7 [x x x x]    ------------------>  tokens 4-7 [x x] [x x]
                                    <------------------            rank 0  rank 1
                                     heads_to_sequence

Per rank and layer the forward sends ``(P-1)/P * s/P * d * (2n + 2 max(g, P))`` elements: when there are fewer
key/value heads than ranks, several ranks get copies of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_sp.layout.heads import HeadSplit
from megatron_sp.parallel.collectives import all_to_all, copy_heads, start_all_to_all
from megatron_sp.transport.channel import Channel

Core = Callable[..., torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
#: Starts an all-to-all and returns the function that finishes it; see ``collectives.start_all_to_all``.
Start = Callable[[torch.Tensor, list[int], list[int], Channel], Callable[[], torch.Tensor]]


def start_and_wait(x: torch.Tensor, send: list[int], receive: list[int],
                   channel: Channel) -> Callable[[], torch.Tensor]:
    """Run the whole all-to-all now; the function returned only gives its result. For callers that cannot overlap."""
    result = all_to_all(x, send, receive, channel)
    return lambda: result


@dataclass
class BytesSent:
    """Bytes that this rank sent to *other* ranks in forward exchanges; backward sends the same again."""

    forward: int = 0
    exchanges: int = 0

    def add(self, x: torch.Tensor, send: list[int], own_rank: int) -> None:
        """Count one all-to-all of ``send[p]`` rows of x to each rank p."""
        if torch.compiler.is_compiling():
            return  # a number that changes would make torch.compile compile every call anew
        rows = sum(send) - send[own_rank]
        self.forward += rows * x[0].numel() * x.element_size() if len(x) else 0
        self.exchanges += 1

    def add_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count one exchange that sends these tensors whole to other ranks."""
        self.forward += sum(x.numel() * x.element_size() for x in tensors)
        self.exchanges += 1


@dataclass
class UlyssesExchange:
    """The two layout changes of one attention layer.

    Args:
        channel: to the Ulysses ranks, whose shards are adjacent pieces of the sequence.
        heads: how the heads of this tp rank are split over them.
    """

    channel: Channel
    heads: HeadSplit
    sent: BytesSent = field(default_factory=BytesSent)

    def __post_init__(self) -> None:
        self.size, self.rank = self.channel.size, self.channel.rank
        self.num_query = [stop - start for start, stop in self.heads.ulysses_query]
        self.num_kv = [stop - start for start, stop in self.heads.ulysses_kv]
        wanted = [head for start, stop in self.heads.ulysses_kv for head in range(start, stop)]
        num_local = self.heads.kv[1] - self.heads.kv[0]
        # The key/value heads in the order of the ranks that want them; None: each goes to exactly one rank, in order.
        self.kv_order = None if wanted == list(range(num_local)) else torch.tensor(wanted, device=self.channel.device)

    def sequence_to_heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Triple:
        """Exchange q, k and v in one all-to-all.

        Args:
            q: [b, s/P, n, d], k, v: [b, s/P, g, d]
        Returns:
            q [b, s, n_p, d], k, v [b, s, g_p, d] with the heads of this rank
        """
        return self.start_to_heads(q, k, v, start_and_wait)()

    def start_to_heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                       start: Start = start_all_to_all) -> Callable[[], Triple]:
        """Start ``sequence_to_heads`` and return the function that finishes it."""
        batch, tokens, _, width = q.shape
        assert k.shape[:2] == v.shape[:2] == (batch, tokens), "q, k and v must hold the same tokens"
        if self.kv_order is not None:
            k, v = copy_heads(k, self.kv_order), copy_heads(v, self.kv_order)
        send = [nq + 2 * nk for nq, nk in zip(self.num_query, self.num_kv)]
        mine = send[self.rank]
        packed = self._pack(q, k, v)  # -> [sum of heads, b*s/P*d]
        self.sent.add(packed, send, self.rank)
        finish = start(packed, send, [mine] * self.size, self.channel)

        def unpack() -> Triple:
            packed = finish().view(self.size, batch, tokens, mine, width).transpose(0, 1)
            packed = packed.reshape(batch, self.size * tokens, mine, width)  # -> [b, s, n_p+2g_p, d], a view if b = 1
            nq, nk = self.num_query[self.rank], self.num_kv[self.rank]
            q, k, v = packed.split([nq, nk, nk], dim=2)
            return q, k, v

        return unpack

    def _pack(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Lay out for each rank p a block [b, s/P, n_p+2g_p, d] of the q, k and v heads that go there.

        A block holds token after token, so that the blocks that a rank receives are the whole sequence in order.

        Returns:
            the blocks one after another, as rows of which each head of a block has one: [sum of heads, b*s/P*d]
        """
        batch, tokens, _, width = q.shape
        row = batch * tokens * width
        if len(set(self.num_query)) == len(set(self.num_kv)) == 1:  # equal blocks: one copy
            q, k, v = (x.unflatten(2, (self.size, -1)).movedim(2, 0) for x in (q, k, v))  # [P, b, s/P, n_p, d]
            return torch.cat((q, k, v), dim=3).view(-1, row)
        parts = zip(q.split(self.num_query, 2), k.split(self.num_kv, 2), v.split(self.num_kv, 2))
        return torch.cat([torch.cat(part, dim=2).view(sum(x.shape[2] for x in part), row) for part in parts])

    def heads_to_sequence(self, o: torch.Tensor) -> torch.Tensor:
        """Exchange the output back.

        Args:
            o: [b, s, n_p, d]
        Returns:
            [b, s/P, n, d]
        """
        return self.start_to_sequence(o, start_and_wait)()

    def start_to_sequence(self, o: torch.Tensor, start: Start = start_all_to_all) -> Callable[[], torch.Tensor]:
        """Start ``heads_to_sequence`` and return the function that finishes it."""
        batch, total, mine, width = o.shape
        tokens = total // self.size
        o = o.view(batch, self.size, tokens, mine, width).transpose(0, 1)  # -> [P, b, s/P, n_p, d]
        o = o.reshape(self.size * mine, batch * tokens * width)  # a view if b = 1
        send = [mine] * self.size
        self.sent.add(o, send, self.rank)
        # -> [n, b*s/P*d], which is a block [b, s/P, n_p, d] from each rank
        finish = start(o, send, self.num_query, self.channel)

        def unpack() -> torch.Tensor:
            blocks = zip(finish().split(self.num_query), self.num_query)
            return torch.cat([block.view(batch, tokens, heads, width) for block, heads in blocks], dim=2)

        return unpack


class UlyssesAttention:
    """An attention core between the two exchanges; it has the signature of a core."""

    def __init__(self, core: Core, exchange: UlyssesExchange):
        self.core, self.exchange = core, exchange

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
        """[b, s/P, n, d] -> [b, s/P, n, d]"""
        q, k, v = self.exchange.sequence_to_heads(q, k, v)  # [b, s/P, n, d] -> [b, s, n/P, d]
        return self.exchange.heads_to_sequence(self.core(q, k, v, **how))  # [b, s, n/P, d] -> [b, s/P, n, d]
