"""One interface for communication in a group of ranks, through torch's collectives or through shared memory.

The modules in ``parallel/`` get a channel from the mesh (``mesh.channel("ulysses")``), which alone decides which of the
two it is. The methods of a channel work on values. ``parallel.collectives`` makes them differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_sp import torch_internals
from megatron_sp.transport.mailboxes import Mailboxes

#: Dimension of the heads in [b, t, n, d]. The pieces of several tensors for one rank are concatenated along it.
HEADS = 2

Tensors = Sequence[torch.Tensor]
#: A function that waits for an all-to-all that was started, and returns its results. Call it once.
Finish = Callable[[], list[torch.Tensor]]


@dataclass(frozen=True)
class SplitChange:
    """An all-to-all that changes along which dimension tensors [b, t, n, d] are split over the ranks.

    Each rank cuts tensor i along ``cut_dim`` into pieces of the sizes ``cut_sizes[i]`` and sends piece p to rank p. It
    joins the pieces that it receives along ``join_dim``, where that from rank p has the size ``join_sizes[i][p]``.
    """

    cut_dim: int
    cut_sizes: tuple[tuple[int, ...], ...]
    join_dim: int
    join_sizes: tuple[tuple[int, ...], ...]

    def backwards(self) -> SplitChange:
        """Return the change that undoes this one, which gradients need."""
        return SplitChange(self.join_dim, self.join_sizes, self.cut_dim, self.cut_sizes)

    def pieces(self, tensors: Tensors) -> list[list[torch.Tensor]]:
        """Return for each rank the pieces to send there, one of each tensor, as views."""
        cut = [x.split(sizes, self.cut_dim) for x, sizes in zip(tensors, self.cut_sizes)]
        return [list(pieces) for pieces in zip(*cut)]

    def check(self, tensors: Tensors, rank: int) -> None:
        """Assert that this rank's tensors have the sizes that the other ranks expect."""
        for x, cut, join in zip(tensors, self.cut_sizes, self.join_sizes):
            found = x.shape[self.cut_dim], x.shape[self.join_dim]
            assert found == (sum(cut), join[rank]), f"sizes {found} where {sum(cut)} and {join[rank]} are due"


class Channel(Protocol):
    """Sends tensors between the ranks of a group; this rank is number ``rank`` of ``size``."""

    size: int
    rank: int
    device: torch.device

    def start_all_to_all(self, tensors: Tensors, change: SplitChange) -> Finish:
        """Start to exchange pieces of tensors and return the function that waits and gives the results."""

    def sum_in_place(self, tensors: Tensors) -> None:
        """Replace contiguous tensors by their sums over the ranks; all ranks get bitwise the same sums."""


class CollectiveChannel:
    """Sends through torch's collectives: NCCL between GPUs, gloo between CPUs.

    Args:
        device: device of the tensors that the collectives can send. ``sum_in_place`` copies other tensors there.
        sum_bucket: bytes that one all-reduce sums at most, except where a single tensor is larger.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, sum_bucket: int = 32 << 20):
        self.group, self.device, self.sum_bucket = group, device, sum_bucket
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def start_all_to_all(self, tensors: Tensors, change: SplitChange) -> Finish:
        """Start the all-to-all of ``Channel`` with the operator whose result selective recomputation keeps.

        A rank sends one block to each rank: the pieces of all tensors, concatenated along the heads. All blocks
        together are sent as the rows of one matrix.
        """
        change.check(tensors, self.rank)
        batch, _, _, width = tensors[0].shape
        sent = [_tokens_and_heads(change.cut_dim, cut, join) for cut, join in zip(
            zip(*change.cut_sizes), [[sizes[self.rank] for sizes in change.join_sizes]] * self.size)]
        received = [_tokens_and_heads(change.cut_dim, cut, join) for join, cut in zip(
            zip(*change.join_sizes), [[sizes[self.rank] for sizes in change.cut_sizes]] * self.size)]
        packed = _pack(tensors, change, self.size)
        send, receive = ([tokens * sum(heads) for tokens, heads in blocks] for blocks in (sent, received))
        buffer = torch_internals.start_all_to_all(packed.view(-1, batch * width), send, receive, self.group)

        def finish(being_sent: torch.Tensor = packed) -> list[torch.Tensor]:  # keeps packed alive
            filled = torch_internals.wait(buffer)
            blocks = [rows.view(batch, tokens, sum(heads), width) for rows, (tokens, heads) in zip(
                filled.split(receive), received)]
            return _unpack(filled, blocks, [heads for _, heads in received], change)

        return finish

    @torch.no_grad()
    def sum_in_place(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sum as ``Channel`` says, many tensors in few all-reduces of bounded size."""
        for bucket in buckets(tensors, self.sum_bucket):
            if len(bucket) == 1 and bucket[0].device == self.device:
                dist.all_reduce(bucket[0], group=self.group)
                continue
            flat = torch.cat([tensor.view(-1) for tensor in bucket]).to(self.device)
            dist.all_reduce(flat, group=self.group)
            parts = flat.to(bucket[0].device).split([tensor.numel() for tensor in bucket])
            torch._foreach_copy_([tensor.view(-1) for tensor in bucket], list(parts))


