"""Attention that forms the probabilities explicitly, for one block of queries after another.

Fused kernels never form the probabilities and are faster. This module is for what they cannot do: dropout with a mask
that backward can draw again, and types for which torch has no fused kernel. Kernels are also compared with it.

Letters: b batch, s tokens, n query heads, g key/value heads (g divides n, query head i uses key/value head
``i * g // n``), d head width, t queries of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_sp.layout.masks.attention_mask import AttentionMask
from megatron_sp.layout.tiles import QUERY_BLOCK
from megatron_sp.model.attention.documents import first_keys, send
from megatron_sp.model.attention.patterns import hidden_keys
from megatron_sp.parallel.random import Dropout, mix, token_keys
from megatron_sp.parallel.ring import Once, Triple, every_time


@dataclass(frozen=True)
class AttentionDropout:
    """Dropout of attention probabilities. A mask depends on sample, head, query and key, and not on the layout.

    Args:
        samples: global sample number of each sequence, int64 [b].
        first_head: global number of the first query head that the core is given.
        earlier: tokens of the sequence before the first key that attention is given.
    """

    dropout: Dropout
    samples: torch.Tensor
    first_head: int
    earlier: int = 0

    def keep(self, first_query: int, queries: int, keys: int, heads: int, device: torch.device) -> torch.Tensor:
        """Return which probabilities of a block of queries to keep, bool [b, n, queries, keys]; equal in any layout.

        Args:
            first_query: number of the first query, counted from the first key that attention is given.
        """
        def numbers(first: int, count: int) -> torch.Tensor:
            return torch.arange(first, first + count, device=device)

        tokens = token_keys(self.samples.to(device), numbers(self.earlier + first_query, queries))  # [2, b, t]
        rows = mix(tokens.unsqueeze(2), numbers(self.first_head, heads).unsqueeze(-1))  # -> [2, b, n, t]
        return self.dropout.keep(rows, numbers(self.earlier, keys))


def block_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first_query: int, causal: bool,
                    dropout: AttentionDropout | None,
                    first_keys: torch.Tensor | None = None,
                    hidden: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of one block of queries to the given keys, and the log-sum-exp of its scores.

    Args:
        q: [b, t, n, d], the queries from position ``first_query`` on.
        k, v: [b, s', g, d], the keys from position 0 on.
        first_keys: [b, t], the first position that each query sees, on the device of q; default: 0.
        hidden: bool [n, t, s'], True for keys that a query of a head must not see, in addition to the rules above;
            default: none.

    Returns:
        o [b, t, n, d] and the log-sum-exp [b, n, t], at least fp32
    """
    probabilities, lse = _probabilities(q, k, first_query, causal, dropout, first_keys, hidden)
    o = torch.einsum("bgrqk,bkgd->bqgrd", probabilities.to(v.dtype), v)  # -> [b, t, g, n/g, d]
    if dropout is not None:
        o = o / (1.0 - dropout.dropout.probability)
    return o.flatten(2, 3), lse.flatten(1, 2)


