"""Everything this package uses of torch outside its documented interface, in one place.

Another version of torch may rename or drop these things without notice. ``check_torch`` looks for them when the
first mesh is built, so that a run under such a version stops with one clear message instead of failing later.
Kernels for attention have fallbacks and are looked up where they are used (``model/attention/block_kernels.py``).
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.pipelining import schedules

from megatron_sp.errors import InstallationError

#: Oldest torch that the tests pass with; ``pyproject.toml`` says the same.
OLDEST = "2.11"
#: The operator that an all-to-all is for selective recomputation, which keeps the results of operators by name.
ALL_TO_ALL_OPERATOR = "_c10d_functional.all_to_all_single"
#: torch's names of the pipeline actions that a forward pass consists of.
FORWARD_ACTIONS = ("F", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")


def check_torch() -> None:
    """Check that this torch has what the package needs of its internals.

    Raises:
        InstallationError: naming the version and everything that is missing.
    """
    missing = [name for name, exists in {
        "all_reduce, wait_tensor and all_to_all_single of torch.distributed._functional_collectives": all(
            hasattr(functional, name) for name in ("all_reduce", "wait_tensor", "all_to_all_single")),
        "an all-gather and a reduce-scatter in torch.distributed._functional_collectives": bool(
            _renamed("all_gather_single", "all_gather_tensor") and _renamed("reduce_scatter_single",
                                                                           "reduce_scatter_tensor")),
        f"the operator {ALL_TO_ALL_OPERATOR}": hasattr(torch.ops._c10d_functional, "all_to_all_single"),
        "the action types F, B, I and W of torch.distributed.pipelining": _has_action_types(),
    }.items() if not exists]
    if missing:
        raise InstallationError(f"torch {torch.__version__} lacks {'; '.join(missing)}. megatron_sp uses these "
                                f"internals; install a version from {OLDEST} up to the one in requirements.txt")


def _renamed(new: str, old: str) -> Any:
    """A function of torch's functional collectives, which torch 2.13 renamed."""
    return getattr(functional, new, None) or getattr(functional, old, None)


def _has_action_types() -> bool:
    try:
        return {"F", "B", "I", "W"} <= {kind.value for kind in schedules._ComputationType}
    except AttributeError:
        return False


# ---------------------------------------------------------------- collectives that return new tensors

def all_reduce(x: torch.Tensor, operation: str, group: dist.ProcessGroup) -> torch.Tensor:
    """``operation`` (sum, max) of the ranks' tensors."""
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), operation, group))


def all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The ranks' tensors one after another along dimension 0."""
    return functional.wait_tensor(_renamed("all_gather_single", "all_gather_tensor")(x.contiguous(), 0, group))


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's piece, along dimension 0, of the sum of the ranks' tensors."""
    reduce = _renamed("reduce_scatter_single", "reduce_scatter_tensor")
    return functional.wait_tensor(reduce(x.contiguous(), "sum", 0, group))


def start_all_to_all(x: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Start an all-to-all of rows; the result may be read after ``wait``, and x must live until then.

    This calls the operator itself: torch's Python function returns a tensor that waits at its first use, which
    autograd makes too early.
    """
    return torch.ops._c10d_functional.all_to_all_single(x, receive, send, group.group_name)


def wait(x: torch.Tensor) -> torch.Tensor:
    """Wait for a collective that was started. On a GPU its stream waits, not the CPU."""
    return functional.wait_tensor(x)


# ---------------------------------------------------------------- pipeline schedules

def computations(schedule: Any, rank: int) -> list[tuple[str, int, int]]:
    """What a rank computes in a schedule of several stages, in order: (kind, stage, microbatch)."""
    actions = [part for action in schedule.pipeline_order[rank] if action is not None
               for part in (action.sub_actions or (action,))]
    return [(action.computation_type.value, action.stage_index, action.microbatch_index)
            for action in actions if action.computation_type.value in "FBIW"]


def keep_forward(schedule: Any) -> None:
    """Remove all backward actions from a schedule, which then only evaluates.

    torch's own evaluation mode fails where two neighbouring stages are on one rank.
    """
    orders = getattr(schedule, "pipeline_order_with_comms", None) or {}  # schedules of one stage a rank have none
    for rank, actions in orders.items():
        parts = [part for action in actions for part in (action.sub_actions or (action,))]
        orders[rank] = [action for action in parts if action.computation_type.value in FORWARD_ACTIONS]


# ---------------------------------------------------------------- the rest

def default_store() -> dist.Store:
    """The store through which the ranks of the default group met; it works while collectives do not."""
    return dist.distributed_c10d._get_default_store()


def silence_redistribution() -> None:
    """Stop torch's warnings that gathering a whole tensor is slow, for programs that mean to do it."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
