"""Everything this package uses of torch outside its documented interface, in one place.

Another version of torch may rename or drop these functions and operators without notice. ``check_torch`` looks for
those that every run needs when the first mesh is built. A run under a torch version that lacks one then stops with one
clear message instead of failing later. The operators of fused attention are not among them: where one is missing,
``model/attention/block_kernels.py`` uses its own slower kernel.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.pipelining import PipelineStage, schedules

from megatron_sp.errors import InstallationError

#: Oldest torch that the tests pass with; ``pyproject.toml`` says the same.
OLDEST = "2.11"
#: Name of the operator that runs an all-to-all. Selective recomputation keeps the results of operators by their names.
ALL_TO_ALL_OPERATOR = "_c10d_functional.all_to_all_single"
#: The operators of torch's fused attention for CPUs: forward and backward.
CPU_FLASH_OPERATORS = (
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")
#: Options of ``torch.compile`` that make it overlap tensor parallelism's collectives with matrix products.
TENSOR_OVERLAP_OPTIONS: dict[str, Any] = {"_micro_pipeline_tp": True}
#: torch's names of the actions in a pipeline schedule that belong to the forward pass.
FORWARD_ACTIONS = ("F", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")


def check_torch() -> None:
    """Check that the installed torch has all internal functions and operators that every run needs.

    Raises:
        InstallationError: something is missing. The message names the version of torch and all that is missing.
    """
    missing = [name for name, exists in {
        "all_reduce, wait_tensor and all_to_all_single of torch.distributed._functional_collectives": all(
            hasattr(functional, name) for name in ("all_reduce", "wait_tensor", "all_to_all_single")),
        "an all-gather and a reduce-scatter in torch.distributed._functional_collectives": bool(
            _find_collective("all_gather_single", "all_gather_tensor")
            and _find_collective("reduce_scatter_single", "reduce_scatter_tensor")),
        f"the operator {ALL_TO_ALL_OPERATOR}": hasattr(torch.ops._c10d_functional, "all_to_all_single"),
        "the action types F, B, I and W of torch.distributed.pipelining": _has_action_types(),
        "PipelineStage.forward_one_chunk and _prepare_forward_infra": all(
            hasattr(PipelineStage, name) for name in ("forward_one_chunk", "_prepare_forward_infra")),
    }.items() if not exists]
    if missing:
        raise InstallationError(f"torch {torch.__version__} lacks {'; '.join(missing)}. megatron_sp needs these "
                                f"internals of torch. Install a version from {OLDEST} up to the one in "
                                "requirements.txt.")


def _find_collective(new: str, old: str) -> Any:
    """Return a functional collective under the name it has from torch 2.13 on, or under its name before; else None."""
    return getattr(functional, new, None) or getattr(functional, old, None)


def _has_action_types() -> bool:
    try:
        return {"F", "B", "I", "W"} <= {kind.value for kind in schedules._ComputationType}
    except AttributeError:
        return False


# ---------------------------------------------------------------- autograd

def will_run(node: Any, number: int) -> bool:
    """Return whether the backward pass that is running needs the gradient of a node's input.

    A pipeline schedule may compute the gradients of a stage's input and of its weights in two passes. A node of
    torch's own computes in each only what the pass needs; a function written in Python must ask.

    Args:
        node: the ``ctx`` of an ``autograd.Function``, in its backward.
        number: number of the input, counted from 0.
    """
    asks = getattr(torch._C, "_will_engine_execute_node", None)
    if torch.compiler.is_compiling() or asks is None:
        return True
    following, _ = node.next_functions[number]
    if following is None:
        return False
    try:
        return bool(asks(following))
    except RuntimeError:  # torch cannot answer this for a leaf tensor
        return True


# ---------------------------------------------------------------- collectives that return new tensors

def all_reduce(x: torch.Tensor, operation: str, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the elementwise ``operation`` ("sum" or "max") of the tensors of all ranks of the group."""
    return _finished(functional.all_reduce(x.contiguous(), operation, group))


def all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the tensors of all ranks of the group, concatenated along dimension 0 in rank order."""
    return _finished(_find_collective("all_gather_single", "all_gather_tensor")(x.contiguous(), 0, group))


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum the tensors of all ranks and return this rank's shard of the sum along dimension 0."""
    reduce = _find_collective("reduce_scatter_single", "reduce_scatter_tensor")
    return _finished(reduce(x.contiguous(), "sum", 0, group))


def _finished(x: torch.Tensor) -> torch.Tensor:
    """Return the result of a functional collective when it is there. In code that is compiled it is there already."""
    return x if torch.compiler.is_compiling() else functional.wait_tensor(x)


