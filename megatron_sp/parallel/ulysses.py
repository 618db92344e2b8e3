"""Ulysses: turn "my tokens, all heads" into "all tokens, my heads" around any attention core.

DeepSpeed-Ulysses (Jacobs et al., PODC '24, arXiv 2309.14509), section 3.1. Just before attention
one all-to-all exchanges q, k and v together; the core then attends over the whole sequence with
this rank's heads; a second all-to-all brings the output back. Per rank and layer the forward
sends ``(P-1)/P * s/P * d * (2n + 2 g_eff)`` elements, ``g_eff = g if g >= P else P``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_sp.layout.heads import HeadSplit
from megatron_sp.parallel.collectives import all_to_all, start_all_to_all
from megatron_sp.transport.shared_memory import SharedMemoryLink

Core = Callable[..., torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
#: An all-to-all in two parts, see ``collectives.start_all_to_all``.
Start = Callable[[torch.Tensor, list[int], list[int], dist.ProcessGroup], Callable[[], torch.Tensor]]


def at_once(x: torch.Tensor, send: list[int], receive: list[int],
            group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """The first part does it all."""
    result = all_to_all(x, send, receive, group)
    return lambda: result


@dataclass
class BytesSent:
    """Bytes this rank sent to *other* ranks in forward exchanges; backward sends the same again."""

    forward: int = 0
    exchanges: int = 0

    def add(self, x: torch.Tensor, send: list[int], own: int) -> None:
        """A tensor of ``send[p]`` rows for each rank p, ``own`` being this one."""
        if torch.compiler.is_compiling():
            return  # a counter would make each call another program
        rows = sum(send) - send[own]
        self.forward += rows * x[0].numel() * x.element_size() if len(x) else 0
        self.exchanges += 1

    def add_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        """Whole tensors sent to other ranks, together."""
        self.forward += sum(x.numel() * x.element_size() for x in tensors)
        self.exchanges += 1


@dataclass
class UlyssesExchange:
    """The two layout changes of one attention layer.

    Args:
        group: the Ulysses ranks, whose shards are adjacent pieces of the sequence.
        heads: the split of the heads this tp rank computes.
        link: memory the ranks share; without it they exchange through the group's all-to-all.
    """

    group: dist.ProcessGroup
    heads: HeadSplit
    link: SharedMemoryLink | None = None
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

    def sequence_to_heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Triple:
        """One all-to-all for q, k and v together.

        Args:
            q: [b, s/P, n, d], k, v: [b, s/P, g, d]
        Returns:
            q [b, s, n_p, d], k, v [b, s, g_p, d] with the heads of this rank
        """
        if self.link is not None:
            return _ThroughMemory.apply(self, True, q, *self._copied(k, v))
        return self.start_to_heads(q, k, v, at_once)()

    def _copied(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Key/value heads once for each rank that needs them, in the order of the ranks."""
        if self.kv_copies is None:
            return k, v
        index = torch.tensor(self.kv_copies, device=k.device)
        return k.index_select(2, index), v.index_select(2, index)

    def start_to_heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                       start: Start = start_all_to_all) -> Callable[[], Triple]:
        """``sequence_to_heads`` in two parts: the second is the function returned."""
        batch, tokens, _, width = q.shape
        assert k.shape[:2] == v.shape[:2] == (batch, tokens), "q, k and v must hold the same tokens"
        k, v = self._copied(k, v)
        send = [nq + 2 * nk for nq, nk in zip(self.num_query, self.num_kv)]
        mine = send[self.rank]
        packed = self._pack(q, k, v)  # -> [sum of heads, b*s/P*d]
        self.sent.add(packed, send, self.rank)
        finish = start(packed, send, [mine] * self.size, self.group)

        def unpack() -> Triple:
            packed = finish().view(self.size, batch, tokens, mine, width).transpose(0, 1)
            packed = packed.reshape(batch, self.size * tokens, mine, width)  # -> [b, s, n_p+2g_p, d], a view if b = 1
            nq, nk = self.num_query[self.rank], self.num_kv[self.rank]
            q, k, v = packed.split([nq, nk, nk], dim=2)
            return q, k, v

        return unpack

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
        if self.link is not None:
            return _ThroughMemory.apply(self, False, o)[0]
        return self.start_to_sequence(o, at_once)()

    def start_to_sequence(self, o: torch.Tensor, start: Start = start_all_to_all) -> Callable[[], torch.Tensor]:
        """``heads_to_sequence`` in two parts: the second is the function returned."""
        batch, total, mine, width = o.shape
        tokens = total // self.size
        o = o.view(batch, self.size, tokens, mine, width).transpose(0, 1)  # -> [P, b, s/P, n_p, d]
        o = o.reshape(self.size * mine, batch * tokens * width)  # a view if b = 1
        send = [mine] * self.size
        self.sent.add(o, send, self.rank)
        finish = start(o, send, self.num_query, self.group)  # -> [n, b*s/P*d], for each rank a block [b, s/P, n_p, d]

        def unpack() -> torch.Tensor:
            blocks = zip(finish().split(self.num_query), self.num_query)
            return torch.cat([block.view(batch, tokens, heads, width) for block, heads in blocks], dim=2)

        return unpack


    def through_memory(self, tensors: Sequence[torch.Tensor], *, to_heads: bool,
                       sent: BytesSent | None = None) -> list[torch.Tensor]:
        """The exchange of query, key and value (or fewer) through shared memory, straight from place to place.

        Args:
            tensors: ``to_heads``: [b, s/P, n, d] with the heads of all ranks; else [b, s, n_p, d]
            sent: where to count the bytes
        Returns:
            [b, s, n_p, d], or [b, s/P, n, d]
        """
        assert self.link is not None
        send: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        receive: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        results = []
        for x, counts in zip(tensors, (self.num_query, self.num_kv, self.num_kv)):
            batch, tokens, _, width = x.shape
            result = x.new_empty((batch, tokens * self.size, counts[self.rank], width) if to_heads else
                                 (batch, tokens // self.size, sum(counts), width))
            results.append(result)
            there = x.split(counts, 2) if to_heads else x.chunk(self.size, 1)
            here = result.chunk(self.size, 1) if to_heads else result.split(counts, 2)
            for peer in range(self.size):  # one piece for each sequence: [s/P, n_p, d]
                send[peer].extend(there[peer])
                receive[peer].extend(here[peer])
        if sent is not None:
            sent.add_tensors(piece for peer, pieces in enumerate(send) if peer != self.rank for piece in pieces)
        self.link.exchange(send, receive)
        return results


class _ThroughMemory(torch.autograd.Function):
    """``UlyssesExchange.through_memory``; backward is the opposite exchange."""

    @staticmethod
    def forward(ctx: Any, exchange: UlyssesExchange, to_heads: bool, *tensors: torch.Tensor,
                ) -> tuple[torch.Tensor, ...]:
        ctx.exchange, ctx.to_heads = exchange, to_heads
        return tuple(exchange.through_memory(tensors, to_heads=to_heads, sent=exchange.sent))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.exchange.through_memory(grads, to_heads=not ctx.to_heads)


class UlyssesAttention:
    """An attention core behind the two exchanges; same signature as the core."""

    def __init__(self, core: Core, exchange: UlyssesExchange):
        self.core, self.exchange = core, exchange

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
        """[b, s/P, n, d] -> [b, s/P, n, d]"""
        q, k, v = self.exchange.sequence_to_heads(q, k, v)  # [b, s/P, n, d] -> [b, s, n/P, d]
        return self.exchange.heads_to_sequence(self.core(q, k, v, **how))  # [b, s, n/P, d] -> [b, s/P, n, d]
