"""Ring attention: each rank keeps its queries and sends blocks of keys and values around a ring of ranks.

Source: Liu et al. (arXiv 2310.01889). In each step a rank attends to the block of keys and values that it holds, and
meanwhile sends this block to the next rank. It merges the results of all steps by their log-sum-exp. A ring of three::

    step       0               1               2
    rank 0     attend to kv 0  attend to kv 2  attend to kv 1
    rank 1     attend to kv 1  attend to kv 0  attend to kv 2      network in steps 0 and 1: rank r sends
    rank 2     attend to kv 2  attend to kv 1  attend to kv 0      the block that it attends to to rank r+1

Under a causal mask a rank with early tokens would have less to compute than a rank with late ones. With the zigzag
ownership of ``layout.tokens.SequenceLayout`` each of r ranks owns one early and one late of 2r chunks of the sequence,
and all ranks compute equally many query-key pairs in each step. A ring of two, chunks 0 to 3::

                   step 0: own keys             step 1: the other rank's keys
                   keys 0   keys 3              keys 1   keys 2
    rank 0  q 0       m        .                   .        .
            q 3       #        m                   #        #
                   keys 1   keys 2              keys 0   keys 3
    rank 1  q 1       m        .                   #        .
            q 2       #        m                   #        .

    #: all pairs of this query and key chunk    m: those that the causal mask allows    .: none

Only step 0 needs a mask. In later steps a rank attends with all its queries to the early half of the keys that an
earlier rank owns, or with the late half of its queries to all keys that a later rank owns.

Where tokens attend only to their own document, or within a window, a rank computes each piece by itself
(``AttentionMask.pieces``). The blocks travel as before, but the ranks then have unequal work.

In backward the keys and values travel again, and the gradient of each block (dkv) follows its block, so that every rank
adds its part. The part of a rank's own block never travels. A rank computes half of it while the first keys and values
arrive, and the other half while the last gradient travels home. So all transfers have work beside them. Rank 0 of
three; ``own a`` and ``own b`` are the two halves::

    compute      own a                  kv 2                   kv 1 (uses rank 2's part of dkv 1)      own b
    receive      kv 2 ---------->       kv 1 -->  dkv 1 ----------->                  dkv 0 ---------------->  add

With t tokens per rank, g key/value heads and head width d, the forward sends ``(r-1) * t * 2 * g * d`` elements per
rank. The backward sends as many elements of keys and values, and as many of their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from megatron_sp.layout.masks.attention_mask import CAUSAL, AttentionMask, Range
from megatron_sp.layout.tokens import SequenceLayout
from megatron_sp.parallel.ulysses import BytesSent

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
#: Calls a function that attends and returns its result. Where a layer runs again in backward, it may return the result
#: of the first run instead (``activations.results.KeptResults.once``).
Once = Callable[[Callable[[], Any]], Any]


def every_time(attend: Callable[[], Any]) -> Any:
    """Run attention in every run of its layer; the ``Once`` of layers whose results are not kept."""
    return attend()


class BlockKernel(Protocol):
    """Attention of some queries to one block of the keys; ``Ring`` merges the results of several blocks."""

    description: str

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend: q [b, t, n, d], k, v [b, t', g, d] -> o [b, t, n, d], log-sum-exp [b, n, t] in at least fp32."""

    def backward(self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
                 lse: torch.Tensor, causal: bool) -> Triple:
        """Return the parts of dq, dk and dv that come from this block of keys.

        Args:
            grad: gradient of the merged output, [b, t, n, d]
            o, lse: output [b, t, n, d] and log-sum-exp [b, n, t] of the queries, merged over *all* blocks of keys
        """


