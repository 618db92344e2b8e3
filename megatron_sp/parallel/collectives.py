"""Differentiable collectives: each forward is next to its backward.

Each is named after what it does to the tensor. ``w`` is the number of ranks in the group. Sources: Shoeybi et al.
(arXiv 1909.08053) section 3 and Korthikanti et al. (arXiv 2205.05198) section 4.2 for the pairs of tensor parallelism,
DeepSpeed-Ulysses (arXiv 2309.14509) section 3.1 for the all-to-all.

All collectives here but ``broadcast`` are functional: they return new tensors. So recomputation can run them again,
and ``torch.compile`` can trace them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_sp import torch_internals
from megatron_sp.transport.channel import Channel, Finish, SplitChange

Group = dist.ProcessGroup
T = TypeVar("T")


def all_reduce_sum(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum over the group; not differentiable."""
    return torch_internals.all_reduce(x, "sum", group)


def gather_objects(value: T) -> list[T]:
    """Return the objects of all ranks of the world, in rank order; without a process group only this one."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def all_reduce_max(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the elementwise maximum over the group; not differentiable."""
    return torch_internals.all_reduce(x, "max", group)


def broadcast(x: torch.Tensor, source: int, group: Group) -> torch.Tensor:
    """Return x of the rank at place ``source`` of the group, on every rank; not differentiable.

    Args:
        x: on the source its values; on the others a tensor of the same shape and type, which is overwritten.
    """
    dist.broadcast(x, group=group, group_src=source)
    return x


def _gather_dim(x: torch.Tensor, dim: int, group: Group, pieces: bool = False) -> torch.Tensor:
    world = dist.get_world_size(group)
    if pieces:
        return torch.cat(torch_internals.all_gather(x, group).chunk(world), dim)
    stacked = torch_internals.all_gather(x.contiguous().unsqueeze(0), group)
    return stacked.movedim(0, dim).reshape(*x.shape[:dim], world * x.shape[dim], *x.shape[dim + 1:])


def _reduce_scatter_dim(x: torch.Tensor, dim: int, group: Group, pieces: bool = False) -> torch.Tensor:
    world = dist.get_world_size(group)
    if pieces:
        return torch_internals.reduce_scatter(torch.cat(x.chunk(world, dim)), group)
    ranks = x.unflatten(dim, (world, x.shape[dim] // world)).movedim(dim, 0)
    # The result must not be a view: FSDP warns of views that leave a module.
    return torch_internals.reduce_scatter(ranks.flatten(0, 1), group)


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
    def forward(ctx: Any, x: torch.Tensor, group: Group, pieces: bool) -> torch.Tensor:
        ctx.group, ctx.pieces = group, pieces
        return _gather_dim(x, 1, group, pieces)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return _reduce_scatter_dim(grad, 1, ctx.group, ctx.pieces), None, None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, pieces: bool) -> torch.Tensor:
        ctx.group, ctx.pieces = group, pieces
        return _reduce_scatter_dim(x, 1, group, pieces)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return _gather_dim(grad, 1, ctx.group, ctx.pieces), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, channel: Channel, change: SplitChange, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.channel, ctx.change = channel, change
        return tuple(channel.start_all_to_all(tensors, change)())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.channel.start_all_to_all(grads, ctx.change.backwards())()


def all_to_all(tensors: Sequence[torch.Tensor], change: SplitChange, channel: Channel) -> tuple[torch.Tensor, ...]:
    """Change along which dimension tensors are split over the ranks; backward changes the gradients back.

    Args:
        tensors: [b, t, n, d] each
    """
    return _AllToAll.apply(channel, change, *tensors)


class _Transfer:
    """An all-to-all that was started and is not finished: in forward that of values, in backward that of gradients."""

    def __init__(self, channel: Channel, change: SplitChange):
        self.channel, self.change = channel, change
        self.finish: Finish | None = None

    def take_results(self) -> tuple[torch.Tensor, ...]:
        """Wait for the all-to-all and return its results."""
        assert self.finish is not None
        results = tuple(self.finish())
        self.finish = None
        return results


class _StartAllToAll(torch.autograd.Function):
    """Starts an all-to-all; returns a tensor without elements that makes ``_FinishAllToAll`` depend on the inputs."""

    @staticmethod
    def forward(ctx: Any, transfer: _Transfer, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.transfer = transfer
        transfer.finish = transfer.channel.start_all_to_all(tensors, transfer.change)
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return None, *ctx.transfer.take_results()  # _FinishAllToAll.backward has started this all-to-all


class _FinishAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transfer: _Transfer, link: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.transfer = transfer
        return transfer.take_results()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, torch.Tensor]:
        transfer: _Transfer = ctx.transfer
        transfer.finish = transfer.channel.start_all_to_all(grads, transfer.change.backwards())
        # Autograd needs a gradient for that tensor too. _StartAllToAll.backward returns the gradients of the inputs.
        return None, grads[0].new_empty(0)


def start_all_to_all(tensors: Sequence[torch.Tensor], change: SplitChange,
                     channel: Channel) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Start an ``all_to_all`` and return the function that finishes it, so that work can be done in between.

    Backward runs the same two halves in the opposite order. So work that lies between them in forward has its
    backward between them too, and hides both exchanges. Every rank of the group does the same::

        forward    this rank  start with x   | other work               | finish, giving y
                   network                   [======== x ========]
        backward   this rank  start with dy  | backward of other work   | finish, giving dx
                   network                   [======== dy =======]

    Returns:
        a function that waits and returns the results; call it once
    """
    transfer = _Transfer(channel, change)
    link = _StartAllToAll.apply(transfer, *tensors)
    return lambda: _FinishAllToAll.apply(transfer, link)


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
    """Return x unchanged; backward sums the gradients of the ranks, each of which computes a part from x."""
    return _CopyToGroup.apply(x, group)


def reduce_from_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum the ranks' partial results; backward passes the gradient on unchanged."""
    return _ReduceFromGroup.apply(x, group)


def gather_sequence(x: torch.Tensor, group: Group, *, pieces: bool = False) -> torch.Tensor:
    """All-gather the tokens of the group's shards; backward reduce-scatters their gradients.

    Args:
        x: [b, t, ...]
        pieces: write it as a concatenation of the ranks' pieces. torch's compiler recognises only this form where it
            overlaps collectives with matrix products (``--tp-comm-overlap``). A single sequence is copied in this form
            and not in the other.
    Returns:
        [b, t*w, ...]
    """
    return _GatherSequence.apply(x, group, pieces)


def reduce_scatter_sequence(x: torch.Tensor, group: Group, *, pieces: bool = False) -> torch.Tensor:
    """Sum the ranks' partial results and return this rank's tokens of the sum; backward all-gathers the gradients.

    Args:
        x: [b, t, ...]
        pieces: see ``gather_sequence``.
    Returns:
        [b, t/w, ...]
    """
    return _ReduceScatterSequence.apply(x, group, pieces)
