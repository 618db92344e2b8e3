"""Output layer and loss in tiles: right for any tile, any scaling, any mask; logits never whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron_sp.model import loss as linear_loss
from megatron_sp.model.loss import linear_loss_sum
from megatron_sp.parallel.tensor import TensorRegion

ONE_RANK = TensorRegion(mesh=None, group=None, size=1, rank=0, megatron_sp=False)  # type: ignore[arg-type]


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 9, 8, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(12, 8, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, 10, (2, 9), generator=generator)
    labels[0, 2:7] = -100
    return x, weight, labels


@pytest.mark.parametrize("scale", [1.0, 1 / 13, 4096.0])
@pytest.mark.parametrize("tile", [1, 4, 7, 18, 100])
def test_equals_the_untiled_loss(tile: int, scale: float) -> None:
    x, weight, labels = inputs()
    expected = F.cross_entropy((x @ weight.t())[..., :10].flatten(0, 1), labels.flatten(), reduction="sum")
    actual = linear_loss_sum(x, weight, labels, ONE_RANK, 10, tile=tile)
    torch.testing.assert_close(actual, expected)
    want = torch.autograd.grad(expected * scale, (x, weight))
    got = torch.autograd.grad(actual * scale, (x, weight))
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not got[1][10:].any()


def test_all_masked_is_zero_with_zero_gradients() -> None:
    x, weight, labels = inputs()
    loss = linear_loss_sum(x, weight, torch.full_like(labels, -100), ONE_RANK, 10, tile=4)
    dx, dw = torch.autograd.grad(loss, (x, weight))
    assert loss.item() == 0 and not dx.any() and not dw.any()


def test_z_loss_adds_the_squared_log_sum_exp() -> None:
    x, weight, labels = inputs()
    logits = (x @ weight.t())[..., :10]
    valid = labels != -100
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected = expected + 0.1 * logits.logsumexp(-1).square()[valid].sum()
    actual = linear_loss_sum(x, weight, labels, ONE_RANK, 10, tile=4, z_loss=0.1)
    torch.testing.assert_close(actual, expected)
    for ours, theirs in zip(torch.autograd.grad(actual, (x, weight)), torch.autograd.grad(expected, (x, weight))):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_fp32(dtype: torch.dtype) -> None:
    x, weight, labels = inputs(dtype)
    loss = linear_loss_sum(x, weight, labels, ONE_RANK, 10, tile=4)
    wide = tuple(y.detach().float().requires_grad_() for y in (x, weight))
    expected = linear_loss_sum(wide[0], wide[1], labels, ONE_RANK, 10, tile=4)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=0.02, atol=0)
    for ours, theirs in zip(torch.autograd.grad(loss / 10, (x, weight)), torch.autograd.grad(expected / 10, wide)):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.float(), theirs, rtol=0.05, atol=0.02)


def test_logits_never_exist_beyond_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, original = [], linear_loss.loss_and_gradient

    def watch(logits: torch.Tensor, *args: object) -> object:
        seen.append(tuple(logits.shape))
        return original(logits, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(linear_loss, "loss_and_gradient", watch)
    x, weight, labels = inputs()
    linear_loss_sum(x, weight, labels, ONE_RANK, 10, tile=5).backward()
    assert seen == [(5, 12)] * 3 + [(3, 12)]
