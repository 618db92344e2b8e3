"""Ulysses: exchange "this rank's tokens, all heads" for "all tokens, this rank's heads" around an attention core.

Source: DeepSpeed-Ulysses (Jacobs et al., PODC '24, arXiv 2309.14509), section 3.1. Just before attention one
all-to-all exchanges q, k and v together. The core then attends over the whole sequence with this rank's heads, and a
second all-to-all changes the output back. With P ranks, s tokens, n query heads, g key/value heads and head width d::

                 heads 0 1 2 3                              heads 0 1 | 2 3
    rank 0  tokens 0-3 [x x x x]     sequence_to_heads   tokens 0-3 [x x] [x x]
    rank 1  tokens 4-7 [x x x x]    ------------------>  tokens 4-7 [x x] [x x]
                                    <------------------            rank 0  rank 1
                                     heads_to_sequence

Per rank and layer the forward sends ``(P-1)/P * s/P * d * (2n + 2 max(g, P))`` elements. The maximum is there because
several ranks get copies of one key/value head when there are fewer such heads than ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_sp.layout.heads import HeadSplit
from megatron_sp.layout.masks.attention_mask import CAUSAL, AttentionMask
from megatron_sp.parallel.collectives import all_to_all, copy_heads, start_all_to_all
from megatron_sp.transport.channel import Channel, SplitChange

Core = Callable[..., torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
#: Starts an all-to-all and returns the function that finishes it; see ``collectives.start_all_to_all``.
Start = Callable[[Sequence[torch.Tensor], SplitChange, Channel], Callable[[], tuple[torch.Tensor, ...]]]


def start_and_wait(tensors: Sequence[torch.Tensor], change: SplitChange,
                   channel: Channel) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Run the whole all-to-all now, and return a function that returns its results.

    For callers that cannot overlap communication with computation.
    """
    results = all_to_all(tensors, change, channel)
    return lambda: results


