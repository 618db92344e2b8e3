"""``--compile``: one compilation serves all layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch._dynamo.utils import counters

from benchmarks.fake_ranks import LLAMA, fake_group
from megatron_sp.config.load import load_run
from megatron_sp.config.resolve import with_vocab
from megatron_sp.data.batch import Microbatch
from megatron_sp.model.build import build_model
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.tensor import products
from megatron_sp.train.forward_backward import build_engine

slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def traced_only() -> Iterator[None]:
    """Trace as for any compiler, and run what was traced with torch's operators. No C++ compiler is needed."""
    torch._dynamo.reset()
    counters.clear()
    torch.compiler.set_stance("default", force_backend="eager")
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


@pytest.mark.parametrize(("flags", "world"), [
    ("", 1),
    pytest.param("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 1, marks=slow),
    pytest.param("--recompute-granularity selective", 1, marks=slow),
    pytest.param("--ulysses-size 6", 6, marks=slow),
    pytest.param("--tensor-model-parallel-size 2 --sequence-parallel", 2, marks=slow)])
def test_layers_and_microbatches_share_one_compilation(flags: str, world: int) -> None:
    """torch compiles a function at most 8 times and then runs it uncompiled, so 10 layers would show more than one."""
    make_step(f"--num-layers 10 {flags}", world)
    assert dict(counters["frames"]) == {"total": 1, "ok": 1}
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@slow
@pytest.mark.parametrize(("flags", "more", "world"), [
    ("--ulysses-size 2 --ulysses-overlap-groups 2", "", 2), ("--ring-size 2", "", 2),
    ("--reset-attention-mask --reset-position-ids", "", 1), ("--window-size 32", "", 1),
    ("--sequence-chunk-size 24", "--sequence-chunk-size 4", 1)])
def test_compilations_around_uncompiled_attention_do_not_grow(flags: str, more: str, world: int) -> None:
    """Attention that stays uncompiled cuts a layer into graphs. They serve all layers, microbatches and chunks."""
    found = []
    for case in (f"--num-layers 2 {flags}", f"--num-layers 10 {flags} {more}"):
        torch._dynamo.reset()
        counters.clear()
        make_step(case, world)
        assert counters["frames"]["total"] == counters["frames"]["ok"]
        found.append(counters["stats"]["unique_graphs"])
    assert found[0] == found[1] <= 12


def make_step(flags: str, world: int) -> None:
    """Compute forward and backward of two microbatches with compiled layers, as rank 0 of a fake process group."""
    with fake_group(world):
        run, _ = load_run(f"{LLAMA} --compile {flags}".split(), world)
        run = with_vocab(run, run.model.vocab_size)
        mesh = ParallelMesh.build(run.parallel)
        engine = build_engine(run, build_model(run, mesh), mesh)
        tokens = torch.zeros(2, 96 // mesh.size("sp"), dtype=torch.int64)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        engine.forward_backward([Microbatch(tokens, tokens, positions, sample_ids, tokens.numel())
                                 for sample_ids in (torch.tensor((0, 1)), torch.tensor((2, 3)))], 1.0)


def test_compiled_products_add_the_gradients_of_their_input() -> None:
    """In compiled code they are added by an operator of ours."""
    x, weights = torch.randn(2, 3, 8, dtype=torch.float64), [torch.randn(n, 8, dtype=torch.float64) for n in (4, 6, 2)]

    def gradients(function: Callable[..., tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        leaves = [y.clone().requires_grad_() for y in (x, *weights)]
        results = function(leaves[0], *((weight, None) for weight in leaves[1:]))
        torch.autograd.backward(results, [torch.ones_like(y) * (1 + n) for n, y in enumerate(results)])
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    with torch.compiler.set_stance("default", force_backend="aot_eager"):
        compiled = gradients(torch.compile(products, fullgraph=True))
    torch.testing.assert_close(compiled, gradients(products), rtol=1e-12, atol=1e-12)
    expected = sum((1 + n) * torch.ones(2, 3, len(w), dtype=torch.float64) @ w for n, w in enumerate(weights))
    torch.testing.assert_close(compiled[0], expected, rtol=1e-12, atol=1e-12)
