"""Cross-entropy over a vocabulary that is split over tp, by log-sum-exp.

The result is the *sum* over valid tokens; the caller divides once by the number of valid tokens
of the whole global batch. Nothing here averages, so sequence shards, data-parallel ranks,
accumulation and masks cannot change a gradient. A shard without valid tokens gives 0.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_sp.parallel.collectives import all_reduce_max, all_reduce_sum
from megatron_sp.parallel.tensor import TensorRegion

IGNORED = -100


class _VocabParallelLossSum(torch.autograd.Function):
    """Forward keeps the probabilities; backward is (probabilities - one-hot) of the valid tokens."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, region: TensorRegion,
                vocab_size: int) -> torch.Tensor:
        columns = logits.shape[-1]
        first = region.rank * columns
        real = min(max(vocab_size - first, 0), columns)  # the rest of the columns is padding
        valid = labels != IGNORED
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        top = wide[..., :real].amax(-1) if real else wide.new_full(labels.shape, -torch.inf)
        if region.size > 1:
            top = all_reduce_max(top, region.group)
        shifted = wide - top.unsqueeze(-1)
        shifted[..., real:] = -torch.inf
        local = (labels - first).clamp(0, columns - 1)
        mine = valid & (labels >= first) & (labels < first + real)
        label_logit = torch.where(mine, shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1), 0.0)
        probabilities = shifted.exp_()
        total = probabilities.sum(-1)
        if region.size > 1:
            total, label_logit = all_reduce_sum(torch.stack((total, label_logit)), region.group)
        probabilities.div_(total.unsqueeze(-1))
        ctx.save_for_backward(probabilities, local, mine, valid)
        ctx.dtype = logits.dtype
        return torch.where(valid, total.log() - label_logit, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        probabilities, local, mine, valid = ctx.saved_tensors
        minus_one = mine.to(probabilities.dtype).neg().unsqueeze(-1)
        d_logits = probabilities.scatter_add(-1, local.unsqueeze(-1), minus_one)
        d_logits.mul_((valid * grad).unsqueeze(-1))
        return d_logits.to(ctx.dtype), None, None, None


def vocab_parallel_loss_sum(logits: torch.Tensor, labels: torch.Tensor, region: TensorRegion,
                            vocab_size: int) -> torch.Tensor:
    """Sum of the negative log-likelihoods of the valid labels.

    Args:
        logits: [b, t, v/tp]; columns at or beyond ``vocab_size`` are padding and get no probability
        labels: int64 [b, t], -100 where there is nothing to predict; equal on all tp ranks
    Returns:
        a scalar in at least fp32, equal on all tp ranks
    """
    return _VocabParallelLossSum.apply(logits, labels, region, vocab_size)
