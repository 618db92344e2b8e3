"""LayerNorm and RMSNorm on parameters stored as DTensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate

from megatron_sp.config.schema import Model
from megatron_sp.parallel.tensor import TensorRegion, local_weight


class Norm(nn.Module):
    """Normalise the last dimension; statistics in fp32 whatever the input type.

    Args:
        width: size of the last dimension.
        partial_grad: ranks of tp see different tokens or heads, so that gradients are summed over tp.
    """

    def __init__(self, width: int, model: Model, *, region: TensorRegion, dtype: torch.dtype, partial_grad: bool):
        super().__init__()
        self.width, self.epsilon = width, model.norm_epsilon
        self.around_one = model.apply_layernorm_1p
        self.partial_grad = partial_grad and region.size > 1
        self.weight = region.parameter((width,), Replicate(), dtype)
        self.bias = region.parameter((width,), Replicate(), dtype) if model.normalization == "LayerNorm" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] -> [..., width]"""
        weight = local_weight(self.weight, partial_grad=self.partial_grad)
        if self.around_one:
            weight = weight + 1
        if self.bias is None:
            return F.rms_norm(x, (self.width,), weight, self.epsilon)
        bias = local_weight(self.bias, partial_grad=self.partial_grad)
        return F.layer_norm(x, (self.width,), weight, bias, self.epsilon)