class SharedMemoryChannel:
    """Sends through memory that CPU ranks of one machine share.

    ``start_all_to_all`` runs the whole exchange; the function that it returns only gives the results. A CPU that
    computes attention has no second engine that could copy in the background.
    """

    def __init__(self, mailboxes: Mailboxes):
        self.mailboxes, self.device = mailboxes, torch.device("cpu")
        self.size, self.rank = mailboxes.size, mailboxes.rank

    def start_all_to_all(self, tensors: Tensors, change: SplitChange) -> Finish:
        """Exchange the pieces now, and return a function that returns the results."""
        change.check(tensors, self.rank)
        results = []
        for x, cut, join in zip(tensors, change.cut_sizes, change.join_sizes):
            shape = list(x.shape)
            shape[change.cut_dim], shape[change.join_dim] = cut[self.rank], sum(join)
            results.append(x.new_empty(shape))
        # One tensor [t, n, d] for each sequence of the batch: a message holds whole rows, and these rows are short.
        send = [[sequence for piece in pieces for sequence in piece] for pieces in change.pieces(tensors)]
        receive = [[sequence for place in places for sequence in place]
                   for places in change.backwards().pieces(results)]
        with torch.no_grad():
            self.mailboxes.exchange(send, receive)
        return lambda: results

    def sum_in_place(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace contiguous tensors by their sums over the ranks, through shared memory."""
        self.mailboxes.sum_in_place(tensors)


def _tokens_and_heads(cut_dim: int, cut: Sequence[int], join: Sequence[int]) -> tuple[int, list[int]]:
    """Return the number of tokens of a block, and for each tensor the number of its heads in the block.

    Args:
        cut, join: for each tensor the size of its piece along the cut and the join dimension.
    """
    heads, tokens = (cut, join) if cut_dim == HEADS else (join, cut)
    return tokens[0], list(heads)


def _pack(tensors: Tensors, change: SplitChange, num_ranks: int) -> torch.Tensor:
    """Return the blocks for all ranks in one contiguous tensor, in rank order."""
    if all(len(set(sizes)) == 1 for sizes in change.cut_sizes):  # blocks of equal sizes need one copy at most
        stacked = [x.unflatten(change.cut_dim, (num_ranks, -1)).movedim(change.cut_dim, 0) for x in tensors]
        return (torch.cat(stacked, dim=1 + HEADS) if len(stacked) > 1 else stacked[0]).contiguous()  # [P, b, t, n, d]
    return torch.cat([torch.cat(pieces, dim=HEADS).flatten() for pieces in change.pieces(tensors)])


def _unpack(filled: torch.Tensor, blocks: Tensors, heads: list[list[int]], change: SplitChange) -> list[torch.Tensor]:
    """Split the received blocks into tensors and join the pieces of each tensor.

    Args:
        filled: all blocks in one contiguous tensor.
        blocks: the block from each rank as a view of it, [b, t, n, d].
        heads: for each block, the number of heads that belong to each tensor.
    """
    if change.join_dim != HEADS:  # joins along the tokens; without a copy where b is 1
        whole = filled.view(len(blocks), *blocks[0].shape).transpose(0, 1).flatten(1, 2)
        return list(whole.split(heads[0], HEADS))
    by_tensor = zip(*(block.split(sizes, HEADS) for block, sizes in zip(blocks, heads)))
    return [torch.cat(parts, dim=HEADS) for parts in by_tensor]


def buckets(tensors: Sequence[torch.Tensor], limit: int) -> Iterator[list[torch.Tensor]]:
    """Split a list of tensors into consecutive buckets of at most ``limit`` bytes, each of one type and device.

    A tensor that is larger than the limit gets a bucket of its own.
    """
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        is_alike = not bucket or (tensor.dtype, tensor.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and (size + tensor.nbytes > limit or not is_alike):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
