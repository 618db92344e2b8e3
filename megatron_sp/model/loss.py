"""Output layer and cross-entropy in one function, tile by tile: the logits of one tile of tokens exist at a time.

For each tile the forward pass computes the logits, the losses and already both gradients:

    logits [t, v/tp] = x_tile @ weight.T
    losses [t]       = log-sum-exp(logits) - logit of the label
    g [t, v/tp]      = softmax(logits) - one-hot(label)
    dx [t, h]        = g @ weight
    dweight [v/tp, h] += g.T @ x_tile

The backward pass only multiplies dx and dweight with the gradient of the loss, which holds 1 / number of tokens and the
fp16 loss scale, in fp32. So no product is computed twice. The price is the memory of one gradient of the weight from
forward to backward.

Source: ALST (arXiv 2506.13996), section 3.3, for the tiles.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_sp.layout.tiles import loss_tile
from megatron_sp.parallel.collectives import all_reduce_max, all_reduce_sum
from megatron_sp.parallel.tensor import TensorRegion

#: Label of a token that has nothing to predict.
IGNORED_LABEL = -100
#: The largest sum of magnitudes that a product in fp16 may have; the type ends at 65504.
FP16_LIMIT_EXPONENT = 15


def losses_and_gradient(logits: torch.Tensor, labels: torch.Tensor, region: TensorRegion,
                        vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every token's loss and the gradient of their sum with respect to the logits.

    Everything is computed in at least fp32, and written over the logits where their type is that wide. Elements of the
    gradient are changed to the type of the logits as they are written, except to fp16, in which most would be 0.

    Args:
        logits: [t, v/tp]; columns at or beyond ``vocab_size`` are padding and get no probability.
        labels: int64 [t], -100 where there is nothing to predict.
    Returns:
        losses [t], at least fp32, 0 for tokens without a label and equal on all tp ranks; gradient [t, v/tp]
    """
    columns = logits.shape[-1]
    first = region.rank * columns
    real = min(max(vocab_size - first, 0), columns)  # this rank's columns that are not padding
    valid = labels != IGNORED_LABEL
    wide = torch.promote_types(logits.dtype, torch.float32)
    largest = logits[:, :real].amax(-1).to(wide) if real else logits.new_full(labels.shape, -torch.inf, dtype=wide)
    if region.size > 1:
        largest = all_reduce_max(largest, region.group)
    powers = torch.sub(logits, largest.unsqueeze(-1), out=logits if logits.dtype == wide else None)
    if real < columns:
        powers[:, real:] = -torch.inf
    local_label = (labels - first).clamp(0, columns - 1).unsqueeze(-1)
    label_is_here = valid & (labels >= first) & (labels < first + real)
    label_logit = torch.where(label_is_here, powers.gather(-1, local_label).squeeze(-1), 0.0)
    total = powers.exp_().sum(-1)
    if region.size > 1:
        total, label_logit = all_reduce_sum(torch.stack((total, label_logit)), region.group)
    factor = (valid / total).unsqueeze(-1)
    at_label = powers.gather(-1, local_label) * factor - label_is_here.unsqueeze(-1).to(wide)
    gradient = powers if logits.dtype in (wide, torch.float16) else logits
    torch.mul(powers, factor, out=gradient)
    gradient.scatter_(-1, local_label, at_label.to(gradient.dtype))
    return torch.where(valid, total.log() - label_logit, 0.0), gradient


