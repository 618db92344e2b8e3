"""One interface for sending between the ranks of a group, whichever way the bytes take.

The strategies in ``parallel/`` get a channel from the mesh (``mesh.channel("ulysses")``) and use its three
methods. Whether the bytes go through torch's collectives or through shared memory is decided there alone.
The methods of this file work on values; ``parallel.collectives`` makes them differentiable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_sp import torch_internals
from megatron_sp.transport.mailboxes import Mailboxes


class Channel(Protocol):
    """The ranks of a group as a strategy sees them."""

    size: int
    rank: int
    device: torch.device

    def start_all_to_all(self, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        """Start to send ``send[p]`` rows of x to each rank p.

        Args:
            x: [sum(send), ...], contiguous, ordered by destination; it must live until ``finish_all_to_all``.
            receive: rows that come from each rank.
        Returns:
            [sum(receive), ...], ordered by source; its values are there after ``finish_all_to_all``
        """

    def finish_all_to_all(self, received: torch.Tensor) -> torch.Tensor:
        """Wait for an all-to-all that was started. Returns the filled tensor."""

    def sum_in_place(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace contiguous tensors by their sums over the ranks, which get the same bits everywhere."""


class CollectiveChannel:
    """torch's collectives: NCCL between GPUs, gloo between CPUs.

    Args:
        device: what the collectives work on. Tensors elsewhere are copied there to be summed.
        sum_bucket: bytes of small tensors that one all-reduce sums together.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, sum_bucket: int = 32 << 20):
        self.group, self.device, self.sum_bucket = group, device, sum_bucket
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def start_all_to_all(self, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        """See ``Channel``. This is the operator whose result selective recomputation keeps."""
        return torch_internals.start_all_to_all(x, send, receive, self.group)

    def finish_all_to_all(self, received: torch.Tensor) -> torch.Tensor:
        """See ``Channel``. On a GPU the current stream waits, not the CPU."""
        return torch_internals.wait(received)

    @torch.no_grad()
    def sum_in_place(self, tensors: Sequence[torch.Tensor]) -> None:
        """See ``Channel``. Sums many tensors with few all-reduces of bounded size."""
        for bucket in buckets(tensors, self.sum_bucket):
            if len(bucket) == 1 and bucket[0].device == self.device:
                dist.all_reduce(bucket[0], group=self.group)
                continue
            flat = torch.cat([tensor.view(-1) for tensor in bucket]).to(self.device)
            dist.all_reduce(flat, group=self.group)
            parts = flat.to(bucket[0].device).split([tensor.numel() for tensor in bucket])
            torch._foreach_copy_([tensor.view(-1) for tensor in bucket], list(parts))


class SharedMemoryChannel:
    """Memory that CPU ranks of one machine share; an all-to-all is complete when ``start_all_to_all`` returns.

    A CPU that attends has no second engine that could copy meanwhile, so nothing is gained by returning earlier.
    """

    def __init__(self, mailboxes: Mailboxes):
        self.mailboxes, self.device = mailboxes, torch.device("cpu")
        self.size, self.rank = mailboxes.size, mailboxes.rank

    def start_all_to_all(self, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        """See ``Channel``."""
        result = x.new_empty((sum(receive), *x.shape[1:]))
        with torch.no_grad():
            self.mailboxes.exchange(_elements(x, send), _elements(result, receive))
        return result

    def finish_all_to_all(self, received: torch.Tensor) -> torch.Tensor:
        """See ``Channel``."""
        return received

    def sum_in_place(self, tensors: Sequence[torch.Tensor]) -> None:
        """See ``Channel``."""
        self.mailboxes.sum_in_place(tensors)


def _elements(x: torch.Tensor, rows: list[int]) -> list[list[torch.Tensor]]:
    """For each rank its rows as one flat tensor, which mailboxes may cut anywhere."""
    row = x[0].numel() if len(x) else 0
    return [[part] for part in x.view(-1).split([count * row for count in rows])]


def buckets(tensors: Sequence[torch.Tensor], limit: int) -> Iterator[list[torch.Tensor]]:
    """Split a list of tensors into runs of one type and device of at most ``limit`` bytes.

    A tensor that is larger than the limit is a run by itself.
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
