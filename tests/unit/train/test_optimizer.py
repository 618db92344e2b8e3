"""Parameter groups, norms and clipping of one process (layouts: tests/distributed, tests/parity)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_sp.config.schema import Optimizer, Run, Schedule
from megatron_sp.errors import TrainingError
from megatron_sp.train.optimizer import (
    build_optimizer,
    clip_factor,
    clip_grad_norm,
    num_zeros,
    require_all_gradients,
    scale_gradients,
    squared_norm,
)


class OneProcess:
    """A mesh of one."""

    device = torch.device("cpu")

    def size(self, name: str) -> int:
        return 1

    def sum_over(self, value: torch.Tensor, *names: str) -> torch.Tensor:
        return value.clone()


MESH = cast(Any, OneProcess())


def model_with_gradients(*shapes: tuple[int, ...]) -> nn.Module:
    model = nn.Module()
    generator = torch.Generator().manual_seed(1)
    for number, shape in enumerate(shapes):
        parameter = nn.Parameter(torch.randn(shape, generator=generator))
        parameter.grad = torch.randn(shape, generator=generator)
        model.register_parameter(f"p{number}", parameter)
    return model


def test_decay_concerns_matrices_only() -> None:
    model = model_with_gradients((4, 3), (4,), (2, 2), (3,))
    for kind in ("adam", "sgd"):
        run = Run(optimizer=Optimizer(optimizer=kind, weight_decay=0.1), schedule=Schedule(lr=1e-3))
        groups = build_optimizer(run, model).param_groups
        assert [[tuple(p.shape) for p in group["params"]] for group in groups] == [[(4, 3), (2, 2)], [(4,), (3,)]]
        assert [(group["decay"], group["weight_decay"]) for group in groups] == [(True, 0.1), (False, 0.0)]


@pytest.mark.parametrize("shape", [(3,), (0,), (1 << 14,), (1000, 3001)])
def test_squared_norm_is_exact_for_any_size(shape: tuple[int, ...]) -> None:
    model = model_with_gradients(shape, (5, 7))
    exact = sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
    assert float(squared_norm(model, MESH)) == pytest.approx(exact, rel=1e-6)
    weights = sum(float(p.detach().double().square().sum()) for p in model.parameters())
    assert float(squared_norm(model, MESH, of_gradients=False)) == pytest.approx(weights, rel=1e-6)


def test_clipping_is_torchs() -> None:
    ours, theirs = model_with_gradients((4, 3), (5,)), model_with_gradients((4, 3), (5,))
    for clip in (100.0, 0.5):
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        assert float(clip_grad_norm(ours, clip, MESH)) == pytest.approx(float(norm), rel=1e-6)
        for left, right in zip(ours.parameters(), theirs.parameters()):
            torch.testing.assert_close(left.grad, right.grad)
    assert clip_factor(123.0, 0.0) == 1.0


def test_zeros_are_counted() -> None:
    model = model_with_gradients((4, 3), (5,))
    gradient = next(model.parameters()).grad
    assert gradient is not None
    gradient[0] = 0.0
    assert float(num_zeros(model, MESH)) == 3


def test_a_parameter_without_gradient_is_an_error() -> None:
    model = model_with_gradients((4, 3), (5,))
    list(model.parameters())[1].grad = None
    with pytest.raises(TrainingError, match="p1"):
        require_all_gradients(model)


def test_moments_are_those_of_torchs_adamw() -> None:
    model = model_with_gradients((4, 3), (5,))
    run = Run(optimizer=Optimizer(adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-6), schedule=Schedule(lr=1e-3))
    found = build_optimizer(run, model).defaults
    assert SimpleNamespace(**{key: found[key] for key in ("betas", "eps", "lr")}) == SimpleNamespace(
        betas=(0.8, 0.9), eps=1e-6, lr=1e-3)


class Operators(TorchDispatchMode):
    """Counts the operators that torch runs, without views."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_a_step_takes_a_handful_of_operators_whatever_the_number_of_tensors(kind: str) -> None:
    run = Run(optimizer=Optimizer(optimizer=kind, weight_decay=0.1), schedule=Schedule(lr=1e-3))
    counts = []
    for tensors in (20, 200):
        model = model_with_gradients(*[(4, 3), (5,)] * (tensors // 2))
        optimizer = build_optimizer(run, model)
        optimizer.step()  # creates the states
        with Operators() as operators:
            squared_norm(model, MESH)
            scale_gradients(model, 0.5)
            optimizer.step()
        counts.append(operators.count)
    assert counts[0] == counts[1] <= 20, counts


@pytest.mark.parametrize(("kind", "flags", "theirs"), [
    ("adam", dict(adam_beta2=0.9), lambda groups: torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.9))),
    ("sgd", {}, lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9)),
    ("sgd", dict(sgd_momentum=0.0), lambda groups: torch.optim.SGD(groups, lr=0.1))])
def test_steps_are_those_of_torch(kind: str, flags: dict[str, float],
                                  theirs: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Three steps of decayed and other weights, in fp64; one weight has no gradient and stays as it is."""
    shapes = ((4, 3), (5,), (0,), (2, 2))
    models = [model_with_gradients(*shapes).double() for _ in range(2)]
    run = Run(optimizer=Optimizer(optimizer=kind, weight_decay=0.1, **flags), schedule=Schedule(lr=0.1))  # type: ignore[arg-type]
    ours = build_optimizer(run, models[0])
    matrices, vectors = ([p for p in models[1].parameters() if (p.ndim > 1) is many] for many in (True, False))
    reference = theirs([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}])
    list(models[0].parameters())[3].grad = list(models[1].parameters())[3].grad = None
    for step in range(3):
        for model in models:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.copy_(torch.linspace(-1, step, p.numel(), dtype=torch.float64).view(p.shape))
        ours.step()
        reference.step()
    for mine, expected in zip(*(model.parameters() for model in models)):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(list(models[0].parameters())[3], list(model_with_gradients(*shapes).double().parameters())[3])
