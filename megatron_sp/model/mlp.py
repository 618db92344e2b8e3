"""Feed-forward layer: plain or gated, split over tp."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from megatron_sp.config.schema import Model
from megatron_sp.parallel.tensor import ColumnParallelLinear, RowParallelLinear, TensorRegion


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS = {"gelu": F.gelu, "openai_gelu": partial(F.gelu, approximate="tanh"), "squared_relu": squared_relu,
               "quick_gelu": quick_gelu, "swiglu": F.silu}


class MLP(nn.Module):
    """down(act(up(x))), or down(act(gate(x)) * up(x)) when gated (SwiGLU, Shazeer, arXiv 2002.05202)."""

    def __init__(self, model: Model, *, region: TensorRegion, dtype: torch.dtype):
        super().__init__()
        self.region = region
        self.activation = ACTIVATIONS[model.activation]
        width, wide, bias = model.hidden_size, model.ffn_hidden_size, model.add_bias_linear
        self.gate = (ColumnParallelLinear(width, wide, bias=bias, region=region, dtype=dtype)
                     if model.is_gated else None)
        self.up = ColumnParallelLinear(width, wide, bias=bias, region=region, dtype=dtype)
        self.down = RowParallelLinear(wide, width, bias=bias, region=region, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, t(/tp), h] -> [b, t(/tp), h]"""
        x = self.region.enter(x)  # [b, t(/tp), h] -> [b, t, h]
        inner = self.up(x)  # [b, t, h] -> [b, t, f/tp]
        inner = self.activation(inner) if self.gate is None else self.activation(self.gate(x)) * inner
        return self.down(inner)  # [b, t, f/tp] -> [b, t(/tp), h]
