"""Output layer and loss in one, tile by tile: logits never exist beyond a tile.

The gradients are formed in forward, unscaled, while a tile's logits are there; backward multiplies
*both* by whatever the loss was scaled with. So no product is computed twice, any scaling is right,
and a tile stays in the cache of a CPU from its first use to its last. Costs the memory of one
gradient of the weight during the step.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_sp.model.unfused_loss import IGNORED
from megatron_sp.parallel.collectives import all_reduce_max, all_reduce_sum
from megatron_sp.parallel.tensor import TensorRegion

#: Logits of an automatic tile: a part of a core's cache; on a GPU large enough to keep it busy.
CPU_TILE, GPU_TILE = 1 << 21, 1 << 27


def loss_and_gradient(logits: torch.Tensor, labels: torch.Tensor, region: TensorRegion, vocab_size: int,
                      z_loss: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of losses and its gradient with respect to the logits, in the logits' memory where it can be.

    Args:
        logits: [t, v/tp]; columns at or beyond ``vocab_size`` are padding and get no probability
        labels: int64 [t], -100 where there is nothing to predict
        z_loss: weight of the squared log-sum-exp that is added per valid token
    Returns:
        a scalar and [t, v/tp], both at least fp32
    """
    columns = logits.shape[-1]
    first = region.rank * columns
    real = min(max(vocab_size - first, 0), columns)  # the rest of the columns is padding
    valid = labels != IGNORED
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    top = wide[:, :real].amax(-1) if real else wide.new_full(labels.shape, -torch.inf)
    if region.size > 1:
        top = all_reduce_max(top, region.group)
    gradient = wide.sub_(top.unsqueeze(-1))
    if real < columns:
        gradient[:, real:] = -torch.inf
    local = (labels - first).clamp(0, columns - 1).unsqueeze(-1)
    mine = valid & (labels >= first) & (labels < first + real)
    label_logit = torch.where(mine, gradient.gather(-1, local).squeeze(-1), 0.0)
    total = gradient.exp_().sum(-1)
    if region.size > 1:
        total, label_logit = all_reduce_sum(torch.stack((total, label_logit)), region.group)
    lse = total.log()
    loss, scale = lse - label_logit, total.reciprocal()
    if z_loss:
        whole = lse + top
        loss = loss + z_loss * whole.square()
        scale = scale * (1 + 2 * z_loss * whole)
    gradient.mul_((scale * valid).unsqueeze(-1))
    gradient.scatter_add_(-1, local, mine.to(gradient.dtype).neg().unsqueeze(-1))
    return torch.where(valid, loss, 0.0).sum(), gradient


class _LinearLossSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, region: TensorRegion,
                vocab_size: int, tile: int, z_loss: float) -> torch.Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        wide = torch.promote_types(x.dtype, torch.float32)
        tokens, targets = x.flatten(0, -2), labels.flatten()
        loss = torch.zeros((), dtype=wide, device=x.device)
        kept = wide if x.dtype == torch.float16 else x.dtype  # fp16 would lose small unscaled gradients
        dx = torch.empty_like(tokens, dtype=kept) if needs_x else None
        dw = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        for first in range(0, len(tokens), tile):
            rows = slice(first, min(first + tile, len(tokens)))
            x_tile = tokens[rows]
            part, gradient = loss_and_gradient(x_tile @ weight.t(), targets[rows], region, vocab_size, z_loss)
            loss += part
            gradient = gradient.to(x.dtype)
            if dx is not None:
                dx[rows] = gradient @ weight
            if dw is not None and dw.dtype == x.dtype:
                dw.addmm_(gradient.t(), x_tile)
            elif dw is not None:
                dw += gradient.t() @ x_tile
            del gradient  # before the next tile's logits exist
        ctx.save_for_backward(dx, dw)  # and no attributes, which would live until the loss does
        ctx.shape, ctx.dtypes, ctx.scaled_by = x.shape, (x.dtype, weight.dtype), None
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        dx, dw = (None if y is None else y.data for y in ctx.saved_tensors)  # data: backward writes into them
        x_dtype, weight_dtype = ctx.dtypes
        # In place: a copy would be as large as the embedding. Schedules that split backward in two come here twice
        # with the same gradient, once for each of the results; the second time there is nothing left to scale.
        factor = grad if ctx.scaled_by is None else grad / ctx.scaled_by
        ctx.scaled_by = grad
        dx = None if dx is None else dx.mul_(factor).to(x_dtype).view(ctx.shape)
        dw = None if dw is None else dw.mul_(factor).to(weight_dtype)
        return dx, dw, None, None, None, None, None


def automatic_tile(columns: int, device: torch.device) -> int:
    """Tokens per tile for this many columns of logits."""
    return max(128, (CPU_TILE if device.type == "cpu" else GPU_TILE) // columns)


def linear_loss_sum(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, region: TensorRegion,
                    vocab_size: int, *, tile: int = 0, z_loss: float = 0.0) -> torch.Tensor:
    """``vocab_parallel_loss_sum(x @ weight.T, labels)`` without the logits.

    Args:
        x: [b, t, h], equal on all tp ranks; the gradient is this rank's part of a sum over tp
        weight: [v/tp, h]
        labels: int64 [b, t], -100 where there is nothing to predict; equal on all tp ranks
        tile: tokens whose logits exist at once; 0: ``automatic_tile``
        z_loss: weight of the squared log-sum-exp that is added per valid token
    Returns:
        a scalar in at least fp32, equal on all tp ranks
    """
    tile = tile or automatic_tile(len(weight), x.device)
    return _LinearLossSum.apply(x, weight, labels, region, vocab_size, tile, z_loss)
