"""Count what a computation costs on a GPU, without one: operators, bytes that they move, and collectives.

A ``Traffic`` sees every operator that torch runs inside its ``with`` block, in forward and backward::

    with Traffic() as traffic:
        layer(x).sum().backward()
    print(traffic.operators, traffic.moved)

A matrix product or attention is limited by arithmetic. Everything else on a GPU takes as long as it takes to read its
inputs from memory and to write its results, so bytes are the cost of it. The count assumes that each operator reads
each input once and writes each result once. It knows nothing of caches.

Tensors on the "meta" device have shapes and no values, so a layer of any size is counted in milliseconds. torch
computes some functions with one kernel on a GPU and with several operators on other devices. ``gpu_kernels`` counts
them as on a GPU.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MATRIX_PRODUCTS = frozenset({"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "_grouped_mm", "_scaled_mm",
                             "add_product"})
ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention", "_varlen_attn")
#: Operators that only make or describe memory. Nothing is launched for them.
FREE = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "set_",
                  "resize_", "record_stream", "is_pinned", "lift_fresh", "wait_tensor", "_wrap_tensor_autograd",
                  "_local_scalar_dense", "_record_function_enter_new", "_record_function_exit"})
#: Operators that write a tensor whose old values they do not read.
FILLS = frozenset({"zero_", "fill_", "copy_", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones",
                   "new_full", "zeros", "ones", "full", "uniform_", "normal_", "random_",
                   "_foreach_zero_", "_foreach_copy_"})
#: Operators that read of their first input only as many elements as they return.
LOOKUPS = frozenset({"embedding", "index_select", "gather", "index"})
#: Operators that add to only a part of the tensor that they change: as many elements as their last input has.
SCATTERS = frozenset({"scatter_add_", "index_add_", "index_put_", "scatter_"})
#: Operators whose result or its size the host reads from the device, so that it waits. ``tolist`` on a CPU is not seen.
HOST_READS = frozenset({"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select",
                        "_unique2", "unique_dim", "unique_consecutive", "bincount"})
COLLECTIVES = {"all_reduce": "all-reduce", "allreduce": "all-reduce", "all_gather": "all-gather",
               "allgather": "all-gather", "reduce_scatter": "reduce-scatter", "all_to_all": "all-to-all",
               "alltoall": "all-to-all", "send": "send", "recv": "receive", "broadcast": "broadcast",
               "barrier": "barrier"}


class Collective(NamedTuple):
    """One kind of collective among the ranks of one group."""

    kind: str
    group: str


def size_in_memory(x: torch.Tensor) -> int:
    """Return the bytes of memory behind a tensor; elements that ``expand`` repeats count once."""
    elements = 1
    for length, stride in zip(x.shape, x.stride()):
        elements *= length if stride else min(length, 1)
    return elements * x.element_size()


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return all tensors inside nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class Traffic(TorchDispatchMode):
    """Counts the operators that run in a ``with`` block.

    Args:
        names: what to call process groups in the report, by ``ProcessGroup.group_name``.

    Attributes:
        launched: how often each operator ran that launches a kernel; collectives are counted apart.
        read, written: bytes that operators other than matrix products and attention read and write, by operator.
        collectives: how often each collective ran.
        sent: bytes of the whole tensor of each collective: its size before a reduce-scatter, and after an all-gather.
        host_reads: operators that make the host wait until the device has computed a value. Operators of CPU tensors
            are counted too, because a CPU run stands for a run on a GPU.
        crossings: operators that copy between host and device. On the "meta" device a read of a value by the host is
            an error, and ``torch.tensor(numbers, device="meta")`` copies nothing and is not seen.
    """

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.names = dict(names or {})
        self.launched: Counter[str] = Counter()
        self.read: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self.collectives: Counter[Collective] = Counter()
        self.sent: Counter[Collective] = Counter()
        self.host_reads: Counter[str] = Counter()
        self.crossings: Counter[str] = Counter()
        self.is_paused = False

    @property
    def operators(self) -> int:
        """Number of operators that launched something."""
        return sum(self.launched.values())

    @property
    def matrix_products(self) -> int:
        return sum(count for name, count in self.launched.items() if name in MATRIX_PRODUCTS)

    @property
    def moved(self) -> int:
        """Bytes read and written by everything that is neither a matrix product nor attention."""
        return sum(self.read.values()) + sum(self.written.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls the operators on its local tensors, which are counted
        result = func(*args, **(kwargs or {}))
        if not self.is_paused:
            self._count(func, args, kwargs or {}, result)
        return result

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        namespace, _, name = func._schema.name.partition("::")
        if reads_on_host(name, args, kwargs):
            self.host_reads[name] += 1
        if crosses(name, args, result):
            self.crossings[name] += 1
        if name in FREE or func.is_view or namespace == "prim":
            return
        if namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"):
            self._count_collective(name, args, result)
            return
        read, written = bytes_of_call(func, args, kwargs, result)
        self.add(name, read, written)

    def add(self, name: str, read: int, written: int) -> None:
        """Count one launch of an operator."""
        self.launched[name] += 1
        if name not in MATRIX_PRODUCTS and not name.startswith(ATTENTION):
            self.read[name] += read
            self.written[name] += written

    def _count_collective(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        kind = next((word for part, word in COLLECTIVES.items() if part in name), name)
        key = Collective(kind, self._group(args))
        self.collectives[key] += 1
        sizes = [size_in_memory(x) for x in (*tensors_in(args), *tensors_in(result))]
        self.sent[key] += max(sizes, default=0)

    def _group(self, args: tuple[Any, ...]) -> str:
        """Return the name of the group among the arguments of a collective."""
        for value in reversed(args):
            if isinstance(value, str) and value not in ("sum", "max", "min", "avg"):
                return self.names.get(value, value)
            if isinstance(value, torch.ScriptObject):
                with contextlib.suppress(RuntimeError, TypeError):
                    name = dist.ProcessGroup.unbox(value).group_name
                    return self.names.get(name, name)
        return "?"

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing for a while."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before


def reads_on_host(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the host waits for a value that the device computes."""
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):  # by a mask: as many as its true elements
        return any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1]))
    if name == "repeat_interleave":  # the result has as many elements as the sum of the repeats, a tensor
        return kwargs.get("output_size") is None
    return name in HOST_READS


