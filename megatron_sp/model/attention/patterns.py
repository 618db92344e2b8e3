"""Attention under a pattern of blocks, made of calls of a block kernel: memory and time grow with the pairs it allows.

``layout.patterns`` cuts the pattern into pieces. Pieces of one size are gathered and computed together, as a batch::

    block of queries    2     3     4     5
    earlier blocks      0     0 2   1 3   3 4         one call for 3, 4 and 5, one for 2
    own block           c     c     c     c           one call for all (c: causal)

The results of a query are merged by their log-sum-exp. Where heads see different blocks, every head is computed as if
it were a sequence of its own.

Letters: b batch, s tokens, t queries of a piece, u keys of a piece, n query heads, g key/value heads, d head width,
p pieces of one size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megatron_sp.activations.key_values import Past
from megatron_sp.layout.masks.attention_mask import CAUSAL, AttentionMask, Range
from megatron_sp.layout.patterns.pieces import PatternPiece, pattern_pieces
from megatron_sp.model.attention.documents import send
from megatron_sp.parallel.ring import BlockKernel, Once, every_time, merge
from megatron_sp.parallel.ulysses import Core

#: Keys that one call of a kernel is given at most, unless a single piece has more. It bounds what is copied.
KEYS_AT_ONCE = 1 << 15


class NumberedHeads:
    """A core that is told which heads of the model it attends with, for patterns that differ by head."""

    def __init__(self, core: Core, first_head: int):
        self.core, self.first_head = core, first_head

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: AttentionMask = CAUSAL,
                 **how: Any) -> torch.Tensor:
        """Attend: q [b, t, n, d], k, v [b, s, g, d] -> [b, t, n, d]."""
        return self.core(q, k, v, mask=mask.of_heads(self.first_head), **how)


def hidden_keys(mask: AttentionMask, heads: int, queries: Range, keys: int) -> torch.Tensor:
    """Return which keys the pattern hides from some queries, bool [n, t, s'] on the CPU.

    Args:
        heads: n.
        queries: range of positions.
        keys: s', the keys from position 0 on.
    """
    assert mask.pattern is not None
    size, kinds = mask.pattern.block, {}
    blocks = range(queries[0] // size, -(-queries[1] // size))
    for head in range(mask.first_head, mask.first_head + heads):
        kind = mask.pattern.kind(head)
        if kind not in kinds:
            seen = torch.zeros(len(blocks), -(-keys // size), dtype=torch.bool)
            for row, block in enumerate(blocks):
                seen[row, [number for number in (*mask.pattern.earlier(head, block), block)
                           if number < seen.shape[1]]] = True
            by_query = seen.repeat_interleave(size, 0)[queries[0] % size:][:queries[1] - queries[0]]
            kinds[kind] = ~by_query.repeat_interleave(size, 1)[:, :keys]
    return torch.stack([kinds[mask.pattern.kind(head)] for head in range(mask.first_head, mask.first_head + heads)])


@dataclass
class Same:
    """Pieces of a pattern with the same number of queries and of keys, so that few kernel calls compute them.

    Attributes:
        queries: first query of each piece.
        starts, lengths: of the ranges of keys of all pieces, one after another.
        heads: query head of each piece, counted on this rank; 0 where all heads are computed together.
        rows: sequence of each piece; -1 stands for all sequences.
    """

    queries: list[int]
    starts: list[int]
    lengths: list[int]
    heads: list[int]
    rows: list[int]

    def add(self, piece: PatternPiece, row: int, head: int) -> None:
        """Add a piece."""
        self.queries.append(piece.queries[0])
        self.starts += [low for low, _ in piece.keys]
        self.lengths += [high - low for low, high in piece.keys]
        self.heads.append(head)
        self.rows.append(row)


class Parts:
    """Pieces of the attention to a block of keys, by their size.

    Attributes:
        keys: positions of the block of keys.
        by_size: for a number of queries, a number of keys and whether the pieces are causal, the pieces.
    """

    def __init__(self, keys: Range):
        self.keys = keys
        self.by_size: dict[tuple[int, int, bool], Same] = {}

    def add(self, piece: PatternPiece, row: int, head: int) -> None:
        """Add a piece; see ``Same`` for row and head."""
        size = piece.queries[1] - piece.queries[0], piece.num_keys, piece.causal
        self.by_size.setdefault(size, Same([], [], [], [], [])).add(piece, row, head)


class Places(NamedTuple):
    """Where the queries and the keys of p pieces are in the tensors of a block of queries and a block of keys.

    Attributes:
        queries: int64 [p, t], numbers of rows of queries.
        keys: int64 [p, u], numbers of rows of keys.
        causal: see ``PatternPiece``.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    causal: bool


class PatternBlocks:
    """Attention of some queries to one block of keys after another, as ``chunk_attention.Blocks``, under a pattern.

    Pieces are gathered by rows. Where all heads see the same blocks, a row is a token with all its heads, [n, d].
    Otherwise a row is one head of a token, [1, d].

    Args:
        queries: positions of the queries in the sequence.
        batch: number of sequences.
        heads: n.
        kv_indices: for each query head the index of its key/value head; default: equal groups in order.
    """

    def __init__(self, kernel: BlockKernel, mask: AttentionMask, queries: Range, batch: int, heads: int,
                 kv_indices: tuple[int, ...] = ()):
        assert mask.pattern is not None
        self.kernel, self.mask, self.queries, self.batch, self.kv_indices = kernel, mask, queries, batch, kv_indices
        self.heads = heads
        self.by_head = mask.pattern.by_head or bool(kv_indices)

    def _pieces(self, keys: Range) -> Iterator[tuple[PatternPiece, int, int]]:
        """Yield the pieces of the attention to some keys, with their sequence and head as ``Same`` counts them."""
        for row in range(self.batch) if self.mask.documents else (-1,):
            for head in range(self.heads if self.by_head else 1):
                for piece in pattern_pieces(self.mask, max(row, 0), self.mask.first_head + head, self.queries, keys):
                    yield piece, row, head

    def parts(self, keys: Range) -> Parts:
        """Return the pieces of the attention to a block of keys, given their positions."""
        found = Parts(keys)
        for piece, row, head in self._pieces(keys):
            found.add(piece, row, head)
        return found

    def visible(self, past: Past) -> dict[int, Parts]:
        """Return the numbers of the earlier chunks in which the queries see keys, each with its parts."""
        found: dict[int, Parts] = {}
        for piece, row, head in self._pieces((0, past.first_token)) if past.first_token else ():
            for number, part in piece.by_chunk(past.size):
                if number not in found:
                    found[number] = Parts(past.keys(number))
                found[number].add(part, row, head)
        return dict(sorted(found.items()))

    def _places(self, parts: Parts, groups: int, device: torch.device) -> Iterator[Places]:
        """Yield the places of all pieces, a limited number of one size at a time. A query occurs at most once in each.

        Args:
            groups: key/value heads of the block of keys.
        """
        tokens = self.queries[1] - self.queries[0], parts.keys[1] - parts.keys[0]
        for (t, u, causal), same in parts.by_size.items():
            starts, lengths = torch.tensor(same.starts), torch.tensor(same.lengths)
            whole = torch.arange(len(same.queries) * u) + (starts - lengths.cumsum(0) + lengths).repeat_interleave(
                lengths)
            asked = (torch.tensor(same.queries) - self.queries[0]).unsqueeze(1) + torch.arange(t)  # [p, t]
            seen = whole.view(-1, u) - parts.keys[0]  # [p, u]
            rows, heads = torch.tensor(same.rows).unsqueeze(1), torch.tensor(same.heads).unsqueeze(1)  # [p, 1]
            if same.rows[0] < 0:  # the same pieces in every sequence
                rows = torch.arange(self.batch).repeat_interleave(len(rows)).unsqueeze(1)
                asked, seen, heads = (x.repeat(self.batch, 1) for x in (asked, seen, heads))
            asked, seen = asked + rows * tokens[0], seen + rows * tokens[1]
            if self.by_head:
                kv = torch.tensor(self.kv_indices)[heads] if self.kv_indices else heads * groups // self.heads
                asked, seen = asked * self.heads + heads, seen * groups + kv
            step = max(1, KEYS_AT_ONCE // max(t, u))
            for first in range(0, len(asked), step):
                yield Places(send(asked[first:first + step], device), send(seen[first:first + step], device), causal)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor as rows: [b, t, n, d] -> [b*t, n, d], or [b*t*n, 1, d] where heads differ."""
        return x.flatten(0, 2).unsqueeze(1) if self.by_head else x.flatten(0, 1)

    def add_output(self, parts: Parts, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
                   lse: torch.Tensor) -> None:
        """Merge the attention to a block of keys into an output [b, t, n, d] and a log-sum-exp [b, n, t]."""
        wide = lse.transpose(1, 2).contiguous()  # [b, t, n]
        row_lse = wide.view(-1, 1) if self.by_head else wide.flatten(0, 1)
        row_q, row_k, row_v, row_o = (self._rows(x) for x in (q, k, v, o))
        for places in self._places(parts, k.shape[2], q.device):
            asked, seen = places.queries, places.keys
            o_part, lse_part = self.kernel.forward(row_q[asked], row_k[seen], row_v[seen], places.causal)
            merged, merged_lse = row_o[asked], row_lse[asked]
            merge(merged, merged_lse.transpose(1, 2), o_part, lse_part)
            row_o[asked], row_lse[asked] = merged, merged_lse
        lse.copy_(wide.transpose(1, 2))

    def gradients(self, parts: Parts, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                  o: torch.Tensor, lse: torch.Tensor, dq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add to dq what comes from a block of keys, and return the gradients dk and dv of the block."""
        dk, dv = (torch.zeros(x.shape, dtype=dq.dtype, device=x.device) for x in (k, v))
        wide = lse.transpose(1, 2).contiguous()
        row_lse = wide.view(-1, 1) if self.by_head else wide.flatten(0, 1)
        row_grad, row_q, row_k, row_v, row_o = (self._rows(x) for x in (grad, q, k, v, o))
        totals = [self._rows(x) for x in (dq, dk, dv)]
        for places in self._places(parts, k.shape[2], q.device):
            asked, seen = places.queries, places.keys
            found = self.kernel.backward(row_grad[asked], row_q[asked], row_k[seen], row_v[seen], row_o[asked],
                                         row_lse[asked].transpose(1, 2).contiguous(), places.causal)
            for total, where, part in zip(totals, (asked, seen, seen), found):
                # Several pieces of a call may see the same key, so their gradients of that key are added.
                total.index_add_(0, where.flatten(), part.to(total.dtype).flatten(0, 1))
        return dk, dv


class PatternAttention:
    """Attention under a pattern to whole sequences: (q [b, s, n, d], k, v [b, s, g, d], mask) -> o [b, s, n, d].

    Args:
        kernel: attends to one block of keys.
        once: runs attention, or takes its result where recomputation kept it; see ``ring.Once``.
    """

    def __init__(self, kernel: BlockKernel, once: Once = every_time):
        self.description = f"{kernel.description} (blocks of the pattern)"
        self.kernel, self.once = kernel, once

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
        """Attend."""
        blocks = PatternBlocks(self.kernel, mask, (0, q.shape[1]), *q.shape[0:3:2])
        return _PatternAttention.apply(q, k, v, blocks, self.once)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
            blocks: PatternBlocks) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend: -> o [b, s, n, d] in the type of q, log-sum-exp [b, n, s] in at least fp32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    o = torch.zeros(q.shape, dtype=wide, device=q.device)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=wide, device=q.device)
    blocks.add_output(blocks.parts(blocks.queries), q, k, v, o, lse)
    return o.to(q.dtype), lse


class _PatternAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: PatternBlocks,
                once: Once) -> torch.Tensor:
        o, lse = once(lambda: _attend(q, k, v, blocks))
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.blocks = blocks
        return o

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, k, v, o, lse = ctx.saved_tensors
        blocks: PatternBlocks = ctx.blocks
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        dk, dv = blocks.gradients(blocks.parts(blocks.queries), grad, q, k, v, o, lse, dq)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None
