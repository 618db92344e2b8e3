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

With t tokens per rank, g key/value heads and head width d, the forward sends ``(r-1) * t * 2 * g * d`` elements per
rank. The backward sends the keys and values as often again, and their gradients r times: the gradient of a block
follows the block around the ring, and a last step brings it to the rank that owns the block.
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
    """Call a function that attends, in every run of its layer."""
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
        """See ``BlockKernel``."""
        o, lse = self.kernel.forward(q.flip(1), k.flip(1), v.flip(1), causal)
        return o.flip(1), lse.flip(2)

    def backward(self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
                 lse: torch.Tensor, causal: bool) -> Triple:
        """See ``BlockKernel``."""
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
        mirrored: see ``attention_mask.Piece``.
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


def merge(o: torch.Tensor, lse: torch.Tensor, o_block: torch.Tensor,
          lse_block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention outputs of the same queries over two disjoint sets of keys.

    Args:
        o, o_block: [b, t, n, d]
        lse, lse_block: log-sum-exp of the scores, [b, n, t]
    Returns:
        output and log-sum-exp over both sets
    """
    total = torch.logaddexp(lse, lse_block)
    old, new = ((part - total).exp().transpose(1, 2).unsqueeze(-1) for part in (lse, lse_block))
    return o * old + o_block * new, total


def _attend(ring: Ring, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
            mask: AttentionMask) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the keys of all ranks: -> o [b, t, n, d] in the type of q, log-sum-exp [b, n, t] in at least fp32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    kernels = PieceKernels(ring.kernel)
    kv = torch.stack((k, v))  # the block that this rank holds, [2, b, t, g, d]
    o = torch.zeros(q.shape, dtype=wide, device=q.device)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=wide, device=q.device)
    for step in range(ring.size):
        is_last = step == ring.size - 1
        next_kv, kv_transfers = (kv, []) if is_last else ring.start_shift(kv)
        if not is_last:
            ring.sent.add([kv])
        for rows, queries, keys, causal, mirrored in ring.work((ring.rank - step) % ring.size, q.shape, mask):
            o_block, lse_block = kernels.of(mirrored).forward(q[rows, queries], kv[0][rows, keys],
                                                              kv[1][rows, keys], causal or mirrored)
            o[rows, queries], lse[rows, :, queries] = merge(o[rows, queries], lse[rows, :, queries],
                                                            o_block.to(wide), lse_block.to(wide))
        for transfer in kv_transfers:
            transfer.wait()
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
        kernels = PieceKernels(ring.kernel)
        wide = torch.promote_types(q.dtype, torch.float32)
        kv = torch.stack((k, v))
        dq = torch.zeros(q.shape, dtype=wide, device=q.device)
        dkv = torch.zeros(kv.shape, dtype=wide, device=q.device)  # gradient of the block that this rank holds
        dkv_transfers: list[dist.Work] = []
        for step in range(ring.size):
            is_last = step == ring.size - 1
            next_kv, kv_transfers = (kv, []) if is_last else ring.start_shift(kv)
            to_add: list[tuple[slice, slice, torch.Tensor, torch.Tensor]] = []
            for rows, queries, keys, causal, mirrored in ring.work((ring.rank - step) % ring.size, q.shape, ctx.mask):
                dq_block, dk_block, dv_block = kernels.of(mirrored).backward(
                    grad[rows, queries], q[rows, queries], kv[0][rows, keys], kv[1][rows, keys], o[rows, queries],
                    lse[rows, :, queries], causal or mirrored)
                dq[rows, queries] += dq_block
                to_add.append((rows, keys, dk_block, dv_block))
            for transfer in dkv_transfers:  # dkv holds what the ranks before this one added for this block
                transfer.wait()
            for rows, keys, dk_block, dv_block in to_add:
                dkv[0][rows, keys] += dk_block
                dkv[1][rows, keys] += dv_block
            dkv, dkv_transfers = ring.start_shift(dkv)  # after the last step: to the rank that owns the block
            for transfer in kv_transfers:
                transfer.wait()
            kv = next_kv
        for transfer in dkv_transfers:
            transfer.wait()
        dk, dv = dkv.to(k.dtype)
        return dq.to(q.dtype), dk, dv, None, None, None


class RingAttention:
    """Attention over a ring of ranks, with the call signature of an attention core.

    Args:
        once: see ``Once``.
    """

    def __init__(self, ring: Ring, once: Once = every_time):
        self.ring, self.once = ring, once

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: AttentionMask = CAUSAL,
                 dropout: Any = None) -> torch.Tensor:
        """Attend to the keys of all ranks: q [b, s/r, n, d], k, v [b, s/r, g, d] -> [b, s/r, n, d]."""
        assert dropout is None, "the check of the flags refuses attention dropout with a ring"
        return _RingAttention.apply(q, k, v, self.ring, mask, self.once)
