"""The loss is a sum by log-sum-exp; masks and padding contribute nothing."""

import pytest
import torch
import torch.nn.functional as F

from megatron_sp.model.unfused_loss import vocab_parallel_loss_sum
from megatron_sp.parallel.tensor import TensorRegion

ONE_RANK = TensorRegion(mesh=None, group=None, size=1, rank=0, megatron_sp=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("masked", ["none", "some", "all"])
def test_equals_cross_entropy_without_padding(masked: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 12, dtype=torch.float64, generator=generator).requires_grad_()
    labels = torch.randint(0, 10, (2, 5), generator=generator)
    if masked == "some":
        labels[0, 1:4] = -100
    elif masked == "all":
        labels[:] = -100
    expected = F.cross_entropy(logits[..., :10].flatten(0, 1), labels.flatten(), reduction="sum")
    actual = vocab_parallel_loss_sum(logits, labels, ONE_RANK, vocab_size=10)
    torch.testing.assert_close(actual, expected)
    want, = torch.autograd.grad(expected / 7, logits)
    got, = torch.autograd.grad(actual / 7, logits)
    torch.testing.assert_close(got, want)
    assert torch.equal(got[..., 10:], torch.zeros_like(got[..., 10:]))


def test_confident_mistakes_stay_finite() -> None:
    logits = torch.tensor([[[200.0, -200.0]]], requires_grad=True)
    loss = vocab_parallel_loss_sum(logits, torch.tensor([[1]]), ONE_RANK, vocab_size=2)
    assert loss.item() == 400.0


def test_low_precision_logits_are_summed_in_fp32() -> None:
    logits = torch.randn(1, 3, 50, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    loss = vocab_parallel_loss_sum(logits, torch.tensor([[1, 2, 3]]), ONE_RANK, vocab_size=50)
    assert loss.dtype == torch.float32
    gradient, = torch.autograd.grad(loss, logits)
    assert gradient.dtype == torch.bfloat16
