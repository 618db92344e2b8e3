"""Feed-forward layer: plain or gated, split over tp."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from megatron_sp.activations.tiling import tiled
from megatron_sp.config.schema import Model
from megatron_sp.parallel.tensor import ColumnParallelLinear, RowParallelLinear, TensorRegion, local_weight, products


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu, "openai_gelu": partial(F.gelu, approximate="tanh"), "squared_relu": squared_relu,
    "quick_gelu": quick_gelu, "swiglu": F.silu}


class MLP(nn.Module):
    """down(act(up(x))), or down(act(gate(x)) * up(x)) when gated (SwiGLU, Shazeer, arXiv 2002.05202).

    Args:
        tile: tokens whose activations of width f exist at once; 0 for all.
    """

    def __init__(self, model: Model, *, tile: int = 0, region: TensorRegion, dtype: torch.dtype):
        super().__init__()
        self.region, self.tile = region, tile
        self.activation = ACTIVATIONS[model.activation]
        width, wide, bias = model.hidden_size, model.ffn_hidden_size, model.add_bias_linear
        self.gate = (ColumnParallelLinear(width, wide, bias=bias, region=region, dtype=dtype)
                     if model.is_gated else None)
        self.up = ColumnParallelLinear(width, wide, bias=bias, region=region, dtype=dtype)
        self.down = RowParallelLinear(wide, width, bias=bias, region=region, dtype=dtype)

    def forward(self, x: torch.Tensor, skip_value: bool = False) -> torch.Tensor:
        """[b, t(/tp), h] -> [b, t(/tp), h]

        Args:
            skip_value: return zeros, because backward recomputes this layer only for its gradients and nobody reads the
                value. Only the tiled form makes use of it.
        """
        x = self.region.enter(x)  # [b, t(/tp), h] -> [b, t, h]
        gate = (None, None) if self.gate is None else self.gate.local()
        if 0 < self.tile < x.shape[1]:
            weights = (local_weight(self.down.weight), *self.up.local(), *gate)
            return self.down.finish(tiled(self.compute, self.tile, x, *weights, skip=skip_value))
        return self.down(self.inner(x, *self.up.local(), *gate))  # [b, t, h] -> [b, t, f/tp] -> [b, t(/tp), h]

    def inner(self, x: torch.Tensor, up: torch.Tensor, up_bias: torch.Tensor | None, gate: torch.Tensor | None,
              gate_bias: torch.Tensor | None) -> torch.Tensor:
        """Return what the last product takes: [b, t, h] -> [b, t, f/tp]"""
        if gate is None:
            return self.activation(F.linear(x, up, up_bias))
        raised, gated = products(x, (up, up_bias), (gate, gate_bias), joined=self.region.overlapped)
        return self.activation(gated) * raised

    def compute(self, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, up_bias: torch.Tensor | None,
                gate: torch.Tensor | None, gate_bias: torch.Tensor | None) -> torch.Tensor:
        """Return this tp rank's part of a tile's output, as a function of the weights: [b, t', h] -> [b, t', h]"""
        return F.linear(self.inner(x, up, up_bias, gate, gate_bias), down)
