"""One training step on one process: what reaches the weights after clipping, loss scale and skipped updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from megatron_sp.config.schema import Optimizer, Precision, Run, Schedule, Train
from megatron_sp.layout.masks.attention_mask import CAUSAL
from megatron_sp.proof.traffic import Traffic
from megatron_sp.train.health.loss_scale import LossScaler
from megatron_sp.train.optimizer import build_optimizer
from megatron_sp.train.report.timers import Timers
from megatron_sp.train.schedule import Schedule as RateSchedule
from megatron_sp.train.train_step import StepNumbers, StepTotals, TrainStep

#: The gradient of the sum of the losses, of norm 5. With 10 valid tokens the gradient of their mean has norm 0.5.
SUMMED = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
START = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
LR = 0.25


class OneProcess:
    """A mesh of one process."""

    device = torch.device("cpu")

    def size(self, name: str) -> int:
        return 1

    def sum_over(self, value: Any, *names: str) -> torch.Tensor:
        return torch.as_tensor(value).clone()


class FixedGradient:
    """Stands in for an engine: every batch has the gradient ``SUMMED`` and a loss of 20, divided as asked."""

    def __init__(self, weight: nn.Parameter, factor: float):
        self.weight, self.factor = weight, factor

    def forward_backward(self, microbatches: Sequence[Any], denominator: torch.Tensor) -> torch.Tensor:
        self.weight.grad = (self.factor * SUMMED / denominator).to(self.weight.dtype)
        return 20.0 / denominator


def step_of(kind: str = "sgd", clip: float = 0.0, scale: float = 0.0, factor: float = 1.0) -> TrainStep:
    """A step of one weight at ``START``; a loss scale of 0 means fp32, of -1 a dynamic one."""
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(START.clone()))
    precision = Precision(fp16=bool(scale), loss_scale=max(scale, 0.0), initial_loss_scale=8.0, hysteresis=1)
    run = Run(optimizer=Optimizer(optimizer=kind, weight_decay=0.0, sgd_momentum=0.0, clip_grad=clip, adam_eps=1.0),
              schedule=Schedule(lr=LR, lr_decay_style="constant"), train=Train(train_iters=9, global_batch_size=1))
    return TrainStep(model, cast(Any, OneProcess()), cast(Any, FixedGradient(next(model.parameters()), factor)),
                     build_optimizer(run, model), RateSchedule.of(run), LossScaler(precision), Timers(),
                     clip_grad=run.optimizer.clip_grad)


def batch(num_valid: int = 10) -> list[Any]:
    return [SimpleNamespace(num_valid=num_valid, mask=CAUSAL, tokens=torch.zeros(1, 8))]


def weight_of(step: TrainStep) -> torch.Tensor:
    return next(step.model.parameters()).detach()


@pytest.mark.parametrize("clip, factor", [(0.0, 1.0), (1.0, 1.0), (0.25, 0.5), (0.125, 0.25)])
def test_sgd_moves_by_the_gradient_clipped_by_its_norm(clip: float, factor: float) -> None:
    """The norm is 0.5. Clipping by its square, 0.25, by mistake would give other factors for the limits used here."""
    step = step_of(clip=clip)
    totals = step.compute_gradients(batch())
    assert (totals.loss, totals.grad_norm, totals.num_valid) == (2.0, pytest.approx(0.5), 10)
    assert step.update(totals, 0) == LR
    torch.testing.assert_close(weight_of(step), START - LR * factor * SUMMED / 10, rtol=1e-5, atol=0)
    assert all(parameter.grad is None for parameter in step.model.parameters())


@pytest.mark.parametrize("scale", [1.0, 1024.0, -1.0])
@pytest.mark.parametrize("kind, clip", [("sgd", 0.0), ("sgd", 0.25), ("adam", 0.0), ("adam", 0.25)])
def test_the_loss_scale_does_not_reach_the_weights(kind: str, clip: float, scale: float) -> None:
    """Adam's epsilon is 1 here, so that a constant factor on the gradient would show."""
    scaled, plain = step_of(kind, clip, scale), step_of(kind, clip)
    for samples in range(3):
        totals = scaled.compute_gradients(batch())
        assert totals.loss_scale == abs(scale) * (8 if scale < 0 else 1)
        gradient = next(scaled.model.parameters()).grad
        assert gradient is not None
        torch.testing.assert_close(gradient, totals.loss_scale * SUMMED / 10)
        assert (totals.loss, totals.grad_norm) == (2.0, pytest.approx(0.5))
        scaled.update(totals, samples)
        plain.update(plain.compute_gradients(batch()), samples)
    assert not torch.equal(weight_of(plain), START)
    torch.testing.assert_close(weight_of(scaled), weight_of(plain), rtol=1e-6, atol=0)