def fp16_scale(sums: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return the powers of two that bring a gradient's rows or columns as high into the range of fp16 as is safe.

    A probability below 6e-8 is 0 in fp16, and with a vocabulary of 128K most probabilities are that small. Scaled by
    these powers, the magnitudes in a row add up to at most 2^15 / factor, so the product of the row with values up to
    ``factor`` cannot overflow, whatever the signs. Elements down to 2^-30 / factor of the row's sum keep the full
    precision of fp16. Multiplying and dividing by powers of two is exact.

    Args:
        sums: fp32, sums of the magnitudes in each row or column.
        factor: fp32 scalar, largest magnitude in the other matrix of the product.
    """
    _, exponent = torch.frexp(sums * factor.clamp(min=1.0))  # sums x factor < 2^exponent
    return torch.ldexp(torch.ones_like(sums), (FP16_LIMIT_EXPONENT - exponent).clamp(max=100))


def largest_magnitude(x: torch.Tensor) -> torch.Tensor:
    """Return an fp32 scalar, without a copy of x."""
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).float()


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add the product of two matrices in half precision to an fp32 matrix, which torch does on some GPUs only."""
    torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


def adds_products_in_fp32(device: torch.device) -> bool:
    """Return whether ``add_product`` works and is right on a device."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in ((32, 64), (64, 48)))
    total = torch.ones(32, 48, device=device)
    try:
        add_product(total, a, b)
    except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError; TypeError: a torch without the argument
        return False
    return torch.allclose(total, 1 + a.float() @ b.float(), rtol=1e-2, atol=1e-2)


class _Gradients:
    """The gradients of x and of the weight, filled tile by tile.

    Attributes:
        dx: [tokens, h], or None when x needs no gradient. In fp16 runs it is fp32, because the loss scale is not yet in
            it and small values would be 0 in fp16.
        dw: [v/tp, h], or None when the weight needs no gradient. At least fp32, because it is a sum over all tokens.
    """

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, needs_x: bool, needs_weight: bool,
                 products_in_fp32: bool):
        self.products_in_fp32 = products_in_fp32
        wide = torch.promote_types(x.dtype, torch.float32)
        self.weight, self.is_fp16 = weight, x.dtype == torch.float16
        self.dx = torch.empty_like(x, dtype=wide if self.is_fp16 else x.dtype) if needs_x else None
        self.dw = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        self.largest_weight = largest_magnitude(weight) if self.is_fp16 and needs_x else None

    def add(self, gradient: torch.Tensor, x_tile: torch.Tensor, rows: slice) -> None:
        """Add one tile's gradients.

        Args:
            gradient: [t, v/tp], gradient of the tile's logits.
            x_tile: [t, h]
            rows: the tile's place among all tokens.
        """
        if self.is_fp16:
            self._add_fp16(gradient, x_tile, rows)
            return
        if self.dx is not None:
            self.dx[rows] = gradient @ self.weight
        if self.dw is not None and self.dw.dtype == x_tile.dtype:
            self.dw.addmm_(gradient.t(), x_tile)
        elif self.dw is not None and self.products_in_fp32:
            add_product(self.dw, gradient.t(), x_tile)
        elif self.dw is not None:
            self.dw += gradient.t() @ x_tile

    def _add_fp16(self, gradient: torch.Tensor, x_tile: torch.Tensor, rows: slice) -> None:
        """Add one tile's gradients with products in fp16.

        Before a product each row (for dx) or column (for dw) of ``gradient`` is scaled into the range of fp16. After it
        the scale is divided out again in fp32.
        """
        scaled = torch.empty_like(gradient, dtype=torch.float16)
        if self.dx is not None and self.largest_weight is not None:
            scale = fp16_scale(torch.linalg.vector_norm(gradient, 1, dim=1, keepdim=True), self.largest_weight)
            torch.mul(gradient, scale, out=scaled)
            torch.div(scaled @ self.weight, scale, out=self.dx[rows])
        if self.dw is not None:
            scale = fp16_scale(torch.linalg.vector_norm(gradient, 1, dim=0), largest_magnitude(x_tile))
            torch.mul(gradient, scale, out=scaled)
            self.dw.addcmul_(scaled.t() @ x_tile, scale.reciprocal().unsqueeze(-1))


class _LinearCrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, region: TensorRegion,
                vocab_size: int, tile: int, products_in_fp32: bool) -> torch.Tensor:
        tokens, targets = x.flatten(0, -2), labels.flatten()
        loss = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        gradients = _Gradients(tokens, weight, needs_x, needs_weight, products_in_fp32)
        for first in range(0, len(tokens), tile):
            rows = slice(first, min(first + tile, len(tokens)))
            losses, gradient = losses_and_gradient(tokens[rows] @ weight.t(), targets[rows], region, vocab_size)
            loss += losses.sum()
            gradients.add(gradient, tokens[rows], rows)
            del gradient  # free it before the next tile's logits are computed
        # Attributes of ctx would live as long as the loss does; saved tensors are freed by backward.
        ctx.save_for_backward(gradients.dx, gradients.dw)
        ctx.shape, ctx.dtypes, ctx.scaled_by = x.shape, (x.dtype, weight.dtype), None
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        # ``data``: the saved tensors are overwritten here, because a scaled copy of dw would be as large as the
        # embedding. Pipeline schedules that split backward in two call this twice with the same gradient, once for
        # each result; the second call must not scale again.
        dx, dw = (None if y is None else y.data for y in ctx.saved_tensors)
        x_dtype, weight_dtype = ctx.dtypes
        factor = grad if ctx.scaled_by is None else grad / ctx.scaled_by
        ctx.scaled_by = grad
        dx = None if dx is None else dx.mul_(factor).to(x_dtype).view(ctx.shape)
        dw = None if dw is None else dw.mul_(factor).to(weight_dtype)
        return dx, dw, None, None, None, None, None


def linear_cross_entropy_sum(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, region: TensorRegion,
                             vocab_size: int, *, tile: int = 0, products_in_fp32: bool = False) -> torch.Tensor:
    """Return the sum of the cross-entropies of ``x @ weight.T``; both gradients are formed in the forward pass.

    Args:
        x: [b, t, h], equal on all tp ranks; its gradient is this rank's part of a sum over tp.
        weight: [v/tp, h]
        labels: int64 [b, t], -100 where there is nothing to predict; equal on all tp ranks.
        tile: tokens whose logits exist at once; 0 leaves the choice to ``layout.tiles``.
        products_in_fp32: whether ``adds_products_in_fp32`` on this device. Without it the weight's gradient of each
            tile is written, read again and added in a pass of its own.
    Returns:
        a scalar in at least fp32, equal on all tp ranks
    """
    tile = tile or loss_tile(len(weight), on_cpu=x.device.type == "cpu")
    return _LinearCrossEntropySum.apply(x, weight, labels, region, vocab_size, tile, products_in_fp32)


@torch.no_grad()
def linear_cross_entropies(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, region: TensorRegion,
                           vocab_size: int, *, tile: int = 0) -> torch.Tensor:
    """Return the cross-entropy of each token, [b, t] in at least fp32, without gradients; for evaluation.

    Args: see ``linear_cross_entropy_sum``.
    """
    tile = tile or loss_tile(len(weight), on_cpu=x.device.type == "cpu")
    tokens, targets = x.flatten(0, -2), labels.flatten()
    losses = [losses_and_gradient(part @ weight.t(), target, region, vocab_size)[0]
              for part, target in zip(tokens.split(tile), targets.split(tile))]
    return torch.cat(losses).view(labels.shape)