class MirroredKernel:
    """A block kernel whose "causal" means that query i sees key i and all later ones.

    It gives another kernel the tokens in reverse order, in which later keys come first.
    """

    def __init__(self, kernel: BlockKernel):
        self.kernel, self.description = kernel, kernel.description

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend with the tokens in reverse order; see ``BlockKernel``."""
        o, lse = self.kernel.forward(q.flip(1), k.flip(1), v.flip(1), causal)
        return o.flip(1), lse.flip(2)

    def backward(self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
                 lse: torch.Tensor, causal: bool) -> Triple:
        """Return the gradients of q, k and v, computed in reverse order; see ``BlockKernel``."""
        dq, dk, dv = self.kernel.backward(grad.flip(1), q.flip(1), k.flip(1), v.flip(1), o.flip(1), lse.flip(2), causal)
        return dq.flip(1), dk.flip(1), dv.flip(1)


class PieceKernels:
    """Computes the pieces of ``AttentionMask.pieces`` with a block kernel."""

    def __init__(self, kernel: BlockKernel):
        self.kernel, self.mirrored = kernel, MirroredKernel(kernel)

    def of(self, mirrored: bool) -> BlockKernel:
        """Return the kernel to call with ``causal=True`` for causal or mirrored pieces."""
        return self.mirrored if mirrored else self.kernel


class Work(NamedTuple):
    """Queries of this rank that attend to keys of a block: all their pairs, or if ``causal`` those up to the diagonal.

    Attributes:
        rows: sequences of the microbatch.
        queries, keys: indices of tokens on the rank that owns them.
        mirrored: query i sees key i and all later ones instead; see ``attention_mask.Piece``.
    """

    rows: slice
    queries: slice
    keys: slice
    causal: bool
    mirrored: bool = False


@dataclass(frozen=True)
class Ring:
    """The ranks of a ring, and the kernel that this rank computes with.

    Args:
        zigzag: whether tokens are owned in zigzag order; otherwise each rank owns one contiguous range.
        sent: counts the bytes of the keys and values that this rank sends in forward passes.
    """

    group: dist.ProcessGroup
    kernel: BlockKernel
    zigzag: bool = True
    sent: BytesSent = field(default_factory=BytesSent)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def start_shift(self, x: torch.Tensor) -> tuple[torch.Tensor, list[dist.Work]]:
        """Start to send x to the next rank of the ring and to receive the same shape from the previous rank.

        Returns:
            the tensor to receive into, and the operations to wait for before it is read or x is overwritten
        """
        received = torch.empty_like(x)
        ranks = dist.get_process_group_ranks(self.group)
        after, before = ranks[(self.rank + 1) % self.size], ranks[(self.rank - 1) % self.size]
        transfers = [dist.P2POp(dist.isend, x, after, self.group), dist.P2POp(dist.irecv, received, before, self.group)]
        return received, dist.batch_isend_irecv(transfers)

    def attended(self, owner: int, tokens: int) -> tuple[slice, slice, bool] | None:
        """Return which of this rank's queries attend to which of the keys that rank ``owner`` owns.

        Args:
            tokens: tokens per rank.
        Returns:
            ``(queries, keys, whether the causal mask applies among them)``, or None where no query attends to any key.
            That happens without zigzag when the owner's tokens come later.
        """
        whole = slice(0, tokens)
        if owner == self.rank:
            return whole, whole, True
        if not self.zigzag:
            return (whole, whole, False) if owner < self.rank else None
        half = tokens // 2
        return (whole, slice(0, half), False) if owner < self.rank else (slice(half, tokens), whole, False)

    def halves_of_own_work(self, shape: torch.Size, mask: AttentionMask) -> tuple[list[Work], list[Work]]:
        """Return what this rank computes with its own keys, in two parts with about equally many query-key pairs.

        A causal square with more than half of all pairs is cut. If it is the only one, its pieces ``a`` are the first
        part and ``b`` is the second::

                      earlier keys   later keys
            queries       a              .
                          b              a
        """
        pieces = self.work(self.rank, shape, mask)
        total = sum(map(_pairs, pieces))
        pieces = [part for piece in pieces for part in (
            _cut_causal(piece) if piece.causal and not piece.mirrored and 2 * _pairs(piece) > total else [piece])]
        pairs, first = 0, 0
        while first < len(pieces) - 1 and (first == 0 or 2 * pairs + _pairs(pieces[first]) <= total):
            pairs += _pairs(pieces[first])
            first += 1
        first = first or len(pieces)  # there is one piece, and it cannot be cut
        return pieces[:first], pieces[first:]

    def work(self, owner: int, shape: torch.Size, mask: AttentionMask) -> list[Work]:
        """Return what this rank computes with the keys of rank ``owner``.

        Args:
            shape: of the queries, [b, t, ...].
        """
        batch, tokens = shape[:2]
        if not mask.needs:
            attended = self.attended(owner, tokens)
            return [] if attended is None else [Work(slice(0, batch), *attended)]
        layout = SequenceLayout(tokens * self.size, ring=self.size, kind="zigzag" if self.zigzag else "contiguous")
        return [Work(slice(row, row + 1), _shifted(piece.queries, query_shift), _shifted(piece.keys, key_shift),
                     piece.causal, piece.mirrored)
                for queries, query_shift in _local_ranges(layout.ring_ranges(self.rank))
                for keys, key_shift in _local_ranges(layout.ring_ranges(owner))
                for row in range(batch) for piece in mask.pieces(row, queries, keys)]


def _local_ranges(ranges: Sequence[Range]) -> list[tuple[Range, int]]:
    """Return each range of a rank with the number that changes a position into the index of the rank's token."""
    found, first = [], 0
    for start, stop in ranges:
        found.append(((start, stop), first - start))
        first += stop - start
    return found


