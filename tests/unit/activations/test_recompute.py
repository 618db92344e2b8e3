"""Selective recomputation keeps what attention kernels of other packages return."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_sp.activations.recompute import KEPT_OPERATORS, recompute


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