def crosses(name: str, args: tuple[Any, ...], result: Any) -> bool:
    """Return whether an operator copies between host and device; a single host number is an argument of a kernel."""
    return len({x.device.type for x in tensors_in((args, result)) if x.dim() or name in ("_to_copy", "copy_")}) > 1


def bytes_of_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[int, int]:
    """Return the bytes that one call of an operator reads and writes."""
    name, read, written = func._schema.name.partition("::")[2], 0, 0
    values = [*args, *(kwargs.get(argument.name) for argument in func._schema.arguments[len(args):])]
    for argument, value in zip(func._schema.arguments, values):
        size = sum(map(size_in_memory, tensors_in(value)))
        changes = argument.alias_info is not None and argument.alias_info.is_write
        if changes and name in SCATTERS:
            size = size_in_memory(tensors_in(values)[-1])
        written += size if changes else 0
        read += 0 if (changes and (argument.is_out or name in FILLS)) else size
    if func._schema.is_mutable:
        return read, written
    made = sum(map(size_in_memory, tensors_in(result)))
    if name in FILLS:
        return 0, made
    if name in LOOKUPS:
        read += made - size_in_memory(tensors_in(values)[0])
    return read, written + made


# ---------------------------------------------------------------- functions that are one kernel on a GPU

class _FusedRMSNorm(torch.autograd.Function):
    """Counts RMSNorm as one kernel in forward and one in backward; returns tensors without values."""

    @staticmethod
    def forward(ctx: Any, traffic: Traffic, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.traffic, ctx.scales = traffic, 4 * x.numel() // x.shape[-1]  # one fp32 number for each row
        ctx.save_for_backward(x, weight)
        with traffic.paused():
            y = torch.empty_like(x)
        traffic.add("_fused_rms_norm", size_in_memory(x) + size_in_memory(weight), size_in_memory(y) + ctx.scales)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        with ctx.traffic.paused():
            dx, dw = torch.empty_like(x), torch.empty_like(weight)
        both = size_in_memory(x) + size_in_memory(weight)
        ctx.traffic.add("_fused_rms_norm_backward", size_in_memory(grad) + both + ctx.scales, both)
        return None, dx, dw


def flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **how: Any) -> torch.Tensor:
    """Compute ``F.scaled_dot_product_attention`` with the operator that a GPU has for it; takes grouped heads."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


@contextlib.contextmanager
def gpu_kernels(traffic: Traffic) -> Iterator[None]:
    """Count RMSNorm and attention as torch computes them on a GPU: one kernel forward, one backward.

    On a GPU ``F.rms_norm`` is one kernel where x and the weight have one type. ``F.scaled_dot_product_attention`` is
    flash attention, which takes grouped heads. Elsewhere torch composes both of many operators. Within the ``with``
    block this is changed for tensors on the "meta" device, and for no others.
    """
    def rms_norm(x: torch.Tensor, shape: list[int], weight: torch.Tensor | None = None,
                 eps: float | None = None) -> torch.Tensor:
        assert weight is not None and weight.dtype == x.dtype, "a GPU would compute this norm with many operators"
        return _FusedRMSNorm.apply(traffic, x, weight)

    library = torch.library.Library("aten", "IMPL")
    library.impl("rms_norm", rms_norm, "AutogradMeta")
    library.impl("scaled_dot_product_attention", flash_attention, "AutogradMeta")
    try:
        yield
    finally:
        library._destroy()
