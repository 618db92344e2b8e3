"""The tiled output layer and loss: equal to torch's cross-entropy for any tile, scale and mask, one tile at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron_sp.model import loss as loss_module
from megatron_sp.model.loss import linear_cross_entropies, linear_cross_entropy_sum
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
    actual = linear_cross_entropy_sum(x, weight, labels, ONE_RANK, 10, tile=tile)
    torch.testing.assert_close(actual, expected)
    want = torch.autograd.grad(expected * scale, (x, weight))
    got = torch.autograd.grad(actual * scale, (x, weight))
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not got[1][10:].any()


def test_all_masked_is_zero_with_zero_gradients() -> None:
    x, weight, labels = inputs()
    loss = linear_cross_entropy_sum(x, weight, torch.full_like(labels, -100), ONE_RANK, 10, tile=4)
    dx, dw = torch.autograd.grad(loss, (x, weight))
    assert loss.item() == 0 and not dx.any() and not dw.any()


def test_unreduced_losses_are_those_of_each_token() -> None:
    x, weight, labels = inputs()
    expected = F.cross_entropy((x @ weight.t())[..., :10].flatten(0, 1), labels.flatten(), reduction="none")
    actual = linear_cross_entropies(x, weight, labels, ONE_RANK, 10, tile=4)
    torch.testing.assert_close(actual, expected.view(labels.shape).detach())


def test_confident_mistakes_stay_finite() -> None:
    x, weight = torch.ones(1, 1, 1, requires_grad=True), torch.tensor([[200.0], [-200.0]], requires_grad=True)
    loss = linear_cross_entropy_sum(x, weight, torch.tensor([[1]]), ONE_RANK, 2)
    assert loss.item() == 400.0


def confident(vocab: int, width: int = 16, tokens: int = 48) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp16 x and weight whose softmax is peaked: most of the probabilities are below the smallest number of fp16."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocab, width, generator=generator).mul_(1.5)
    labels = torch.randint(0, vocab, (1, tokens), generator=generator)
    x = weight[labels] * 0.7 + torch.randn(1, tokens, width, generator=generator)
    return x.half(), weight.half(), labels


@pytest.mark.parametrize("magnitude", [1.0, 100.0])
def test_fp16_keeps_the_gradients_of_improbable_words(magnitude: float) -> None:
    """With a vocabulary of 128K, each word's row of dW equals the fp32 result to the precision of fp16, however small.

    No product overflows in fp16 either, when x is large and all tokens have the same label.
    """
    vocab = 131072
    x, weight, labels = confident(vocab)
    x, weight = x * magnitude, weight / magnitude
    if magnitude > 1:
        labels = torch.full_like(labels, 7)
    gradient = (x @ weight.t()).float().softmax(-1).squeeze(0)  # of the same logits, then everything in fp32
    assert float((gradient < 6e-8).float().mean()) > 0.8
    gradient[torch.arange(48), labels[0]] -= 1.0
    loss = linear_cross_entropy_sum(x.requires_grad_(), weight.requires_grad_(), labels, ONE_RANK, vocab, tile=20)
    dx, dw = loss.grad_fn.saved_tensors  # type: ignore[union-attr]  # in fp32, before the loss scale
    for found, wanted in ((dx, gradient @ weight.detach().float()), (dw, gradient.t() @ x.detach().float().squeeze(0))):
        assert found.dtype == torch.float32
        error = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        assert float(error.max()) < 2**-10, float(error.max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_fp32(dtype: torch.dtype) -> None:
    x, weight, labels = inputs(dtype)
    loss = linear_cross_entropy_sum(x, weight, labels, ONE_RANK, 10, tile=4)
    wide = tuple(y.detach().float().requires_grad_() for y in (x, weight))
    expected = linear_cross_entropy_sum(wide[0], wide[1], labels, ONE_RANK, 10, tile=4)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=0.02, atol=0)
    for ours, theirs in zip(torch.autograd.grad(loss / 10, (x, weight)), torch.autograd.grad(expected / 10, wide)):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.float(), theirs, rtol=0.05, atol=0.02)


def test_logits_never_exist_beyond_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, original = [], loss_module.losses_and_gradient

    def watch(logits: torch.Tensor, *args: object) -> object:
        seen.append(tuple(logits.shape))
        return original(logits, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(loss_module, "losses_and_gradient", watch)
    x, weight, labels = inputs()
    linear_cross_entropy_sum(x, weight, labels, ONE_RANK, 10, tile=5).backward()
    assert seen == [(5, 12)] * 3 + [(3, 12)]


def test_the_weights_gradient_is_summed_by_products_that_return_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU torch has no such product, so one that widens its factors stands for it."""
    assert not loss_module.adds_products_in_fp32(torch.device("cpu"))
    monkeypatch.setattr(loss_module, "add_product", lambda total, a, b: total.addmm_(a.float(), b.float()))
    assert loss_module.adds_products_in_fp32(torch.device("cpu"))
    gradients = []
    for products_in_fp32 in (False, True):
        x, weight, labels = inputs(torch.bfloat16)
        loss = linear_cross_entropy_sum(x, weight, labels, ONE_RANK, 10, tile=4, products_in_fp32=products_in_fp32)
        gradients.append(torch.autograd.grad(loss, (x, weight)))
    assert torch.equal(gradients[0][0], gradients[1][0])
    torch.testing.assert_close(gradients[0][1].float(), gradients[1][1].float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("tile", [20, 48])
def test_fp16_gradients_hold_the_loss_scale_before_they_become_fp16(tile: int) -> None:
    """With a vocabulary of 128,256, most gradients of a word are 0 in fp16 without the loss scale, and few with it."""
    vocab, scale = 128256, 2.0**16 / 48  # the loss scale over the number of tokens
    x, weight, labels = confident(vocab)
    gradient = (x @ weight.t()).float().softmax(-1).squeeze(0)  # of the same logits, then everything in fp32
    gradient[torch.arange(48), labels[0]] -= 1.0
    wanted = {"x": gradient @ weight.float(), "weight": gradient.t() @ x.float().squeeze(0)}
    loss = linear_cross_entropy_sum(x.requires_grad_(), weight.requires_grad_(), labels, ONE_RANK, vocab, tile=tile)
    (loss * scale).backward()
    assert x.grad is not None and weight.grad is not None

    def errors(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
        return (found - exact).norm(dim=-1) / exact.norm(dim=-1)

    for name, found in (("x", x.grad.squeeze(0)), ("weight", weight.grad)):
        assert found.dtype == torch.float16
        exact = wanted[name] * scale
        seen = exact.norm(dim=-1) > 2**-12  # the smallest normal number of fp16 is 2^-14
        assert float(errors(found.float()[seen], exact[seen]).max()) < 2**-7
    lost = errors(wanted["weight"].half().float(), wanted["weight"]) > 0.5  # as if the scale came after the cast
    kept = errors(weight.grad.float(), wanted["weight"] * scale) < 0.5
    assert float(lost.float().mean()) > 0.5 and float(kept.float().mean()) > 0.9