def _probabilities(q: torch.Tensor, k: torch.Tensor, first_query: int, causal: bool,
                   dropout: AttentionDropout | None, first_keys: torch.Tensor | None,
                   hidden: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities [b, g, n/g, t, s'] and the log-sum-exp [b, g, n/g, t], at least fp32.

    Those that dropout drops are 0. The others are not yet divided by the share that is kept.
    """
    queries, heads, width = q.shape[1:]
    keys, groups = k.shape[1], k.shape[2]
    grouped = q.unflatten(2, (groups, heads // groups))
    scores = torch.einsum("bqgrd,bkgd->bgrqk", grouped, k)  # [b, t, n, d] -> [b, g, n/g, t, s']
    scores = scores.to(torch.promote_types(q.dtype, torch.float32)).div_(math.sqrt(width))
    if causal:
        position = torch.arange(first_query, first_query + queries, device=q.device).unsqueeze(1)
        scores = scores.masked_fill_(torch.arange(keys, device=q.device) > position, -torch.inf)
    if first_keys is not None:
        earlier = torch.arange(keys, device=q.device) < first_keys.unsqueeze(-1)  # [b, t, s']
        scores = scores.masked_fill_(earlier[:, None, None], -torch.inf)
    if hidden is not None:
        scores = scores.masked_fill_(hidden.to(q.device).unflatten(0, (groups, -1)), -torch.inf)
    lse = scores.logsumexp(-1)
    probabilities = (scores - lse.unsqueeze(-1)).exp()
    if dropout is not None:
        keep = dropout.keep(first_query, queries, keys, heads, q.device).view_as(probabilities)
        probabilities = probabilities * keep
    return probabilities, lse


def query_blocks(tokens: int) -> list[slice]:
    """Return the blocks of ``QUERY_BLOCK`` consecutive queries, the last one shorter where they do not divide."""
    return [slice(first, min(first + QUERY_BLOCK, tokens)) for first in range(0, tokens, QUERY_BLOCK)]


def attend_in_query_blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask,
                           dropout: AttentionDropout | None, once: Once = every_time) -> torch.Tensor:
    """Return attention o [b, t, n, d] with memory linear in the tokens, because only q, k and v are kept for backward.

    Backward computes each block again. It draws the same dropout mask, because that is a hash of sample, head, query
    and key.

    Args:
        once: runs attention, or takes its result where recomputation kept it; see ``ring.Once``.
    """
    earlier = k.shape[1] - q.shape[1]  # tokens whose keys are given, but not their queries
    all_first = first_keys(mask, k.shape[0], k.shape[1]) if mask.needs else None
    sent = None if all_first is None else send(all_first, q.device)
    blocks = []
    for rows in query_blocks(q.shape[1]):
        start, stop, low, seen_from = earlier + rows.start, earlier + rows.stop, 0, None
        drop = dropout
        if all_first is not None and sent is not None:
            low = int(all_first[:, start:stop].min())
            seen_from = sent[:, start:stop] - low
            drop = dropout and replace(dropout, earlier=dropout.earlier + low)
        blocks.append(_QueryBlock(rows, slice(low, stop), start - low, seen_from, mask, drop))
    return _QueryBlocks.apply(q, k, v, blocks, once)


@dataclass(frozen=True)
class _QueryBlock:
    """A block of queries and the keys that it sees.

    Attributes:
        rows, keys: places of the queries and of the keys.
        first: place of the first query, counted from the first key.
        seen_from: see ``first_keys`` of ``block_attention``.
    """

    rows: slice
    keys: slice
    first: int
    seen_from: torch.Tensor | None
    mask: AttentionMask
    dropout: AttentionDropout | None

    def parts(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Triple:
        """Return the block's queries, keys and values."""
        return q[:, self.rows], k[:, self.keys], v[:, self.keys]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return the output of ``parts``, [b, t, n, d]."""
        return block_attention(q, k, v, self.first, True, self.dropout, self.seen_from, self._hidden(q))[0]

    def gradients(self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Triple:
        """Return the gradients of ``parts``. The probabilities are formed again, and the output is not."""
        q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
        with torch.enable_grad():
            probabilities, _ = _probabilities(q, k, self.first, True, self.dropout, self.seen_from, self._hidden(q))
        if self.dropout is not None:
            grad = grad / (1.0 - self.dropout.dropout.probability)
        grad = grad.unflatten(2, (k.shape[2], -1))  # [b, t, n, d] -> [b, t, g, n/g, d]
        dv = torch.einsum("bgrqk,bqgrd->bkgd", probabilities.detach().to(v.dtype), grad)
        formed, dtype = torch.autograd.graph.get_gradient_edge(probabilities), probabilities.dtype
        del probabilities  # what is left of them after dropout: their gradient does not need it
        of_probabilities = torch.einsum("bqgrd,bkgd->bgrqk", grad, v).to(dtype)
        dq, dk = torch.autograd.grad(formed, (q, k), of_probabilities)
        return dq, dk, dv

    def _hidden(self, q: torch.Tensor) -> torch.Tensor | None:
        """Return what the pattern hides, for a block at a time, because all blocks' would be quadratic."""
        if self.mask.pattern is None:
            return None
        queries = self.keys.start + self.first, self.keys.stop
        return hidden_keys(self.mask, q.shape[2], queries, queries[1])[..., self.keys.start:]


class _QueryBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Sequence[_QueryBlock],
                once: Once) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.blocks = blocks
        o: torch.Tensor = once(lambda: torch.cat([block.attend(*block.parts(q, k, v)) for block in blocks], dim=1))
        return o

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, k, v = ctx.saved_tensors
        wide = torch.promote_types(q.dtype, torch.float32)
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros_like(x, dtype=wide) for x in (k, v))  # sums over the blocks
        for block in ctx.blocks:
            dq[:, block.rows], dk_part, dv_part = block.gradients(grad[:, block.rows], *block.parts(q, k, v))
            dk[:, block.keys] += dk_part
            dv[:, block.keys] += dv_part
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None
