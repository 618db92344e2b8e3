"""One transformer layer: pre-norm attention and feed-forward, each on a residual branch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megatron_sp.activations.recompute import KEPT_OPERATORS, Replay, recompute
from megatron_sp.activations.results import KeptResults, ResultsOnHost
from megatron_sp.config.schema import Model
from megatron_sp.model.attention.self_attention import Attention, AttentionPlan
from megatron_sp.model.context import Context
from megatron_sp.model.mlp import MLP
from megatron_sp.model.norm import Norm
from megatron_sp.model.norm_kernels import NormKernels
from megatron_sp.parallel.random import Dropout
from megatron_sp.parallel.tensor import TensorRegion
from megatron_sp.torch_internals import ALL_TO_ALL_OPERATOR, TENSOR_OVERLAP_OPTIONS


class Block(nn.Module):
    """x + drop(attention(norm(x))), then x + drop(mlp(norm(x))).

    Args:
        layer: global number of the layer, from 0.
        plan, groups: see ``Attention``.
        recompute_granularity: "full" keeps only the layer's input for backward, "selective" also the output of
            attention, "" everything. With head groups, attention recomputes itself. Then the input of the second
            branch is kept too, because recomputing the whole layer would run attention a third time.
        mlp_tile: see ``MLP``.
        results: with selective recomputation, keeps the results of attention that is made of many calls.
        results_on_host: with selective recomputation, keeps the results of attention in host memory.
        compiled: compile the arithmetic of the layer. Recomputation and FSDP's hooks stay outside the compiled part.
    """

    def __init__(self, model: Model, layer: int, plan: AttentionPlan, groups: Sequence[AttentionPlan] = (), *,
                 seed: int, recompute_granularity: str = "", mlp_tile: int = 0,
                 results: KeptResults | None = None, results_on_host: ResultsOnHost | None = None,
                 region: TensorRegion, dtype: torch.dtype, norm_kernels: NormKernels, compiled: bool = False):
        super().__init__()
        self.recompute_granularity = recompute_granularity
        self.results, self.results_on_host = results, results_on_host
        self.replay = Replay()

        def norm() -> Norm:
            return Norm(model.hidden_size, model, region=region, dtype=dtype, partial_grad=region.megatron_sp,
                        kernels=norm_kernels)

        self.input_norm = norm()
        self.attention = Attention(model, layer, plan, groups, seed=seed, region=region, dtype=dtype,
                                   norm_kernels=norm_kernels)
        self.post_attention_norm = norm()
        self.mlp = MLP(model, tile=mlp_tile, region=region, dtype=dtype)
        self.attention_dropout = Dropout(model.hidden_dropout, seed, f"{layer}/attention-output")
        self.mlp_dropout = Dropout(model.hidden_dropout, seed, f"{layer}/mlp-output")
        options = TENSOR_OVERLAP_OPTIONS if region.overlapped else None
        self.compute = torch.compile(self._compute, options=options) if compiled else self._compute

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """[b, s/sp(/tp), h] -> [b, s/sp(/tp), h]"""
        if not self.recompute_granularity or not torch.is_grad_enabled():
            return self.compute(x, context)
        if self.attention.groups:
            x = self._attend(x, context)
            return recompute(self._feed_forward, x, context, replay=self.replay)
        if self.recompute_granularity == "selective":
            if context.earlier is not None:  # the store of keys and values keeps attention's output without dropout
                return recompute(self.compute, x, context, keep=(ALL_TO_ALL_OPERATOR,), results=self.results)
            return recompute(self.compute, x, context, keep=KEPT_OPERATORS, results=self.results,
                             on_host=self.results_on_host)
        return recompute(self.compute, x, context, replay=self.replay)

    def _compute(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """Apply both branches, without recomputation."""
        return self._feed_forward(self._attend(x, context), context)

    def _attend(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """Return x + drop(attention(norm(x)))."""
        y = self.attention(x, context, normalise=self.input_norm)
        return x + self.attention_dropout.hidden(y, context.token_keys)

    def _feed_forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """Return x + drop(mlp(norm(x)))."""
        y = self.mlp(self.post_attention_norm(x), skip_value=self.replay.is_active)
        return x + self.mlp_dropout.hidden(y, context.token_keys)