def _shifted(part: Range, shift: int) -> slice:
    return slice(part[0] + shift, part[1] + shift)


def _cut_causal(work: Work) -> list[Work]:
    """Cut a causal square into two smaller causal squares, and the rectangle below the first of them."""
    start, stop = work.queries.start, work.queries.stop
    middle, shift = (start + stop) // 2, work.keys.start - start
    if middle == start:  # one token
        return [work]
    earlier, later = slice(start, middle), slice(middle, stop)
    keys, later_keys = _shifted((start, middle), shift), _shifted((middle, stop), shift)
    return [work._replace(queries=earlier, keys=keys), work._replace(queries=later, keys=later_keys),
            work._replace(queries=later, keys=keys, causal=False)]


def _pairs(work: Work) -> int:
    """Return how many pairs of a query and a key a piece of work has, in one sequence."""
    queries, keys = work.queries.stop - work.queries.start, work.keys.stop - work.keys.start
    return queries * (keys + 1) // 2 if work.causal or work.mirrored else queries * keys


def merge(o: torch.Tensor, lse: torch.Tensor, o_block: torch.Tensor, lse_block: torch.Tensor) -> None:
    """Merge attention outputs of the same queries over two disjoint sets of keys, in place.

    Args:
        o: [b, t, n, d], in at least fp32; becomes the output over both sets.
        lse: log-sum-exp of the scores, [b, n, t]; becomes that over both sets. -inf where no key was seen yet.
        o_block, lse_block: of the other set, in any type.
    """
    share = (lse_block - lse).sigmoid_()  # exp(lse_block) / (exp(lse) + exp(lse_block))
    torch.logaddexp(lse, lse_block, out=lse)
    o.lerp_(o_block.to(o.dtype), share.transpose(1, 2).unsqueeze(-1).to(o.dtype))


