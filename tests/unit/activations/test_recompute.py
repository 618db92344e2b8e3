"""Selective recomputation keeps what attention kernels of other packages return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_sp.activations.recompute import KEPT_OPERATORS, recompute
from megatron_sp.activations.results import ResultsOnHost


@pytest.mark.parametrize("package", ["flash_attn", "flash_attn_3"])
def test_a_packages_flash_attention_runs_once(package: str) -> None:
    """The operator has the name under which the package registers its own."""
    calls: list[int] = []

    @torch.library.custom_op(f"{package}::_flash_attn_forward", mutates_args=())
    def forward(q: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return q.exp()

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: torch.Tensor) -> torch.Tensor:
            o = forward(q)
            ctx.save_for_backward(o)
            return o

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad * ctx.saved_tensors[0]

    x = torch.ones(3, requires_grad=True)
    recompute(lambda x: Attention.apply(2 * x).square(), x, keep=KEPT_OPERATORS).sum().backward()
    assert len(calls) == 1
    expected = torch.ones(3, requires_grad=True)
    (2 * expected).exp().square().sum().backward()
    torch.testing.assert_close(x.grad, expected.grad)
    recompute(lambda x: Attention.apply(2 * x).square(), x).sum().backward()
    assert len(calls) == 3


def test_attention_whose_results_are_on_the_host_runs_once() -> None:
    """Two layers, of which backward fetches the results in the opposite order; two microbatches, one after another."""
    class Calls(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.number += function is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
            return function(*args, **(kwargs or {}))

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x * 2, x, x.sin(), is_causal=True).exp()

    def gradient(**how: Any) -> tuple[torch.Tensor, int]:
        x = torch.linspace(-1, 1, 2 * 4 * 8, dtype=torch.float64).view(1, 2, 4, 8).requires_grad_()
        with Calls() as calls:
            for _ in range(2):
                y = x
                for _ in range(2):
                    y = recompute(layer, y, **how)
                y.sum().backward()
        assert x.grad is not None
        return x.grad, calls.number

    on_host = ResultsOnHost()
    expected, twice = gradient()
    found, once = gradient(keep=KEPT_OPERATORS, on_host=on_host)
    assert (once, twice) == (4, 8)
    assert torch.equal(found, expected)
    latest = on_host._latest
    assert latest is not None and not latest._kept and latest._previous is None  # nothing stays
