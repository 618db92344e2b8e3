"""The parts of the model on ranks: a layer's output and input gradient, logits and loss of each shard, the weights.

Whole-model weight gradients are compared in tests/parity/test_gradients_fp64.py; here is what tells
*where* an error lies. All in fp64 against the plain reference.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from megatron_sp.config.schema import Run
from megatron_sp.layout.tokens import SequenceLayout
from megatron_sp.model.build import build_model
from megatron_sp.model.context import Context
from megatron_sp.model.gpt import GPT
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.tensor import TensorRegion
from megatron_sp.proof.data import batch, local_microbatches
from megatron_sp.proof.reference import Weights, random_weights, reference_block, reference_logits, weight_shapes
from megatron_sp.proof.steps import gather_full, load_full
from megatron_sp.train.chunk_recurrence import Part
from tests.helpers.configs import Case
from tests.helpers.spawn import run_ranks

TP2, SP, U2, U4 = "--tensor-model-parallel-size 2", "--sequence-parallel", "--ulysses-size 2", "--ulysses-size 4"
CASES = [
    Case("ulysses 2", 2, f"{U2} --micro-batch-size 2"),
    Case("ulysses 4, 1 kv head", 4, U4, model="--num-key-value-heads 1"),
    Case("ulysses 4, 6 heads", 4, U4, "six_heads"),
    Case("tp 2", 2, TP2, "gpt2"),
    Case("tp 2, megatron sp", 2, f"{TP2} {SP}", "gpt2"),
    Case("ulysses 2, tp 2, megatron sp, 3 of 6 heads", 4, f"{U2} {TP2} {SP}", "mixed"),
    Case("ulysses 2, dp 2, zero 3, recompute", 4, f"{U2} --zero-stage 3 --recompute-granularity full"),
]


def _relative(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return float((ours - theirs).abs().max() / theirs.abs().max())


def _my_tokens(run: Run, mesh: ParallelMesh) -> slice:
    """The tokens this rank holds between tensor-parallel regions."""
    layout = SequenceLayout(run.data.seq_length, ulysses=run.parallel.ulysses)
    ((start, stop),) = layout.ranges(mesh.rank("sp"))
    mine = TensorRegion.of(mesh, run.parallel.megatron_sp).outside(torch.arange(start, stop).unsqueeze(0))[0].tolist()
    return slice(mine[0], mine[-1] + 1)


def _layer(case: Case) -> tuple[float, float]:
    """On a rank: difference of a layer's output, and of its input's gradient."""
    run = case.run()
    mesh = ParallelMesh.build(run.parallel)
    weights = random_weights(run)
    model = build_model(run, mesh, dtype=torch.float64)
    assert isinstance(model, GPT)
    load_full(model, weights)
    generator = torch.Generator().manual_seed(3)
    shape = (run.train.micro_batch_size, run.data.seq_length, run.model.hidden_size)
    x, out_gradient = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))

    positions = torch.arange(shape[1]).expand(shape[0], -1)
    whole = x.clone().requires_grad_()
    expected = reference_block(weights, "layers.1", run.model, whole, positions)
    expected.backward(out_gradient)
    assert whole.grad is not None

    mine = _my_tokens(run, mesh)
    layout = SequenceLayout(run.data.seq_length, ulysses=run.parallel.ulysses)
    inside = torch.from_numpy(layout.positions(mesh.rank("sp"))).expand(shape[0], -1)
    context = Context(inside).with_rotation(run.model, torch.float64)
    part = x[:, mine].clone().requires_grad_()
    layer = dict(model.layers.items())["1"]
    if isinstance(layer, FSDPModule):  # the layer runs without its model, so FSDP must not gather others ahead
        layer.set_modules_to_forward_prefetch([])
        layer.set_modules_to_backward_prefetch([])
    output = layer(part, context)
    output.backward(out_gradient[:, mine])
    assert part.grad is not None
    return _relative(output.detach(), expected.detach()[:, mine]), _relative(part.grad, whole.grad[:, mine])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layer_output_and_input_gradient(case: Case) -> None:
    for rank, (output, gradient) in enumerate(run_ranks(_layer, case.world, case)):
        assert output < 1e-12, f"output of rank {rank}"
        assert gradient < 1e-12, f"input gradient of rank {rank}"


def _shard(case: Case) -> tuple[float, float]:
    """On a rank: difference of its logits, and of its loss sum, from the reference's slice."""
    run = case.run()
    mesh = ParallelMesh.build(run.parallel)
    weights = random_weights(run)
    model = build_model(run, mesh, dtype=torch.float64)
    load_full(model, weights)
    tokens, labels = batch(run, "ragged")
    whole = reference_logits(weights, run.model, tokens)
    microbatch = local_microbatches(run, mesh, tokens, labels)[0]
    tokens, labels, context = Part().of(microbatch)
    expected = whole[microbatch.sample_ids].gather(
        1, microbatch.positions.unsqueeze(-1).expand(-1, -1, run.model.vocab_size))
    logits = model(tokens, context).detach()
    region = TensorRegion.of(mesh, run.parallel.megatron_sp)
    losses = model(tokens, context, labels=labels, reduction="none")
    loss = model(tokens, context, labels=labels).detach()
    columns = logits.shape[-1]
    first = region.rank * columns
    real = max(0, min(columns, run.model.vocab_size - first))  # the rest is padding
    plain = torch.nn.functional.cross_entropy(expected.flatten(0, 1), microbatch.labels.flatten(), ignore_index=-100,
                                              reduction="none")
    return (_relative(logits[..., :real], expected[..., first:first + real]),
            max(float(abs(loss / plain.sum() - 1)), _relative(losses.flatten(), plain)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_and_loss_of_each_shard(case: Case) -> None:
    for rank, (logits, loss) in enumerate(run_ranks(_shard, case.world, case)):
        assert logits < 1e-12, f"logits of rank {rank}"
        assert loss < 1e-12, f"loss of rank {rank}"


def _initial_weights(case: Case) -> Weights:
    """On a rank: the full weights that the framework draws."""
    run = case.run()
    model = build_model(run, ParallelMesh.build(run.parallel))
    return {name: gather_full(name, parameter, run) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("style", ["llama", "gpt2", "mixed"])
def test_initial_weights_do_not_depend_on_the_layout(style: str) -> None:
    (expected,) = run_ranks(_initial_weights, 1, Case("one process", 1, "", style))
    shapes = weight_shapes(Case("one process", 1, "", style).run())
    assert {name: tuple(weight.shape) for name, weight in expected.items()} == shapes
    for world, layout in ((2, f"{TP2} {SP}"), (2, f"{U2} --zero-stage 3"), (4, f"{TP2} --zero-stage 2")):
        for weights in run_ranks(_initial_weights, world, Case("layout", world, layout, style)):
            assert weights.keys() == expected.keys()
            different = [name for name, weight in weights.items() if not torch.equal(weight, expected[name])]
            assert not different, f"{layout}: {different}"


def test_initial_weights_have_the_promised_spread() -> None:
    (weights,) = run_ranks(_initial_weights, 1, Case("one process", 1, "", "gpt2"))
    for name, weight in weights.items():
        if name.endswith("norm.weight"):
            assert torch.equal(weight, torch.ones_like(weight))
        elif name.endswith("bias"):
            assert not weight.any()
        else:
            shrink = 2.0 if name.endswith(("attention.output.weight", "mlp.down.weight")) else 1.0  # sqrt(2 x 2 layers)
            assert float(weight.std()) * shrink == pytest.approx(0.02, rel=0.05), name


def _drawn(flags: list[str]) -> list[Weights]:
    """On a rank: the matrices drawn with each of these flags, by name."""
    cases = [Case(words, 1, words, "gpt2", "--num-layers 3") for words in flags]
    return [{name: weight for name, weight in _initial_weights(case).items() if weight.ndim == 2} for case in cases]


def test_initial_weights_follow_their_flags() -> None:
    """Normal with the embeddings' own spread, or uniform within sqrt(6 / (in + out)) (Glorot and Bengio 2010)."""
    flags = ["--init-method-std 0.01", "--init-method-std 0.01 --embedding-init-method-std 0.05",
             "--init-method-xavier-uniform", "--init-method-xavier-uniform --embedding-init-method-std 0.05"]
    ((same, apart, xavier, mixed),) = run_ranks(_drawn, 1, flags)
    for name in same:
        is_embedding, is_residual = name.startswith("embedding."), name.endswith(("attention.output.weight",
                                                                                  "mlp.down.weight"))
        shrink = 6**0.5 if is_residual else 1.0     # sqrt(2 x 3 layers)
        assert float(same[name].std()) * shrink == pytest.approx(0.01, rel=0.05), name
        assert float(apart[name].std()) * shrink == pytest.approx(0.05 if is_embedding else 0.01, rel=0.05), name
        bound = (6 / sum(xavier[name].shape))**0.5
        assert bound * 0.99 < float(xavier[name].abs().max()) <= bound, name
        assert float(xavier[name].std()) == pytest.approx(bound / 3**0.5, rel=0.05), name
        if is_embedding:
            assert float(mixed[name].std()) == pytest.approx(0.05, rel=0.05), name
        else:
            assert torch.equal(mixed[name], xavier[name]), name
