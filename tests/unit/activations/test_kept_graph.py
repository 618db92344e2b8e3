"""A graph that is kept without its inputs gives the gradients of the function, and is freed."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.nn.functional as F

from megatron_sp.activations.kept_graph import keep_graph
from megatron_sp.activations.recompute import recompute
from megatron_sp.activations.results import KeptResults
from tests.helpers.storage import StorageTracker


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    o = F.scaled_dot_product_attention(q, k[..., :4], v.transpose(1, 2).exp(), is_causal=True)
    return o.transpose(1, 2).sin()


def at_once(build: Any) -> Any:
    return build()


def test_views_of_one_tensor() -> None:
    x = torch.linspace(-1, 1, 2 * 3 * 7 * 12, dtype=torch.float64).view(2, 3, 7, 12).requires_grad_()

    def parts() -> tuple[torch.Tensor, ...]:
        q, k, v = x.split((4, 4, 4), dim=-1)  # one storage
        return q, k, v.transpose(1, 2)

    (expected,) = torch.autograd.grad(attend(*parts()).square().sum(), x)
    (found,) = torch.autograd.grad(keep_graph(attend, at_once, *parts()).square().sum(), x)
    assert torch.equal(found, expected) and float(found.abs().max()) > 0


def test_the_second_run_may_lay_its_tensors_out_differently() -> None:
    x, results = torch.linspace(-1, 1, 3 * 7 * 12, dtype=torch.float64).view(1, 3, 7, 12), KeptResults()
    runs: list[int] = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x * 2).split((4, 4, 4), dim=-1)
        if runs:
            q, k, v = (part.contiguous() for part in (q, k, v))
        runs.append(1)
        return keep_graph(attend, results.once, q, k, v.transpose(1, 2)).square()

    expected, found = x.clone().requires_grad_(), x.clone().requires_grad_()
    layer(expected).sum().backward()
    runs.clear()
    recompute(layer, found, keep=("of no operator",), results=results).sum().backward()
    assert len(runs) == 2 and expected.grad is not None and found.grad is not None
    assert torch.equal(found.grad, expected.grad)


def test_a_graph_without_a_backward_is_freed_at_once() -> None:
    x = torch.ones(2, 3, 7, 4, requires_grad=True)
    gc.disable()
    try:
        with StorageTracker() as tracker:
            y = keep_graph(attend, at_once, x * 2, x * 3, (x * 4).transpose(1, 2))
            assert tracker.live > y.nbytes
            del y
            assert tracker.live == 0
    finally:
        gc.enable()
