"""Tiles of a token-wise function: same value, same gradients, one tile's activations at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron_sp.activations.tiling import tiled


def mlp(x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(F.gelu(F.linear(x, up, bias)), down)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("tile", [1, 4, 5, 12])
def test_equals_the_whole(tile: int, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 12, 4), (4, 16), (16, 4), (16,)]
    x, *weights = [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]
    if not with_bias:
        weights[2] = None  # type: ignore[call-overload]
    wanted = [x, *(w for w in weights if w is not None)]
    expected, actual = mlp(x, *weights), tiled(mlp, tile, x, *weights)
    torch.testing.assert_close(actual, expected)
    weight = torch.randn_like(expected)
    for ours, theirs in zip(torch.autograd.grad((actual * weight).sum(), wanted),
                            torch.autograd.grad((expected * weight).sum(), wanted), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_no_intermediate_outlives_its_tile() -> None:
    sizes: list[int] = []

    def pack(y: torch.Tensor) -> torch.Tensor:
        sizes.append(y.numel())
        return y

    x = torch.randn(1, 12, 4, requires_grad=True)
    up, down = torch.randn(64, 4, requires_grad=True), torch.randn(4, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
        tiled(mlp, 3, x, down, up, None)
    assert sorted(sizes) == sorted([x.numel(), up.numel(), down.numel()])


def test_a_skipped_value_still_goes_back() -> None:
    x = torch.randn(1, 6, 4, dtype=torch.float64, requires_grad=True)
    up, down = torch.randn(8, 4, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    skipped = tiled(mlp, 2, x, down, up, None, skip=True)
    assert not skipped.any()
    want, = torch.autograd.grad(mlp(x, down, up, None).sum(), x)
    got, = torch.autograd.grad(skipped.sum(), x)
    torch.testing.assert_close(got, want)
