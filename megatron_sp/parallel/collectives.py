"""Differentiable layout changes: each forward stands beside its backward.

Named after what happens to the tensor. ``w`` is the number of ranks in the group. The
Megatron pairs are from Shoeybi et al. (arXiv 1909.08053) section 3 and Korthikanti et al.
(arXiv 2205.05198) section 4.2; the all-to-all is DeepSpeed-Ulysses (arXiv 2309.14509) section 3.1.

Functional collectives are used throughout: they return new tensors, are safe under
recomputation and can be compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

Group = dist.ProcessGroup
# torch 2.13 renamed these two.
_all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_reduce_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


def all_reduce_sum(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over the group; not differentiable."""
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", group))


def all_reduce_max(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Largest over the group; not differentiable."""
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), "max", group))


def _gather_dim(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    world = dist.get_world_size(group)
    stacked = functional.wait_tensor(_all_gather(x.contiguous().unsqueeze(0), 0, group))
    return stacked.movedim(0, dim).reshape(*x.shape[:dim], world * x.shape[dim], *x.shape[dim + 1:])


def _reduce_scatter_dim(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    world = dist.get_world_size(group)
    pieces = x.unflatten(dim, (world, x.shape[dim] // world)).movedim(dim, 0)
    # Not a view at the end: FSDP warns of views that leave a module.
    return functional.wait_tensor(_reduce_scatter(pieces.flatten(0, 1).contiguous(), "sum", 0, group))


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
    def forward(ctx: Any, x: torch.Tensor, send: list[int], receive: list[int], group: Group) -> torch.Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return functional.wait_tensor(functional.all_to_all_single(x.contiguous(), receive, send, group))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        back = functional.all_to_all_single(grad.contiguous(), ctx.send, ctx.receive, ctx.group)
        return functional.wait_tensor(back), None, None, None


class _Pending:
    """An all-to-all under way: what it sends must live until it has arrived."""

    def __init__(self, send: Sequence[int], receive: Sequence[int], group: Group):
        self.send, self.receive, self.group = list(send), list(receive), group
        self.under_way: tuple[torch.Tensor, torch.Tensor] | None = None

    def start(self, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        """A buffer that is filled by the time ``wait`` returns."""
        x = x.contiguous()
        # the operator that selective recomputation knows; its Python form would wait on first use, too early
        buffer = torch.ops._c10d_functional.all_to_all_single(x, receive, send, self.group.group_name)
        self.under_way = x, buffer
        return buffer

    def wait(self) -> torch.Tensor:
        """The filled buffer. On a GPU the current stream waits, not the CPU."""
        assert self.under_way is not None
        buffer = functional.wait_tensor(self.under_way[1])
        self.under_way = None
        return buffer


class _StartAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pending: _Pending) -> torch.Tensor:
        ctx.pending = pending
        return pending.start(x, pending.send, pending.receive)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.pending.wait(), None  # started by _FinishAllToAll.backward


class _FinishAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: torch.Tensor, pending: _Pending) -> torch.Tensor:
        ctx.pending = pending
        return pending.wait().view_as(buffer)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        pending = ctx.pending
        pending.start(grad, pending.receive, pending.send)
        return grad, None  # only its shape counts; the next node has what arrives


def start_all_to_all(x: torch.Tensor, send: Sequence[int], receive: Sequence[int],
                     group: Group) -> Callable[[], torch.Tensor]:
    """``all_to_all`` in two parts, so that something else is computed while it is under way.

    Backward has the same two parts in the opposite order, and what was computed between them in forward
    is between them in backward.

    Returns:
        a function that waits and returns the result, to be called once
    """
    pending = _Pending(send, receive, group)
    buffer = _StartAllToAll.apply(x, pending)
    return lambda: _FinishAllToAll.apply(buffer, pending)


def copy_to_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Enter a region where each rank computes a part from the same x; backward sums the gradients."""
    return _CopyToGroup.apply(x, group)


def reduce_from_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum the ranks' partial results; backward hands every rank the same gradient."""
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


def all_to_all(x: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> torch.Tensor:
    """Send ``send[p]`` rows of x to rank p, receive ``receive[p]`` rows from it; backward reverses.

    Args:
        x: [sum(send), ...]
    Returns:
        [sum(receive), ...], ordered by source rank
    """
    return _AllToAll.apply(x, list(send), list(receive), group)
