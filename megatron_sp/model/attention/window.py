"""Attention within a sliding window, made of calls of a block kernel on equal blocks of tokens.

``AttentionMask.pieces`` cuts the band of a window into squares on the diagonal and mirrored squares before them. Pieces
of one size are computed together, as a batch, so a window of W tokens on a sequence of s takes about 2 s/W small
squares, computed in few calls. Memory grows with s and time with s * W::

    query blocks of W     0   1   2   3
    keys, block 0         c   m                 c: causal    m: mirrored (keys that the window hides are left out)
                1             c   m
                2                 c   m         one call for all c, one for all m, merged by their log-sum-exp
                3                     c

Letters: b batch, s tokens, n query heads, g key/value heads, d head width, p pieces of one size, t, t' their queries
and keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from megatron_sp.layout.masks.attention_mask import AttentionMask
from megatron_sp.model.attention.documents import send
from megatron_sp.parallel.ring import BlockKernel, Once, PieceKernels, Triple, every_time, merge

#: Queries that one call of a kernel is given at most, unless a single piece has more. It bounds what is copied.
QUERIES_AT_ONCE = 1 << 15


class Group(NamedTuple):
    """Pieces of one size, which are computed together.

    Attributes:
        queries: int64 [p, t], places of the queries in the row of all sequences, [b*s].
        keys: int64 [p, t'].
        causal, mirrored: which pairs the piece leaves out; see ``attention_mask.Piece``.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    causal: bool
    mirrored: bool


class Places(NamedTuple):
    """Where the pieces of one size begin, in the row of all sequences.

    Attributes:
        firsts: int64 [pieces, 2], places of the first query and the first key of each piece.
        queries, keys: tokens of each piece.
    """

    firsts: torch.Tensor
    queries: int
    keys: int
    causal: bool
    mirrored: bool


def places_of(mask: AttentionMask, batch: int, tokens: int, device: torch.device) -> list[Places]:
    """Return the places of all pieces of whole sequences, by the size of the pieces."""
    starts: dict[tuple[int, int, bool, bool], list[tuple[int, int]]] = {}
    for row in range(batch):
        for piece in mask.pieces(row, (0, tokens), (0, tokens)):
            (first, last), (low, high) = piece.queries, piece.keys
            places_of_size = starts.setdefault((last - first, high - low, piece.causal, piece.mirrored), [])
            places_of_size.append((row * tokens + first, row * tokens + low))
    return [Places(send(torch.tensor(found), device), *kind) for kind, found in starts.items()]


def groups_of(places: Sequence[Places]) -> Iterator[Group]:
    """Yield all pieces. No query and no key is twice in one group."""
    for firsts, t, seen, causal, mirrored in places:
        for part in firsts.split(max(1, QUERIES_AT_ONCE // t)):
            yield Group(part[:, :1] + torch.arange(t, device=part.device),
                        part[:, 1:] + torch.arange(seen, device=part.device), causal, mirrored)


class WindowAttention:
    """Attention within a window to whole sequences: (q [b, s, n, d], k, v [b, s, g, d], mask) -> o [b, s, n, d].

    Args:
        kernel: attends to one block of keys.
        once: runs attention, or takes its result where recomputation kept it; see ``ring.Once``.
    """

    def __init__(self, kernel: BlockKernel, once: Once = every_time):
        self.description = f"{kernel.description} (blocks of the window)"
        self.kernels, self.once = PieceKernels(kernel), once

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
        """Attend."""
        batch, tokens = q.shape[:2]
        places = mask.remember(("places", batch, tokens, q.device), lambda: places_of(mask, batch, tokens, q.device))
        return _WindowAttention.apply(q, k, v, self.kernels, places, self.once)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernels: PieceKernels,
            places: Sequence[Places]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend: -> o [b, s, n, d] in the type of q, log-sum-exp [b*s, n] in at least fp32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    row_q, row_k, row_v = (x.flatten(0, 1) for x in (q, k, v))  # [b, s, n, d] -> [b*s, n, d]
    o = torch.zeros(row_q.shape, dtype=wide, device=q.device)
    lse = torch.full(row_q.shape[:2], -torch.inf, dtype=wide, device=q.device)  # [b*s, n]
    for queries, keys, causal, mirrored in groups_of(places):
        o_part, lse_part = kernels.of(mirrored).forward(row_q[queries], row_k[keys], row_v[keys],
                                                        causal or mirrored)  # [p, t, n, d], [p, n, t]
        merged, merged_lse = o[queries], lse[queries]
        merge(merged, merged_lse.transpose(1, 2), o_part, lse_part)
        o[queries], lse[queries] = merged, merged_lse
    return o.to(q.dtype).view(q.shape), lse


class _WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernels: PieceKernels,
                places: Sequence[Places], once: Once) -> torch.Tensor:
        o, lse = once(lambda: _attend(q, k, v, kernels, places))
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.kernels, ctx.places = kernels, places
        return o

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, k, v, o, lse = ctx.saved_tensors
        kernels: PieceKernels = ctx.kernels
        row_grad, row_q, row_k, row_v, row_o = (x.flatten(0, 1) for x in (grad, q, k, v, o))
        dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (row_q, row_k, row_v))
        for queries, keys, causal, mirrored in groups_of(ctx.places):
            parts: Triple = kernels.of(mirrored).backward(
                row_grad[queries], row_q[queries], row_k[keys], row_v[keys], row_o[queries],
                lse[queries].transpose(1, 2).contiguous(), causal or mirrored)
            for total, places, part in zip((dq, dk, dv), (queries, keys, keys), parts):
                total[places] += part
        dq, dk, dv = (total.view(x.shape).to(x.dtype) for total, x in zip((dq, dk, dv), (q, k, v)))
        return dq, dk, dv, None, None, None