@dataclass
class BytesSent:
    """Counts what this rank sends to *other* ranks in forward passes. A backward pass sends the same number of bytes.

    Attributes:
        forward: bytes sent so far.
        exchanges: number of exchanges so far.
    """

    forward: int = 0
    exchanges: int = 0

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count one exchange that sends these tensors to other ranks."""
        if torch.compiler.is_compiling():
            return  # torch.compile treats the counter as a constant: it would recompile at every call
        self.forward += sum(x.numel() * x.element_size() for x in tensors)
        self.exchanges += 1


@dataclass
class UlyssesExchange:
    """The two all-to-alls of one attention layer.

    Args:
        channel: sends to the Ulysses ranks. Their shards lie next to each other in the sequence, in rank order.
        heads: how the heads of this tensor-parallel rank are split over the Ulysses ranks.
    """

    channel: Channel
    heads: HeadSplit
    sent: BytesSent = field(default_factory=BytesSent)

    def __post_init__(self) -> None:
        self.size, self.rank = self.channel.size, self.channel.rank
        self.num_query = tuple(stop - start for start, stop in self.heads.ulysses_query)
        self.num_kv = tuple(stop - start for start, stop in self.heads.ulysses_kv)
        wanted = [head for start, stop in self.heads.ulysses_kv for head in range(start, stop)]
        num_local = self.heads.kv[1] - self.heads.kv[0]
        # The key/value heads in the order of the ranks that need them, copies included. None when each head goes to
        # exactly one rank, in order, so that nothing has to be copied.
        self.kv_order = None if wanted == list(range(num_local)) else torch.tensor(wanted, device=self.channel.device)

    def sequence_to_heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Triple:
        """Exchange this rank's tokens with all heads for all tokens with this rank's heads, in one all-to-all.

        Args:
            q: [b, s/P, n, d]
            k, v: [b, s/P, g, d]
        Returns:
            q [b, s, n_p, d], k and v [b, s, g_p, d], where n_p and g_p are this rank's numbers of heads
        """
        return self.start_to_heads(q, k, v, start_and_wait)()

    def start_to_heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                       start: Start = start_all_to_all) -> Callable[[], Triple]:
        """Start the exchange of ``sequence_to_heads`` without waiting for it.

        Args:
            q: [b, s/P, n, d]
            k, v: [b, s/P, g, d]
        Returns:
            A function without arguments. It waits for the exchange and returns q [b, s, n_p, d] and k and v
            [b, s, g_p, d]. Call it once, when they are needed; computation between the two calls runs while the data
            travels.
        """
        assert q.shape[:2] == k.shape[:2] == v.shape[:2], "q, k and v must hold the same tokens"
        if self.kv_order is not None:
            k, v = copy_heads(k, self.kv_order), copy_heads(v, self.kv_order)
        heads, tokens = (self.num_query, self.num_kv, self.num_kv), ((q.shape[1],) * self.size,) * 3
        change = SplitChange(2, heads, 1, tokens)  # [b, s/P, n, d] -> [b, s, n_p, d]
        self._count((q, k, v), change)
        finish = start((q, k, v), change, self.channel)

        def results() -> Triple:
            q, k, v = finish()
            return q, k, v

        return results

    def start_queries(self, q: torch.Tensor, start: Start = start_all_to_all) -> Callable[[], torch.Tensor]:
        """Start to exchange queries alone, where the ranks have the keys and values already; see ``start_to_heads``.

        Args:
            q: [b, s/P, n, d]
        Returns:
            A function without arguments, which waits and returns q [b, s, n_p, d].
        """
        change = SplitChange(2, (self.num_query,), 1, ((q.shape[1],) * self.size,))  # [b, s/P, n, d] -> [b, s, n_p, d]
        self._count((q,), change)
        finish = start((q,), change, self.channel)
        return lambda: finish()[0]

    def _count(self, tensors: Sequence[torch.Tensor], change: SplitChange) -> None:
        self.sent.add(piece for rank, pieces in enumerate(change.pieces(tensors)) if rank != self.rank
                      for piece in pieces)

    def heads_to_sequence(self, o: torch.Tensor) -> torch.Tensor:
        """Exchange the output for all tokens of this rank's heads for this rank's tokens with all heads.

        Args:
            o: [b, s, n_p, d]
        Returns:
            [b, s/P, n, d]
        """
        return self.start_to_sequence(o, start_and_wait)()

    def start_to_sequence(self, o: torch.Tensor, start: Start = start_all_to_all) -> Callable[[], torch.Tensor]:
        """Start the exchange of ``heads_to_sequence`` without waiting for it.

        Args:
            o: [b, s, n_p, d]
        Returns:
            A function without arguments. It waits for the exchange and returns the output [b, s/P, n, d]. Call it once,
            when the output is needed; computation between the two calls runs while the data travels.
        """
        tokens = (o.shape[1] // self.size,) * self.size
        change = SplitChange(1, (tokens,), 2, (self.num_query,))  # [b, s, n_p, d] -> [b, s/P, n, d]
        self._count((o,), change)
        finish = start((o,), change, self.channel)
        return lambda: finish()[0]


class UlyssesAttention:
    """An attention core between two Ulysses exchanges, with the call signature of a core."""

    def __init__(self, core: Core, exchange: UlyssesExchange):
        self.core, self.exchange = core, exchange

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: AttentionMask = CAUSAL,
                 **how: Any) -> torch.Tensor:
        """Attend over the whole sequence: [b, s/P, n, d] -> [b, s/P, n, d]."""
        q, k, v = self.exchange.sequence_to_heads(q, k, v)  # [b, s/P, n, d] -> [b, s, n/P, d]
        return self.exchange.heads_to_sequence(self.core(q, k, v, mask=mask, **how))  # [b, s, n/P, d] -> [b, s/P, n, d]