def _attend(ring: Ring, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
            mask: AttentionMask) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the keys of all ranks: -> o [b, t, n, d] in the type of q, log-sum-exp [b, n, t] in at least fp32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    kernels = PieceKernels(ring.kernel)
    kv = torch.stack((k, v))  # the block that this rank holds, [2, b, t, g, d]
    o, lse = torch.empty(0), torch.empty(0)
    for step in range(ring.size):
        is_last = step == ring.size - 1
        next_kv, kv_transfers = (kv, []) if is_last else ring.start_shift(kv)
        if not is_last:
            ring.sent.add([kv])
        work = ring.work((ring.rank - step) % ring.size, q.shape, mask)
        if step == 0 and not mask.needs:  # every query sees a key of its own rank, so the merge begins with these
            o_own, lse_own = ring.kernel.forward(q, k, v, True)
            o, lse, work = o_own.to(wide, memory_format=torch.contiguous_format), lse_own.to(wide), []
        elif step == 0:
            o = torch.zeros(q.shape, dtype=wide, device=q.device)
            lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=wide, device=q.device)
        for rows, queries, keys, causal, mirrored in work:
            o_block, lse_block = kernels.of(mirrored).forward(q[rows, queries], kv[0][rows, keys],
                                                              kv[1][rows, keys], causal or mirrored)
            merge(o[rows, queries], lse[rows, :, queries], o_block, lse_block)
        _wait(kv_transfers)
        kv = next_kv
    return o.to(q.dtype), lse


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: Ring, mask: AttentionMask,
                once: Once) -> torch.Tensor:
        o, lse = once(lambda: _attend(ring, q, k, v, mask))
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.ring, ctx.mask = ring, mask
        return o

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, k, v, o, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        gradients = _Gradients(PieceKernels(ring.kernel), grad, q, o, lse)
        own_first, own_last = ring.halves_of_own_work(q.shape, ctx.mask)
        kv = torch.stack((k, v))
        own_dkv = torch.zeros(kv.shape, dtype=gradients.dq.dtype, device=q.device)
        dkv = own_dkv
        dkv_transfers: list[dist.Work] = []
        next_kv, kv_transfers = ring.start_shift(kv) if ring.size > 1 else (kv, [])
        gradients.add(gradients.compute(own_first, k, v), own_dkv)
        for step in range(1, ring.size):
            _wait(kv_transfers)
            kv, is_last = next_kv, step == ring.size - 1
            next_kv, kv_transfers = (kv, []) if is_last else ring.start_shift(kv)
            parts = gradients.compute(ring.work((ring.rank - step) % ring.size, q.shape, ctx.mask), *kv)
            _wait(dkv_transfers)  # dkv holds what the ranks before this one added for this block
            if step == 1:  # this rank is the first that adds to the gradient of its neighbour's block
                dkv = torch.zeros_like(own_dkv)
            gradients.add(parts, dkv)
            dkv, dkv_transfers = ring.start_shift(dkv)  # after the last step: to the rank that owns the block
        gradients.add(gradients.compute(own_last, k, v), own_dkv)
        _wait(dkv_transfers)
        if ring.size > 1:
            own_dkv.add_(dkv)
        dk, dv = own_dkv.to(k.dtype)
        return gradients.dq.to(q.dtype), dk, dv, None, None, None


def _wait(transfers: Sequence[dist.Work]) -> None:
    for transfer in transfers:
        transfer.wait()


#: Which sequences and keys of a block, and the gradients dk and dv that some queries send there.
Parts = list[tuple[slice, slice, torch.Tensor, torch.Tensor]]


class _Gradients:
    """Computes gradients of a rank's queries, and of blocks of keys and values from these queries.

    Attributes:
        dq: gradient of the queries from all blocks so far, in at least fp32.
    """

    def __init__(self, kernels: PieceKernels, grad: torch.Tensor, q: torch.Tensor, o: torch.Tensor, lse: torch.Tensor):
        self.kernels, self.grad, self.q, self.o, self.lse = kernels, grad, q, o, lse
        self.dq = torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)

    def compute(self, work: Sequence[Work], k: torch.Tensor, v: torch.Tensor) -> Parts:
        """Add to dq what comes from a block k, v [b, t, g, d], and return the gradients of its keys and values."""
        parts: Parts = []
        for rows, queries, keys, causal, mirrored in work:
            dq, dk, dv = self.kernels.of(mirrored).backward(
                self.grad[rows, queries], self.q[rows, queries], k[rows, keys], v[rows, keys],
                self.o[rows, queries], self.lse[rows, :, queries], causal or mirrored)
            self.dq[rows, queries].add_(dq)
            parts.append((rows, keys, dk, dv))
        return parts

    def add(self, parts: Parts, dkv: torch.Tensor) -> None:
        """Add the gradients of some keys and values to those of their block, [2, b, t, g, d]."""
        for rows, keys, dk, dv in parts:
            dkv[0][rows, keys].add_(dk)
            dkv[1][rows, keys].add_(dv)


class RingAttention:
    """Attention over a ring of ranks, with the call signature of an attention core.

    Args:
        once: runs attention, or takes its result where recomputation kept it; see ``Once``.
    """

    def __init__(self, ring: Ring, once: Once = every_time):
        self.ring, self.once = ring, once

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: AttentionMask = CAUSAL,
                 dropout: Any = None) -> torch.Tensor:
        """Attend to the keys of all ranks: q [b, s/r, n, d], k, v [b, s/r, g, d] -> [b, s/r, n, d]."""
        assert dropout is None, "the check of the flags refuses attention dropout with a ring"
        return _RingAttention.apply(q, k, v, self.ring, mask, self.once)
