"""One transformer layer: pre-norm attention and feed-forward, each on a residual branch."""

from __future__ import annotations

import torch
from torch import nn

from megatron_sp.config.schema import Model
from megatron_sp.model.attention import Attention, AttentionPlan
from megatron_sp.model.cache import KeyValueCache
from megatron_sp.model.mlp import MLP
from megatron_sp.model.norm import Norm
from megatron_sp.model.rotary import Rotation
from megatron_sp.parallel.random import Dropout
from megatron_sp.parallel.recompute import recompute
from megatron_sp.parallel.tensor import TensorRegion


class Block(nn.Module):
    """x + drop(attention(norm(x))), then x + drop(mlp(norm(x))).

    Args:
        layer: its global number, from 0.
        first_token: number of this rank's first token outside tensor-parallel regions, among all shards.
        recompute_in_backward: keep only the layer's input for backward.
    """

    def __init__(self, model: Model, layer: int, plan: AttentionPlan, *, seed: int, first_token: int,
                 recompute_in_backward: bool, region: TensorRegion, dtype: torch.dtype):
        super().__init__()
        self.recompute_in_backward = recompute_in_backward
        self.first_token = first_token
        split = region.megatron_sp
        self.input_norm = Norm(model.hidden_size, model, region=region, dtype=dtype, partial_grad=split)
        self.attention = Attention(model, layer, plan, seed=seed, region=region, dtype=dtype)
        self.post_attention_norm = Norm(model.hidden_size, model, region=region, dtype=dtype, partial_grad=split)
        self.mlp = MLP(model, region=region, dtype=dtype)
        self.attention_dropout = Dropout(model.hidden_dropout, seed, f"{layer}/attention-output")
        self.mlp_dropout = Dropout(model.hidden_dropout, seed, f"{layer}/mlp-output")

    def forward(self, x: torch.Tensor, rotation: Rotation | None, sample_ids: torch.Tensor,
                cache: KeyValueCache | None = None) -> torch.Tensor:
        """[b, s/sp(/tp), h] -> [b, s/sp(/tp), h]"""
        if self.recompute_in_backward and torch.is_grad_enabled():
            return recompute(self.compute, x, rotation, sample_ids)
        return self.compute(x, rotation, sample_ids, cache)

    def compute(self, x: torch.Tensor, rotation: Rotation | None, sample_ids: torch.Tensor,
                cache: KeyValueCache | None = None) -> torch.Tensor:
        """The layer itself."""
        x = x + self.drop(self.attention(self.input_norm(x), rotation, sample_ids, cache),
                          self.attention_dropout, sample_ids)
        return x + self.drop(self.mlp(self.post_attention_norm(x)), self.mlp_dropout, sample_ids)

    def drop(self, x: torch.Tensor, dropout: Dropout, sample_ids: torch.Tensor) -> torch.Tensor:
        """Dropout in training, nothing in evaluation."""
        return dropout.hidden(x, sample_ids, self.first_token) if self.training else x
