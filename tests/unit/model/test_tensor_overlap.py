"""``--tp-comm-overlap``: torch's compiler finds every collective of a layer beside its matrix product."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._functorch.aot_autograd import make_boxed_func

from benchmarks.fake_ranks import LLAMA, fake_group
from megatron_sp.config.load import load_run
from megatron_sp.config.resolve import with_vocab
from megatron_sp.model.block import Block
from megatron_sp.model.build import build_model
from megatron_sp.model.context import Context
from megatron_sp.model.kernels import choose_kernels, kernels_in_words
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.tensor import products

FLAGS = "--tensor-model-parallel-size 2 --sequence-parallel --compile --tp-comm-overlap"


def run_of(flags: str, world: int = 2) -> Any:
    run, notes = load_run(f"--num-layers 1 {LLAMA} {flags}".split(), world)
    return with_vocab(run, run.model.vocab_size), notes


def count_fused(graphs: list[Counter[str]], gm: Any, inputs: Any, **_: Any) -> Any:
    """Apply the passes of torch's compiler to a copy of a graph, note its collectives, and return the graph as it is.

    The operators that the passes put in exist for GPUs only.
    """
    from torch._inductor.fx_passes import post_grad
    from torch._inductor.virtualized import V

    changed = copy.deepcopy(gm)
    post_grad.view_to_reshape(changed)  # type: ignore[no-untyped-call]
    with V.set_fake_mode(torch._guards.detect_fake_mode(inputs)):
        post_grad.post_grad_passes(changed, False)
    graphs.append(Counter(str(node.target).split(".")[1] for node in changed.graph.nodes if node.op == "call_function"
                          and str(node.target).startswith(("symm_mem", "_c10d_functional"))))
    return make_boxed_func(gm.forward)


@pytest.mark.parametrize("further", ["", *(pytest.param(flags, marks=pytest.mark.slow) for flags in (
    "--micro-batch-size 1", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute-granularity selective"))])
def test_the_compiler_overlaps_all_collectives_of_a_layer(further: str) -> None:
    compile_fx = pytest.importorskip("torch._inductor.compile_fx").compile_fx
    symmetric_memory = pytest.importorskip("torch.distributed._symmetric_memory")
    graphs: list[Counter[str]] = []
    compiled = torch.compile

    def as_on_gpus(function: Any, options: dict[str, Any] | None = None) -> Any:
        return compiled(function, backend=functools.partial(
            compile_fx, inner_compile=functools.partial(count_fused, graphs), config_patches=options))

    torch._dynamo.reset()
    with fake_group(2), symmetric_memory._test_mode(), mock.patch.object(dist, "is_nccl_available", lambda: True), \
            mock.patch("megatron_sp.model.kernels.tensor_overlap_problem", lambda group, device: ""), \
            mock.patch.object(torch, "compile", as_on_gpus):
        run, notes = run_of(f"{FLAGS} {further}")
        mesh = ParallelMesh.build(run.parallel)
        model = build_model(run, mesh)
        tokens = torch.zeros(run.train.micro_batch_size, 96, dtype=torch.int64)
        model(tokens, Context(torch.arange(96).expand_as(tokens)), labels=tokens).sum().backward()
    torch._dynamo.reset()
    assert not [note for note in notes if "overlap" in note]
    each = {"fused_all_gather_matmul": 2, "fused_matmul_reduce_scatter": 2}  # attention and feed-forward
    assert len(graphs) >= 2 and all(graph == each for graph in (graphs[0], graphs[-1])), graphs


def test_joined_products_have_the_same_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(rows, 6, generator=generator, dtype=torch.float64, requires_grad=True) for rows in (4, 2, 3)]
    found = []
    for joined in (False, True):
        parts = products(x, *((weight, None) for weight in weights), joined=joined)
        found.append(torch.autograd.grad(sum((part.sin().sum() for part in parts), torch.zeros(())), [x, *weights]))
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_without_gpus_the_run_says_that_nothing_overlaps() -> None:
    with fake_group(2):
        run, _ = run_of(FLAGS)
        mesh = ParallelMesh.build(run.parallel)
        kernels = choose_kernels(run, torch.device("cpu"), mesh.group("tp"))
        assert not kernels.overlaps_tensor and "beside products" not in kernels_in_words(run, kernels)
        warning, = kernels.warnings
        assert warning.startswith("--tp-comm-overlap is not used: only GPUs can.")
        assert not choose_kernels(run, torch.device("cpu")).warnings
        block, = (module for module in build_model(run, mesh).modules() if isinstance(module, Block))
        assert not block.mlp.region.overlapped


@pytest.mark.parametrize(("flags", "missing"), [
    ("--compile --sequence-parallel", "--tensor-model-parallel-size 2 or more"),
    ("--tensor-model-parallel-size 2 --compile", "--sequence-parallel"),
    ("--tensor-model-parallel-size 2", "--sequence-parallel and --compile")])
def test_what_the_flag_needs_is_named(flags: str, missing: str) -> None:
    _, notes = run_of(f"--tp-comm-overlap {flags}")
    assert f"--tp-comm-overlap has no effect without {missing}." in notes
