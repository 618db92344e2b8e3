"""Differentiable layout changes: each forward stands beside its backward.

Each is named after what happens to the tensor. ``w`` is the number of ranks in the group. The Megatron pairs are
from Shoeybi et al. (arXiv 1909.08053) section 3 and Korthikanti et al. (arXiv 2205.05198) section 4.2; the
all-to-all is DeepSpeed-Ulysses (arXiv 2309.14509) section 3.1.

All collectives here are functional: they return new tensors. So recomputation may run them again, and
``torch.compile`` can trace them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_sp import torch_internals
from megatron_sp.transport.channel import Channel

Group = dist.ProcessGroup


def all_reduce_sum(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over the group; not differentiable."""
    return torch_internals.all_reduce(x, "sum", group)


def all_reduce_max(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Largest over the group; not differentiable."""
    return torch_internals.all_reduce(x, "max", group)


def _gather_dim(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    world = dist.get_world_size(group)
    stacked = torch_internals.all_gather(x.contiguous().unsqueeze(0), group)
    return stacked.movedim(0, dim).reshape(*x.shape[:dim], world * x.shape[dim], *x.shape[dim + 1:])


def _reduce_scatter_dim(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    world = dist.get_world_size(group)
    pieces = x.unflatten(dim, (world, x.shape[dim] // world)).movedim(dim, 0)
    # The result must not be a view: FSDP warns of views that leave a module.
    return torch_internals.reduce_scatter(pieces.flatten(0, 1), group)


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return all_reduce_sum(grad, ctx.group), None


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        return all_reduce_sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _gather_dim(x, 1, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _reduce_scatter_dim(grad, 1, ctx.group), None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _reduce_scatter_dim(x, 1, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _gather_dim(grad, 1, ctx.group), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, send: list[int], receive: list[int], channel: Channel) -> torch.Tensor:
        ctx.send, ctx.receive, ctx.channel = send, receive, channel
        return channel.finish_all_to_all(channel.start_all_to_all(x.contiguous(), send, receive))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        channel: Channel = ctx.channel
        back = channel.start_all_to_all(grad.contiguous(), ctx.receive, ctx.send)
        return channel.finish_all_to_all(back), None, None, None


def all_to_all(x: torch.Tensor, send: Sequence[int], receive: Sequence[int], channel: Channel) -> torch.Tensor:
    """Send ``send[p]`` rows of x to rank p and receive ``receive[p]`` rows from it; backward sends gradients back.

    Args:
        x: [sum(send), ...], ordered by destination
    Returns:
        [sum(receive), ...], ordered by source
    """
    return _AllToAll.apply(x, list(send), list(receive), channel)


class _Transfer:
    """One all-to-all from start to finish, and later the one of its gradients. Shared by the two functions below."""

    def __init__(self, send: Sequence[int], receive: Sequence[int], channel: Channel):
        self.send, self.receive, self.channel = list(send), list(receive), channel
        self._sent_and_received: tuple[torch.Tensor, torch.Tensor] | None = None

    def start(self, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        """Start and return the tensor that ``finish`` fills. What is sent is kept alive until then."""
        x = x.contiguous()
        received = self.channel.start_all_to_all(x, send, receive)
        self._sent_and_received = x, received
        return received

    def finish(self) -> torch.Tensor:
        """Wait and return the filled tensor."""
        assert self._sent_and_received is not None
        received = self.channel.finish_all_to_all(self._sent_and_received[1])
        self._sent_and_received = None
        return received


class _StartAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, transfer: _Transfer) -> torch.Tensor:
        ctx.transfer = transfer
        return transfer.start(x, transfer.send, transfer.receive)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.transfer.finish(), None  # _FinishAllToAll.backward started it


class _FinishAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received: torch.Tensor, transfer: _Transfer) -> torch.Tensor:
        ctx.transfer = transfer
        return transfer.finish().view_as(received)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        transfer: _Transfer = ctx.transfer
        transfer.start(grad, transfer.receive, transfer.send)
        # Autograd needs a tensor of the input's shape here. Its values are never read: _StartAllToAll.backward
        # returns the real gradient, which is still on its way.
        return grad, None


def start_all_to_all(x: torch.Tensor, send: Sequence[int], receive: Sequence[int],
                     channel: Channel) -> Callable[[], torch.Tensor]:
    """Start an ``all_to_all`` and return the function that finishes it, so that work can be done in between.

    Backward runs the same two halves in the opposite order. So work that lies between them in forward has its
    backward between them too, and hides both exchanges. Every rank of the group does the same::

        forward    this rank  start with x   | other work               | finish, giving y
                   network                   [======== x ========]
        backward   this rank  start with dy  | backward of other work   | finish, giving dx
                   network                   [======== dy =======]

    Returns:
        a function that waits and returns the result; call it once
    """
    transfer = _Transfer(send, receive, channel)
    received = _StartAllToAll.apply(x, transfer)
    return lambda: _FinishAllToAll.apply(received, transfer)


class _CopyHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.num_heads = x.shape[2]
        return x.index_select(2, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        index, = ctx.saved_tensors
        return sum_copied_heads(grad, index, ctx.num_heads).to(grad.dtype), None


def copy_heads(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Select heads, some of them more than once; backward sums the gradients of a head's copies in fp32.

    Args:
        x: [b, t, g, d]
        index: int64 [n], for each result the head it copies
    Returns:
        [b, t, n, d]
    """
    return _CopyHeads.apply(x, index)


def sum_copied_heads(grad: torch.Tensor, index: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Sum the gradients of copied heads: [b, t, n, d] -> [b, t, g, d], at least fp32."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    total = torch.zeros((*grad.shape[:2], num_heads, grad.shape[3]), dtype=wide, device=grad.device)
    return total.index_add_(2, index, grad.to(wide))


def copy_to_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return x unchanged where each rank goes on to compute a part from it; backward sums the ranks' gradients."""
    return _CopyToGroup.apply(x, group)


def reduce_from_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum the ranks' partial results; backward passes the gradient on unchanged."""
    return _ReduceFromGroup.apply(x, group)


def gather_sequence(x: torch.Tensor, group: Group) -> torch.Tensor:
    """All tokens from the group's shards; backward reduce-scatters.

    Args:
        x: [b, t, ...]
    Returns:
        [b, t*w, ...]
    """
    return _GatherSequence.apply(x, group)


def reduce_scatter_sequence(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum the ranks' partial results, keep this rank's tokens; backward gathers.

    Args:
        x: [b, t, ...]
    Returns:
        [b, t/w, ...]
    """
    return _ReduceScatterSequence.apply(x, group)