def test_an_overflow_changes_no_weight_and_halves_the_scale() -> None:
    step = step_of(scale=-1.0, factor=math.inf)
    totals = step.compute_gradients(batch())
    assert totals.loss == 2.0 and not totals.is_finite and not totals.allows_update
    step.update(totals, 0)
    assert torch.equal(weight_of(step), START) and step.scaler.scale == 4.0


def test_a_batch_without_labels_has_no_loss_and_changes_nothing() -> None:
    """A step with a zero gradient would still decay the weights and follow old momentum."""
    step = step_of("adam", scale=-1.0, factor=0.0)
    totals = step.compute_gradients(batch(num_valid=0))
    assert math.isnan(totals.loss) and totals.is_finite and not totals.allows_update
    step.update(totals, 0)
    assert torch.equal(weight_of(step), START) and not step.optimizer.state
    assert (step.scaler.scale, step.scaler.quiet_steps) == (8.0, 0)


def test_votes_are_taken_after_backward_and_summed_in_the_same_reduction() -> None:
    step, weight = step_of(), None

    def votes() -> tuple[float, float]:
        nonlocal weight
        weight = next(step.model.parameters()).grad
        return 1.0, 0.0

    assert step.compute_gradients(batch(), votes).votes == (1.0, 0.0)
    assert weight is not None


# ---------------------------------------------------------------- a step as a whole

def states_of(step: TrainStep) -> dict[str, torch.Tensor]:
    return {name: value.clone() for state in step.optimizer.state.values() for name, value in state.items()}


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("clip", [0.0, 0.25, 9.0])
@pytest.mark.parametrize("scale, dtype, rtol", [(0.0, torch.float32, 1e-6), (-1.0, torch.float32, 1e-6),
                                                (0.0, torch.float64, 1e-14)])
def test_a_whole_step_does_what_its_halves_do(kind: str, clip: float, scale: float, dtype: torch.dtype,
                                              rtol: float) -> None:
    """In fp32 the gradients are divided instead of multiplied by the reciprocal, which rounds differently."""
    whole, halves = step_of(kind, clip, scale), step_of(kind, clip, scale)
    for step in (whole, halves):
        step.model.to(dtype)
    for samples in range(3):
        totals = halves.compute_gradients(batch())
        assert whole.train(batch(), samples) == (totals, halves.update(totals, samples))
    assert not torch.equal(weight_of(whole), START.to(dtype))
    torch.testing.assert_close(weight_of(whole), weight_of(halves), rtol=rtol, atol=0)
    torch.testing.assert_close(states_of(whole), states_of(halves), rtol=rtol, atol=0)
    assert whole.scaler.state_dict() == halves.scaler.state_dict()
    assert next(whole.model.parameters()).grad is None


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("factor, num_valid, new_scale", [(math.inf, 10, 4.0), (math.nan, 10, 4.0), (0.0, 0, 8.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_device_skips_what_the_host_would_skip(kind: str, factor: float, num_valid: int, new_scale: float,
                                                   dtype: torch.dtype) -> None:
    """Weights, momenta and step counts stay as an ordinary step left them. Gradients can be looked at and described."""
    step, seen = step_of(kind, clip=1.0, scale=-1.0), []
    step.model.to(dtype)
    step.train(batch(), 0)
    weight, states = weight_of(step).clone(), states_of(step)
    cast(Any, step.engine).factor = factor

    def look(totals: StepTotals) -> None:
        gradient = next(step.model.parameters()).grad
        assert gradient is not None
        seen.append((totals.allows_update, bool(gradient.isfinite().all())))

    step.train(batch(num_valid), 1, look=look)
    assert seen == [(False, factor == 0.0)]
    assert torch.equal(weight_of(step), weight) and step.scaler.scale == new_scale
    torch.testing.assert_close(states_of(step), states, rtol=0, atol=0)


def test_the_weights_are_updated_before_the_host_reads_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    step, weights, read = step_of("adam"), [], StepNumbers.read

    def note_and_read(numbers: StepNumbers) -> StepTotals:
        weights.append(weight_of(step).clone())
        return read(numbers)

    monkeypatch.setattr(StepNumbers, "read", note_and_read)
    with Traffic() as traffic:
        step.train(batch(), 0)
    assert len(weights) == 1 and not torch.equal(weights[0], START) and torch.equal(weights[0], weight_of(step))
    assert not traffic.host_reads
