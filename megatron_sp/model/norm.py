"""LayerNorm and RMSNorm on parameters stored as DTensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate

from megatron_sp.config.schema import Model
from megatron_sp.model.norm_kernels import NormKernels
from megatron_sp.parallel.tensor import TensorRegion, local_weight

#: Rows normalised at a time on a CPU, so that they stay in its cache from first to last use.
CPU_ROWS = 256


class _CPURMSNorm(torch.autograd.Function):
    """RMSNorm for CPUs, a few rows at a time.

    torch has no fused RMSNorm for CPUs. Its seven operators each read all rows from memory, which takes three times as
    long.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        y, scale = torch.empty_like(flat), flat.new_empty(len(flat), 1)
        for x_, y_, scale_ in zip(flat.split(CPU_ROWS), y.split(CPU_ROWS), scale.split(CPU_ROWS)):
            torch.linalg.vector_norm(x_, dim=-1, keepdim=True, out=scale_)
            scale_.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
            torch.mul(x_, scale_, out=y_).mul_(weight)
        ctx.save_for_backward(flat, weight, scale)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        flat, weight, scale = ctx.saved_tensors
        dx, dw = torch.empty_like(flat), torch.zeros_like(weight)
        rows = (x.split(CPU_ROWS) for x in (flat, grad.reshape(flat.shape), scale, dx))
        for x_, grad_, scale_, dx_ in zip(*rows):
            normed = x_ * scale_
            weighed = grad_ * normed
            dw += weighed.sum(0)
            mean = torch.mv(weighed, weight).div_(flat.shape[-1]).unsqueeze(-1)  # projection of the gradient on x
            torch.mul(grad_, weight, out=dx_).sub_(normed.mul_(mean)).mul_(scale_)
        return dx.view(grad.shape), dw, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + epsilon) * weight, the mean over the last dimension."""
    if x.device.type == "cpu" and x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64) \
            and not torch.compiler.is_compiling():
        return _CPURMSNorm.apply(x, weight, epsilon)
    return F.rms_norm(x, (x.shape[-1],), weight, epsilon)


class Norm(nn.Module):
    """LayerNorm or RMSNorm of the last dimension, with statistics in fp32 whatever the input type.

    Args:
        width: size of the last dimension.
        partial_grad: the tp ranks normalise different tokens or heads, so their gradients of the weight are summed.
        kernels: the functions to compute with.
    """

    def __init__(self, width: int, model: Model, *, region: TensorRegion, dtype: torch.dtype, partial_grad: bool,
                 kernels: NormKernels):
        super().__init__()
        self.width, self.epsilon = width, model.norm_epsilon
        self.around_one = model.apply_layernorm_1p
        self.partial_over_tp = ("weight", "bias") if partial_grad and region.size > 1 else ()
        self.kernels = kernels
        self.weight = region.parameter((width,), Replicate(), dtype)
        self.bias = region.parameter((width,), Replicate(), dtype) if model.normalization == "LayerNorm" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] -> [..., width]"""
        weight = local_weight(self.weight)
        if self.around_one:
            weight = weight + 1
        if self.bias is None:
            return (self.kernels.rms_norm or rms_norm)(x, weight, self.epsilon)
        bias = local_weight(self.bias)
        if self.kernels.layer_norm is not None:
            return self.kernels.layer_norm(x, weight, bias, self.epsilon)
        return F.layer_norm(x, (self.width,), weight, bias, self.epsilon)
