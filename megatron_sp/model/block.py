"""One transformer layer: pre-norm attention and feed-forward, each on a residual branch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megatron_sp.activations.recompute import Replay, recompute
from megatron_sp.config.schema import Model
from megatron_sp.model.attention.key_value_cache import KeyValueCache
from megatron_sp.model.attention.module import Attention, AttentionPlan
from megatron_sp.model.mlp import MLP
from megatron_sp.model.norm import Norm
from megatron_sp.model.rotary import Rotation
from megatron_sp.parallel.random import Dropout
from megatron_sp.parallel.tensor import TensorRegion


class Block(nn.Module):
    """x + drop(attention(norm(x))), then x + drop(mlp(norm(x))).

    Args:
        layer: its global number, from 0.
        plan, groups: see ``Attention``.
        first_token: number of this rank's first token outside tensor-parallel regions, among all shards.
        recompute_granularity: "full" keeps only the layer's input for backward, "selective" also what
            attention gave, "" everything. With head groups attention recomputes itself and the
            layer is kept in two halves, so that attention never runs a third time.
        mlp_tile: see ``MLP``.
    """

    def __init__(self, model: Model, layer: int, plan: AttentionPlan, groups: Sequence[AttentionPlan] = (), *,
                 seed: int, first_token: int, recompute_granularity: str = "", mlp_tile: int = 0,
                 region: TensorRegion, dtype: torch.dtype):
        super().__init__()
        self.recompute_granularity = recompute_granularity
        self.first_token, self.replay = first_token, Replay()
        split = region.megatron_sp
        self.input_norm = Norm(model.hidden_size, model, region=region, dtype=dtype, partial_grad=split)
        self.attention = Attention(model, layer, plan, groups, seed=seed, region=region, dtype=dtype)
        self.post_attention_norm = Norm(model.hidden_size, model, region=region, dtype=dtype, partial_grad=split)
        self.mlp = MLP(model, tile=mlp_tile, region=region, dtype=dtype)
        self.attention_dropout = Dropout(model.hidden_dropout, seed, f"{layer}/attention-output")
        self.mlp_dropout = Dropout(model.hidden_dropout, seed, f"{layer}/mlp-output")

    def forward(self, x: torch.Tensor, rotation: Rotation | None, sample_ids: torch.Tensor,
                cache: KeyValueCache | None = None) -> torch.Tensor:
        """[b, s/sp(/tp), h] -> [b, s/sp(/tp), h]"""
        if not self.recompute_granularity or not torch.is_grad_enabled():
            return self.compute(x, rotation, sample_ids, cache)
        if self.attention.groups:
            x = self.attend(x, rotation, sample_ids)
            return recompute(self.feed_forward, x, sample_ids, replay=self.replay)
        if self.recompute_granularity == "selective":
            return recompute(self.compute, x, rotation, sample_ids, keep_attention=True)
        return recompute(self.compute, x, rotation, sample_ids, replay=self.replay)

    def compute(self, x: torch.Tensor, rotation: Rotation | None, sample_ids: torch.Tensor,
                cache: KeyValueCache | None = None) -> torch.Tensor:
        """The layer itself."""
        return self.feed_forward(self.attend(x, rotation, sample_ids, cache), sample_ids)

    def attend(self, x: torch.Tensor, rotation: Rotation | None, sample_ids: torch.Tensor,
               cache: KeyValueCache | None = None) -> torch.Tensor:
        """The first residual branch."""
        y = self.attention(x, rotation, sample_ids, cache, normalise=self.input_norm)
        return x + self.drop(y, self.attention_dropout, sample_ids)

    def feed_forward(self, x: torch.Tensor, sample_ids: torch.Tensor) -> torch.Tensor:
        """The second residual branch."""
        y = self.mlp(self.post_attention_norm(x), skip_value=self.replay.is_active)
        return x + self.drop(y, self.mlp_dropout, sample_ids)

    def drop(self, x: torch.Tensor, dropout: Dropout, sample_ids: torch.Tensor) -> torch.Tensor:
        """Dropout in training, nothing in evaluation."""
        return dropout.hidden(x, sample_ids, self.first_token) if self.training else x
