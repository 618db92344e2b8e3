"""The proof itself: it passes right layouts, and fails wrong ones with the right name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_sp.config.load import load_run
from megatron_sp.config.schema import Run
from megatron_sp.model.build import build_model
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.pipeline import Stages, TiedWeights
from megatron_sp.parallel.ulysses import Core
from megatron_sp.proof.data import batch
from megatron_sp.proof.reference import random_weights, reference_training
from megatron_sp.proof.small.shrink import Small, shrink
from megatron_sp.proof.verify import verify
from tests.integration.programs import run_tool

FLAGS = ("--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --num-key-value-heads 4 --seq-length 4096 "
         "--global-batch-size 64 --train-iters 10 --lr 1e-4 --data-path nowhere --tokenizer-type HuggingFaceTokenizer "
         "--tokenizer-model nowhere --bf16 --swiglu --normalization RMSNorm --position-embedding-type rope")


def small(flags: str, world: int) -> Small:
    run, _ = load_run(f"{FLAGS} {flags}".split(), world, files=False)
    return shrink(run)


def small_run(flags: str, world: int) -> Run:
    return small(flags, world).run


@pytest.mark.parametrize(("world", "flags"), [
    (8, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --ulysses-size 2"),
    (8, "--ulysses-size 2 --ring-size 2 --zero-stage 3 --attention-dropout 0"),
    (8, "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --ulysses-size 2"),
    pytest.param(4, "--ulysses-size 2 --zero-stage 2 --sequence-chunk-size 512 --recompute-granularity selective",
                 marks=pytest.mark.slow),
    pytest.param(4, "--pipeline-model-parallel-size 2 --ulysses-size 2 --sequence-chunk-size 1024",
                 marks=pytest.mark.slow),
])
def test_right_layouts_pass(world: int, flags: str) -> None:
    proven = small(flags, world)
    verdict = verify(proven.run, half=proven.half)
    assert verdict.passed, (verdict.error, verdict.first_failure())
    assert [step.name for step in verdict.steps] == ["adam 1", "adam 2", "adam 3", "sgd 1", "sgd 2", "bfloat16 1",
                                                     "bfloat16 2"]
    assert all({"loss", "gradient norm", "learning rate"} <= step.numbers.keys() for step in verdict.steps)
    assert [step.name for step in verdict.steps if "evaluation loss" in step.numbers] == [
        "adam 3", "sgd 2", "bfloat16 2"]


def test_what_the_proof_needs_is_active() -> None:
    """Clipping acts in every step, the learning rate warms up and decays, and samples differ in their valid labels."""
    run = small_run("--ulysses-size 2", 2)
    data = [batch(run, "ragged", seed) for seed in range(3)]
    steps = reference_training(random_weights(run), run, data)
    rates = [step.learning_rate for step in steps]
    assert all(step.grad_norm > 2 * run.optimizer.clip_grad > 0 for step in steps)
    assert rates[0] < rates[2] < rates[1] == run.schedule.lr


def test_program_prints_a_verdict() -> None:
    done = run_tool("verify_layout.py", *FLAGS.split(), "--ulysses-size", 2, "--world-size", 64)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("bfloat16 is proven in float64", "data parallel 32 -> 2", "Ulysses 2, data 2",
                  "PASS in"):
        assert words in done.stdout
    done = run_tool("verify_layout.py", *FLAGS.split(), "--ulysses-size", 3, "--world-size", "x")
    assert done.returncode == 2 and "--world-size x" in done.stderr


class Forgotten(TiedWeights):
    """Tied weights whose gradients are never summed."""

    def sum_gradients(self) -> None:
        pass


def build_with_untied_gradients(run: Run, mesh: ParallelMesh, dtype: torch.dtype) -> nn.Module:
    model = build_model(run, mesh, dtype)
    if isinstance(model, Stages) and model.tied is not None:
        model.tied = Forgotten(model.tied.first, model.tied.last, model.tied.group)
    return model


def build_with_wrong_key_gradients(run: Run, mesh: ParallelMesh, dtype: torch.dtype) -> nn.Module:
    """Under Ulysses the first layer's keys get gradients that are 1% too large."""
    model = build_model(run, mesh, dtype)

    def with_larger_gradients(core: Core) -> Core:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
            k = k.clone()
            if k.requires_grad:
                k.register_hook(lambda gradient: gradient * 1.01)
            return core(q, k, v, **how)

        return attend

    if mesh.size("ulysses") > 1:
        attention: Any = model.layers["0"].attention  # type: ignore[index,operator,union-attr]
        attention.plan = replace(attention.plan, core=with_larger_gradients(attention.plan.core))
    return model


def build_with_averaged_gradients(run: Run, mesh: ParallelMesh, dtype: torch.dtype) -> nn.Module:
    """Gradients divided by the number of shards, as other frameworks do."""
    model = build_model(run, mesh, dtype)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(float(mesh.size("fsdp")))  # type: ignore[operator]
    return model


def test_a_missing_sum_of_tied_weights_is_named() -> None:
    run = small_run("--pipeline-model-parallel-size 2", 2)
    verdict = verify(run, build=build_with_untied_gradients, num_steps=1)
    assert not verdict.passed
    assert next(iter(verdict.first_failure()[1])) == "gradient of embedding.word.weight"
    assert verdict.healed_by == ["--pipeline-model-parallel-size 2"]


def test_a_wrong_exchange_is_named() -> None:
    run = small_run("--ulysses-size 2 --tensor-model-parallel-size 2", 4)
    verdict = verify(run, build=build_with_wrong_key_gradients, num_steps=1)
    assert not verdict.passed
    assert "layers.0.attention.key" in next(iter(verdict.first_failure()[1]))
    assert verdict.healed_by == ["--ulysses-size 2"]


def test_averaged_gradients_are_seen() -> None:
    verdict = verify(small_run("--zero-stage 2", 8), build=build_with_averaged_gradients, num_steps=1, diagnose=False)
    _, wrong = verdict.first_failure()
    assert wrong["gradient norm"] == pytest.approx(0.5)


def test_a_layout_that_does_not_run_fails_with_its_error() -> None:
    run = small_run("--ulysses-size 2", 2)
    broken = replace(run, model=replace(run.model, activation="unheard of"))
    verdict = verify(broken, num_steps=1, diagnose=False)
    assert not verdict.passed and "unheard of" in verdict.error