def start_all_to_all(x: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Start an all-to-all of rows and return the tensor that it fills.

    The caller may read the result only after ``wait(result)`` and must keep ``x`` alive until then.

    This calls the operator and not torch's Python function around it. The Python function returns a tensor that waits
    at its first use, and autograd uses it at once, so that no work could overlap with the exchange.

    Args:
        x: [rows, width], the rows for rank 0 first, then those for rank 1, and so on.
        send: number of rows for each rank.
        receive: number of rows from each rank.
    Returns:
        [sum(receive), width], in rank order
    """
    return torch.ops._c10d_functional.all_to_all_single(x, receive, send, group.group_name)


def wait(x: torch.Tensor) -> torch.Tensor:
    """Wait for a collective that was started, and return its result. On a GPU only the stream waits, not the CPU."""
    return functional.wait_tensor(x)


def tensor_overlap_problem(group: dist.ProcessGroup, device: torch.device) -> str:
    """Try the two operators that overlap a collective with a matrix product; all ranks of the group call this.

    ``torch.compile`` puts them in place of an all-gather and the products after it, and of a product and the
    reduce-scatter after it (``TENSOR_OVERLAP_OPTIONS``). They use memory that the GPUs of the group map from each
    other, which torch calls symmetric memory.

    Returns:
        why they cannot be used on some rank of the group; "" if they work
    """
    if device.type != "cuda":
        return "only GPUs can"
    problem = ""
    try:
        _try_tensor_overlap(group, device)
    except Exception as error:  # noqa: BLE001 (whatever torch raises without NVLink or in another version)
        problem = f"torch's symmetric memory does not work among these GPUs ({str(error).splitlines()[0][:200]})"
    works = torch.tensor(not problem, dtype=torch.int32, device=device)
    dist.all_reduce(works, dist.ReduceOp.MIN, group=group)
    return problem or ("" if works else "torch's symmetric memory does not work on another rank")


def _try_tensor_overlap(group: dist.ProcessGroup, device: torch.device) -> None:
    """Compare both operators with the plain collectives and products on small tensors.

    Raises:
        RuntimeError: the results differ. torch's operators raise other errors.
    """
    from torch.distributed import _symmetric_memory

    with warnings.catch_warnings():
        # torch warns that this call is unneeded, but its compiler needs it
        warnings.simplefilter("ignore", FutureWarning)
        _symmetric_memory.enable_symm_mem_for_group(group.group_name)
    world = dist.get_world_size(group)
    x = torch.randn(64, 128, device=device, dtype=torch.bfloat16)
    weight = torch.randn(128, 128, device=device, dtype=torch.bfloat16)
    operators, name = torch.ops.symm_mem, group.group_name
    whole = all_gather(x, group)
    gathered, (product,) = operators.fused_all_gather_matmul(x, [weight], 0, name)
    summed = operators.fused_matmul_reduce_scatter(whole, weight, "sum", 0, name)
    pairs = ((gathered, whole), (product, whole @ weight), (summed, reduce_scatter(whole @ weight, group)))
    if not all(torch.allclose(a.float(), b.float(), rtol=0.05, atol=0.5 * world) for a, b in pairs):
        raise RuntimeError("its results are wrong")


# ---------------------------------------------------------------- pipeline schedules

def computation_order(schedule: Any, rank: int) -> list[tuple[str, int, int]]:
    """Return what a rank computes in a schedule with several stages per rank: (kind, stage, microbatch), in order.

    The kind is F (forward), B (full backward), I (gradient of the stage's input) or W (gradients of its weights).
    """
    actions = [part for action in schedule.pipeline_order[rank] if action is not None
               for part in (action.sub_actions or (action,))]
    return [(action.computation_type.value, action.stage_index, action.microbatch_index)
            for action in actions if action.computation_type.value in "FBIW"]


def actions_with_transfers(schedule: Any, rank: int) -> list[tuple[str, int, int]]:
    """Return all that a rank does in a schedule with several stages per rank, sends and receives too, in order.

    Each is (action, stage, microbatch). The actions are those of ``computation_order``, and SEND_F, RECV_F, SEND_B and
    RECV_B for forward and backward results.
    """
    return [(part.computation_type.value, part.stage_index, part.microbatch_index)
            for action in schedule.pipeline_order_with_comms[rank] for part in (action.sub_actions or (action,))]


class StageWithObjects(PipelineStage):
    """A pipeline stage whose forward also gets what torch does not cut into microbatches itself: any Python objects.

    Attributes:
        objects: further arguments of the forward, by name, for each microbatch.
    """

    objects: Sequence[dict[str, Any]] = ()

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, kwargs: dict[str, Any] | None = None,
                          *further: Any, **how: Any) -> Any:
        """Compute the forward of one microbatch, with its objects."""
        return super().forward_one_chunk(fwd_chunk_id, args, self._with_objects(kwargs, fwd_chunk_id), *further, **how)

    def _prepare_forward_infra(self, num_microbatches: int, args: Any, kwargs: dict[str, Any] | None = None,
                               *further: Any, **how: Any) -> Any:
        """Learn the shapes of inputs and outputs from one forward, which needs the objects of a microbatch too."""
        return super()._prepare_forward_infra(num_microbatches, args, self._with_objects(kwargs, 0), *further, **how)

    def _with_objects(self, kwargs: dict[str, Any] | None, number: int) -> dict[str, Any]:
        return {**(kwargs or {}), **(self.objects[number] if self.objects else {})}


def remove_backward_actions(schedule: Any) -> None:
    """Remove all backward actions from a schedule, so that it can only evaluate.

    torch's own evaluation mode fails where two neighbouring stages are on one rank.
    """
    # Schedules with one stage per rank have no list of actions, and torch's evaluation mode works for them.
    orders = getattr(schedule, "pipeline_order_with_comms", None) or {}
    for rank, actions in orders.items():
        parts = [part for action in actions for part in (action.sub_actions or (action,))]
        orders[rank] = [action for action in parts if action.computation_type.value in FORWARD_ACTIONS]


# ---------------------------------------------------------------- fused attention that returns the log-sum-exp

def has_cpu_flash_attention() -> bool:
    """Return whether this torch has the operators that ``cpu_flash_attention`` and its backward call."""
    return all(hasattr(torch.ops.aten, name) for name in CPU_FLASH_OPERATORS)


def cpu_flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                        causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend on a CPU: q [b, n, t, d], k, v [b, g, t', d] -> o [b, n, t, d], log-sum-exp [b, n, t]."""
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return o, lse


def cpu_flash_attention_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                                 o: torch.Tensor, lse: torch.Tensor,
                                 causal: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v, given that of o; shapes as in ``cpu_flash_attention``."""
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, o, lse, 0.0, causal)
    return dq, dk, dv


def gpu_flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                        causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend on a GPU in half precision: q [b, t, n, d], k, v [b, t', g, d] -> o [b, t, n, d], log-sum-exp [b, n, t].

    Source: ``mha_fwd`` and ``mha_bwd`` in torch's ``flash_attn/flash_api.cpp``, which take any g that divides n. These
    tensors have their tokens before their heads, unlike those of the operators of ``scaled_dot_product_attention``.
    """
    o, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal,
                                                         False)
    return o, lse


def gpu_flash_attention_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                                 o: torch.Tensor, lse: torch.Tensor,
                                 causal: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v, given that of o; shapes as in ``gpu_flash_attention``."""
    no_random_state = torch.empty(2, dtype=torch.uint64, device=q.device)  # only dropout reads it
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, o, lse.contiguous(), None, None, q.shape[1], k.shape[1], 0.0, causal, no_random_state,
        no_random_state)
    return dq, dk, dv


def gpu_sdpa_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                   causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend on a GPU in half precision: q [b, n, t, d], k, v [b, n, t', d] -> o [b, n, t, d], log-sum-exp [b, n, t].

    This operator needs as many key/value heads as query heads.
    """
    o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return o, lse


def gpu_sdpa_flash_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                            o: torch.Tensor, lse: torch.Tensor,
                            causal: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v, given that of o; shapes as in ``gpu_sdpa_flash``."""
    no_random_state = torch.empty(2, dtype=torch.int64, device=q.device)  # only dropout reads it
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, o, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, no_random_state,
        no_random_state)
    return dq, dk, dv


# ---------------------------------------------------------------- store and warnings

def backend_without_network() -> str:
    """Return the name of torch's backend whose collectives copy this process's own tensors, which is right for one."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 (registers it)

    return "fake"


def default_store() -> dist.Store:
    """Return the store through which the ranks of the default group met. It works even while collectives fail."""
    return dist.distributed_c10d._get_default_store()


def silence_redistribution() -> None:
    """Switch off torch's warnings that gathering a whole DTensor is slow, in programs that gather on purpose."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def storage_info(file_name: str, offset: int, length: int) -> Any:
    """Return what torch.distributed.checkpoint notes about where a tensor lies: the file, and its bytes there."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file_name, offset, length)
