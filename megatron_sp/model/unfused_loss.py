"""Cross-entropy over a vocabulary that is split over tp, by log-sum-exp.

The result is the *sum* over valid tokens; the caller divides once by the number of valid tokens
of the whole global batch. Nothing here averages, so sequence shards, data-parallel ranks,
accumulation and masks cannot change a gradient. A shard without valid tokens gives 0.

Probabilities are never stored: forward keeps the logits (which exist anyway) and one log-sum-exp
per token, backward forms ``probabilities - one-hot`` where the gradient is written. Both go through
the tokens in pieces, so that on a CPU a piece stays in the cache from its first use to its last, and
no fp32 copy of half-precision logits is larger than a piece.

Training takes ``linear_loss``, which never forms whole logits; this form is what benchmarks and tests compare
it with.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron_sp.parallel.collectives import all_reduce_max, all_reduce_sum
from megatron_sp.parallel.tensor import TensorRegion

IGNORED = -100
#: Elements in one piece: a part of a core's cache; on a GPU large enough to keep it busy.
CPU_PIECE, GPU_PIECE = 1 << 19, 1 << 28


def _pieces(logits: torch.Tensor, *others: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Runs of rows of tensors with equal first dimensions."""
    size = CPU_PIECE if logits.device.type == "cpu" else GPU_PIECE
    rows = max(1, size // max(1, logits.shape[-1]))
    return zip(*(x.split(rows) for x in (logits, *others)))


class _VocabParallelLossSum(torch.autograd.Function):
    """Sum of ``log-sum-exp - logit of the label``; backward is (probabilities - one-hot) of the valid tokens."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, region: TensorRegion,
                vocab_size: int) -> torch.Tensor:
        columns = logits.shape[-1]
        first = region.rank * columns
        real = min(max(vocab_size - first, 0), columns)  # the rest of the columns is padding
        wide = torch.promote_types(logits.dtype, torch.float32)
        flat, labels = logits.reshape(-1, columns), labels.reshape(-1)
        valid = labels != IGNORED
        local = (labels - first).clamp(0, columns - 1)
        mine = valid & (labels >= first) & (labels < first + real)
        label_logit = torch.where(mine, flat.gather(-1, local.unsqueeze(-1)).squeeze(-1).to(wide), 0.0)
        lse = flat.new_full(labels.shape, -torch.inf, dtype=wide)
        if real:
            for piece, out in _pieces(flat, lse):
                torch.logsumexp(piece[:, :real].to(wide), -1, out=out)
        if region.size > 1:
            top = all_reduce_max(lse, region.group)
            total, label_logit = all_reduce_sum(torch.stack(((lse - top).exp(), label_logit)), region.group)
            lse = top + total.log()
        ctx.save_for_backward(flat, lse, local, mine, valid)
        ctx.real, ctx.shape = real, logits.shape
        return torch.where(valid, lse - label_logit, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        flat, lse, local, mine, valid = ctx.saved_tensors
        d_logits = torch.empty_like(flat)
        d_logits[:, ctx.real:] = 0.0
        weight = (valid * grad).to(lse.dtype)
        one_hot = (mine * weight).neg()
        for piece, out, shift, factor, column, minus in _pieces(flat, d_logits, lse, weight, local, one_hot):
            piece, out = piece[:, :ctx.real], out[:, :ctx.real]
            p = out if out.dtype == shift.dtype else torch.empty_like(piece, dtype=shift.dtype)
            torch.sub(piece, shift.unsqueeze(-1), out=p).exp_().mul_(factor.unsqueeze(-1))
            if ctx.real:
                p.scatter_add_(-1, column.clamp(max=ctx.real - 1).unsqueeze(-1), minus.unsqueeze(-1))
            if p is not out:
                out.copy_(p)
        return d_logits.view(ctx.shape), None, None, None


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
