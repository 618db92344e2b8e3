"""Count what compiled code costs on a GPU, without one: kernels, and bytes that they move.

torch's compiler, Inductor, decides which operators become one kernel and which tensors are kept for backward. These
decisions need the shapes of tensors and the kind of device, and neither a GPU nor Triton. ``counting_backend`` takes
them for a GPU as large as an H100, and writes no code. A function that is compiled with it runs on the "meta" device,
where tensors have no values, and adds its kernels to a ``Traffic`` at each run::

    traffic = Traffic()
    layer = torch.compile(layer, backend=counting_backend(traffic), fullgraph=True, dynamic=False)
    with described_gpu():
        layer(x).sum().backward()
    print(traffic.operators, traffic.moved)

The count is the compiler's own: a kernel reads each input and writes each result once, or the part of it that it
needs, and what only the kernel itself uses stays in registers. Left out are the compiler's passes over forward and
backward together, before it divides them, because they do not know "meta".

The compiler has no documented interface for this. With a version of torch that lacks a function which is used here,
``counting_backend`` raises ImportError or AttributeError.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from megatron_sp.proof.traffic import Traffic, flash_attention

#: The device that the compiler decides for. It is only described; nothing runs on it.
DEVICE = torch.device("cuda", 0)
#: What the compiler asks of a device: here the numbers of an H100.
PROPERTIES = {"name": "described", "multi_processor_count": 132, "major": 9, "minor": 0, "warp_size": 32,
              "regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024,
              "total_memory": 80 << 30, "L2_cache_size": 50 << 20, "shared_memory_per_block_optin": 227 << 10}


class Kernel(NamedTuple):
    """One kernel that compiled code launches, and the bytes that it reads and writes."""

    name: str
    read: int
    written: int


@contextlib.contextmanager
def described_gpu() -> Iterator[None]:
    """Let the compiler ask a description of a GPU instead of the GPUs of this machine; attention is flash attention."""
    from torch._dynamo import device_interface
    from torch._inductor.runtime.hints import DeviceProperties

    before = device_interface.get_interface_for_device("cuda")

    class Described(before):  # type: ignore[misc, valid-type]
        """A single GPU with ``PROPERTIES``."""

        class Worker(before.Worker):  # type: ignore[name-defined, misc]
            current_device = staticmethod(lambda: 0)
            get_device_properties = staticmethod(lambda device=None: SimpleNamespace(**PROPERTIES))

        is_available = staticmethod(lambda: True)
        device_count = staticmethod(lambda: 1)
        current_device = staticmethod(lambda: 0)
        get_compute_capability = staticmethod(lambda device=None: 90)
        get_device_properties = Worker.get_device_properties

    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", flash_attention, "AutogradMeta")
    names = ("cuda", str(DEVICE))
    for name in names:
        device_interface.register_interface_for_device(name, Described)
    DeviceProperties.create.cache_clear()
    try:
        yield
    finally:
        for name in names:
            device_interface.register_interface_for_device(name, before)
        DeviceProperties.create.cache_clear()
        library._destroy()


def counting_backend(traffic: Traffic) -> Callable[..., Any]:
    """Return a backend for ``torch.compile``. Its code runs on "meta" and adds its kernels to ``traffic`` at each run.

    Raises:
        ImportError, AttributeError: this torch lacks a function of its compiler that is used here.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def compiler(graph: torch.fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        kernels = kernels_of(graph, inputs)

        def run(*args: Any) -> Any:
            for kernel in kernels:
                traffic.add(*kernel)
            return graph.forward(*args)

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler, decompositions=select_decomp_table,
                        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"))


def kernels_of(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[Kernel]:
    """Return the kernels that the compiler makes of a graph of operators on the GPU of ``described_gpu``."""
    from torch._guards import detect_fake_mode
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.compile_fx import _recursive_post_grad_passes, view_to_reshape
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.virtualized import V
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    class KernelPlan(Scheduler):
        """Decides which operators become one kernel as for Triton, also where Triton is not installed."""

        def create_backend(self, device: torch.device) -> Any:
            return TritonScheduling(self)

    graph = copy.deepcopy(graph)  # the graph that runs stays on "meta"
    mode = detect_fake_mode(inputs)
    assert mode is not None  # the compiler traces with tensors without values
    with torch.no_grad(), mode, V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        # The passes over the graph leave "meta" alone, and they run in-place operators, which ask a GPU.
        there = _move(graph, inputs, torch.device("cpu"))
        view_to_reshape(graph)
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*there)
        _recursive_post_grad_passes(graph)
        there = _move(graph, there, DEVICE)
        lowering = GraphLowering(graph, example_inputs=there)
        with V.set_graph_handler(lowering):
            lowering.run(*there)
            lowering.scheduler = KernelPlan(lowering.operations)
            return [kernel for node in lowering.scheduler.nodes for kernel in _kernels_of_node(node)]


def _move(graph: torch.fx.GraphModule, inputs: Sequence[Any], device: torch.device) -> list[Any]:
    """Let a graph compute on another device, and return its inputs there; no tensor has values."""
    def moved(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}
        if "val" in node.meta:
            node.meta["val"] = tree_map_only(torch.Tensor, moved, node.meta["val"])
    return tree_map_only(torch.Tensor, moved, list(inputs))


def _kernels_of_node(node: Any) -> Iterator[Kernel]:
    """Yield what a node of the compiler's plan launches: one kernel, nothing, or a kernel and a copy."""
    read, written = node.get_read_buffer_sizes(), node.get_write_buffer_sizes()
    if not node.is_extern():
        if read + written:
            yield Kernel(_fused_name(node), read, written)
        return
    operator = getattr(node.node, "op_overload", None)
    if operator is None or operator.is_view:
        return
    name = operator._schema.name.partition("::")[2]
    yield Kernel(name, read, written)
    if name == "addmm" and len(node.node.inputs[0].get_size()) == 2:
        # torch copies the matrix that is added to the result first, and then adds the product in place.
        yield Kernel("addmm, copy", written, written)


def _fused_name(node: Any) -> str:
    """Return a name for a kernel after the operators that it is made of."""
    operators = {str(origin.target) for part in node.get_nodes() for origin in part.node.origins
                 if origin.op == "call_function"}
    names = {operator.removeprefix("aten.").partition(".")[0] for operator in operators}
    return "_".join(["fused", *sorted(names - {"view", "permute", "reshape", "alias"})])
