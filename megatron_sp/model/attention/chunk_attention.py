"""Attention of one chunk of a sequence to itself and to the kept keys of earlier chunks.

Under a causal mask all keys of earlier chunks are visible, and among its own keys the chunk's mask is causal. Queries
of chunk 2::

             keys 0   keys 1   keys 2
    q 2        #        #        m          #: all pairs    m: those that the causal mask allows

Earlier chunks' keys are taken one chunk at a time, as a ring takes the keys of one rank at a time, and the results are
merged by their log-sum-exp. So no more than the keys and values of two chunks are on the device when they wait in host
memory, and backward makes the gradients of one chunk's keys at a time. Chunks that the mask hides are not fetched.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from megatron_sp.activations.key_values import LayerPast, Output, Past
from megatron_sp.layout.masks.attention_mask import CAUSAL, AttentionMask, Range
from megatron_sp.model.attention.patterns import PatternBlocks
from megatron_sp.model.attention.unfused import AttentionDropout
from megatron_sp.parallel.ring import BlockKernel, PieceKernels, Triple, merge
from megatron_sp.parallel.ulysses import Core


class ChunkAttention:
    """Attention of a chunk, with the call signature of an attention core.

    Args:
        core: attends where there are no chunks.
        kernel: attends to one chunk of keys; takes the rank's heads as they are.
        with_dropout: a core that drops probabilities, and is given all keys at once.
        first_head: number, within the model, of the first query head; tells this group of heads from others.
        for_patterns: for patterns of blocks, which select the key/value head of a query head themselves: the kernel
            without the wrapper that does so, and for each query head the index of its key/value head, () where query
            heads form equal groups. Default: ``kernel``, with equal groups.
    """

    def __init__(self, core: Core, kernel: BlockKernel, with_dropout: Core, first_head: int,
                 for_patterns: tuple[BlockKernel, tuple[int, ...]] | None = None):
        self.core, self.kernel, self.with_dropout, self.first_head = core, kernel, with_dropout, first_head
        self.for_patterns = for_patterns or (kernel, ())

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: AttentionMask = CAUSAL,
                 dropout: AttentionDropout | None = None, past: LayerPast | None = None) -> torch.Tensor:
        """Attend: q [b, C, n, d], k, v [b, C, g, d] -> [b, C, n, d]"""
        mask = mask.of_heads(self.first_head)
        if past is None:
            return self.core(q, k, v, mask=mask, dropout=dropout)
        seen = past.of_heads(self.first_head)
        seen.keep(k, v)
        if not seen.attends:
            return q  # of the right shape; nobody reads it
        if dropout is None:
            return _ChunkAttention.apply(q, k, v, seen, self._blocks(mask, seen.queries(q.shape[1]), q))
        first = first_visible(mask, seen)
        k, v = _Extend.apply(k, v, seen, first)  # [b, C, g, d] -> [b, past + C, g, d]
        return self.with_dropout(q, k, v, mask=mask.after(seen.keys(first)[0]),
                                 dropout=replace(dropout, earlier=seen.keys(first)[0]))


    def _blocks(self, mask: AttentionMask, queries: Range, q: torch.Tensor) -> Blocks | PatternBlocks:
        """Return what attends with these queries to one block of keys after another."""
        if mask.pattern is None:
            return Blocks(self.kernel, mask, queries, len(q))
        kernel, kv_indices = self.for_patterns
        return PatternBlocks(kernel, mask, queries, len(q), q.shape[2], kv_indices)


class Part(NamedTuple):
    """A part of the attention of a chunk to a block of keys: which sequences, queries and keys, counted from 0."""

    rows: slice
    queries: slice
    keys: slice
    causal: bool
    mirrored: bool = False


class Blocks:
    """Attention of the queries of a chunk to one block of keys after another.

    Args:
        queries: positions of the queries in the sequence.
        batch: number of sequences.
    """

    def __init__(self, kernel: BlockKernel, mask: AttentionMask, queries: Range, batch: int):
        self.kernels, self.mask, self.queries = PieceKernels(kernel), mask, queries
        # Sequences with the same mask are computed together.
        self.rows = [(row, slice(row, row + 1)) for row in range(batch)] if mask.documents else [(0, slice(0, batch))]

    def parts(self, keys: Range) -> list[Part]:
        """Return the parts of the attention to a block of keys, given their positions; none if the mask hides it."""
        found = []
        for row, rows in self.rows:
            for piece in self.mask.pieces(row, self.queries, keys):
                seen, asked = (slice(own[0] - whole[0], own[1] - whole[0])
                               for own, whole in ((piece.keys, keys), (piece.queries, self.queries)))
                found.append(Part(rows, asked, seen, piece.causal, piece.mirrored))
        return found

    def visible(self, past: Past) -> dict[int, list[Part]]:
        """Return the parts of each earlier chunk of which the mask allows some keys, by its number."""
        first = min(self.mask.first_key(row, self.queries[0]) for row, _ in self.rows)
        seen = [number for number in range(past.number) if past.keys(number)[1] > first]
        found = {number: self.parts(past.keys(number)) for number in seen}
        return {number: parts for number, parts in found.items() if parts}

    def add_output(self, parts: list[Part], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
                   lse: torch.Tensor) -> None:
        """Merge the attention to a block of keys into an output and a log-sum-exp."""
        for rows, asked, seen, causal, mirrored in parts:
            o_part, lse_part = self.kernels.of(mirrored).forward(q[rows, asked], k[rows, seen], v[rows, seen],
                                                                 causal or mirrored)
            merge(o[rows, asked], lse[rows, :, asked], o_part, lse_part)

    def gradients(self, parts: list[Part], grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                  o: torch.Tensor, lse: torch.Tensor, dq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add to dq what comes from a block of keys, and return the gradients dk and dv of the block."""
        if len(parts) == 1 and k[parts[0].rows, parts[0].keys].shape == k.shape:
            dk, dv = self._gradients(parts[0], grad, q, k, v, o, lse, dq)
            return dk, dv
        dk, dv = (torch.zeros(x.shape, dtype=dq.dtype, device=x.device) for x in (k, v))
        for part in parts:
            dk_part, dv_part = self._gradients(part, grad, q, k, v, o, lse, dq)
            dk[part.rows, part.keys].add_(dk_part)
            dv[part.rows, part.keys].add_(dv_part)
        return dk, dv

    def _gradients(self, part: Part, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                   o: torch.Tensor, lse: torch.Tensor, dq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, asked, seen, causal, mirrored = part
        result: Triple = self.kernels.of(mirrored).backward(
            grad[rows, asked], q[rows, asked], k[rows, seen], v[rows, seen], o[rows, asked], lse[rows, :, asked],
            causal or mirrored)
        dq[rows, asked].add_(result[0])
        return result[1], result[2]


def first_visible(mask: AttentionMask, past: Past) -> int:
    """Return the number of the first chunk of which the window shows some keys to the current chunk."""
    return max(0, past.first_token - mask.window + 1) // past.size if mask.window else 0


class _ChunkAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: Past,
                blocks: Blocks | PatternBlocks) -> torch.Tensor:
        kept = past.kept_output()
        o, lse = attend_to_blocks(q, k, v, past, blocks) if kept is None else kept
        if kept is None:
            past.keep_output(o, lse)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.past, ctx.blocks = past, blocks
        return o

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, k, v, o, lse = ctx.saved_tensors
        past: Past = ctx.past
        blocks: Any = ctx.blocks
        visible = blocks.visible(past)
        earlier = past.blocks(visible, with_gradients=True)
        dq = torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        dk, dv = blocks.gradients(blocks.parts(blocks.queries), grad, q, k, v, o, lse, dq)
        for number, k_block, v_block in earlier:
            past.add_gradient(number, *blocks.gradients(visible[number], grad, q, k_block, v_block, o, lse, dq))
        dk, dv = _with_later(past, dk, dv)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def attend_to_blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: Past,
                     blocks: Any) -> Output:
    """Return attention of a chunk to its own and all earlier keys, and the log-sum-exp of its scores.

    Args:
        q: [b, C, n, d]
        k, v: [b, C, g, d]
        blocks: ``Blocks`` or ``PatternBlocks``.
    Returns:
        o [b, C, n, d] in the type of q, log-sum-exp [b, n, C] in at least fp32
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    visible = blocks.visible(past)
    earlier = past.blocks(visible)
    o = torch.zeros(q.shape, dtype=wide, device=q.device)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=wide, device=q.device)
    blocks.add_output(blocks.parts(blocks.queries), q, k, v, o, lse)
    for number, k_block, v_block in earlier:
        blocks.add_output(visible[number], q, k_block, v_block, o, lse)
    return o.to(q.dtype), lse


def _with_later(past: Past, dk: torch.Tensor, dv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Add to the gradients of a chunk's keys and values what later chunks sent to them."""
    later = past.take_gradient()
    return (dk, dv) if later is None else (dk + later[0], dv + later[1])


class _Extend(torch.autograd.Function):
    """Put the earlier chunks' keys and values before this chunk's, for attention that takes all keys at once."""

    @staticmethod
    def forward(ctx: Any, k: torch.Tensor, v: torch.Tensor, past: Past,
                first: int) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.past, ctx.first = past, first
        earlier = [(k_block, v_block) for _, k_block, v_block in past.blocks(range(first, past.number))]
        keys, values = zip(*earlier, (k, v))
        return torch.cat(keys, dim=1), torch.cat(values, dim=1)

    @staticmethod
    def backward(ctx: Any, dk: torch.Tensor, dv: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        past: Past = ctx.past
        skipped = past.keys(ctx.first)[0]
        for number in range(ctx.first, past.number):
            start, stop = past.keys(number)
            keys = slice(start - skipped, stop - skipped)
            past.add_gradient(number, dk[:, keys], dv[:, keys])
        own = slice(past.first_token - skipped, None)
        own_dk, own_dv = _with_later(past, dk[:, own], dv[:, own])
        return own_dk.to(dk.dtype), own_dv.to(dv.dtype), None, None
