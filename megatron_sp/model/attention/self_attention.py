"""Self-attention: projections to queries, keys and values, rotary positions, the attention core, output projection."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from megatron_sp.activations.recompute import recompute
from megatron_sp.config.schema import Model
from megatron_sp.layout.heads import HeadSplit
from megatron_sp.layout.patterns.choice import layer_attention
from megatron_sp.model.attention.unfused import AttentionDropout
from megatron_sp.model.context import Context
from megatron_sp.model.norm import Norm
from megatron_sp.model.norm_kernels import NormKernels
from megatron_sp.model.rotary import apply_rotary
from megatron_sp.parallel.random import Dropout
from megatron_sp.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorRegion,
    local_weight,
    products,
)
from megatron_sp.parallel.ulysses import Core


@dataclass(frozen=True)
class AttentionPlan:
    """The heads that this rank computes and the core that attends with them, wrapped for Ulysses or a ring.

    Args:
        core: ``(q [b, t, n, d], k, v [b, t, g, d], mask=..., **how) -> [b, t, n, d]`` on this rank's tokens.
        first_head: global number of the first query head that attention sees on this rank after any exchange.
    """

    heads: HeadSplit
    core: Core
    first_head: int


class Attention(nn.Module):
    """Causal self-attention with n query and g key/value heads. The rows of the weights are in the order of the heads.

    Args:
        plan: all heads of this tp rank at once.
        groups: the same heads cut into several groups, or empty. With groups, projections, exchange and attention run
            for one group after another, in forward and again in backward, so the activations of only one group
            exist at a time.
    """

    def __init__(self, model: Model, layer: int, plan: AttentionPlan, groups: Sequence[AttentionPlan] = (), *,
                 seed: int, region: TensorRegion, dtype: torch.dtype, norm_kernels: NormKernels):
        super().__init__()
        self.layer, self.region, self.plan, self.groups = layer, region, plan, list(groups)
        self.head_dim, self.interleaved = model.head_dim, model.rotary_interleaved
        self.seen = layer_attention(model)[layer]
        self.dropout = Dropout(model.attention_dropout, seed, f"{layer}/attention")
        width = model.hidden_size
        query, kv = model.num_attention_heads * model.head_dim, model.num_query_groups * model.head_dim
        bias = model.add_bias_linear or model.add_qkv_bias
        rows = None
        if plan.heads.kv_is_replicated_over_tp:
            rows = (plan.heads.kv[0] * model.head_dim, plan.heads.kv[1] * model.head_dim)
        self.query = ColumnParallelLinear(width, query, bias=bias, region=region, dtype=dtype)
        self.key = ColumnParallelLinear(width, kv, bias=bias, region=region, dtype=dtype, replicate_rows=rows)
        self.value = ColumnParallelLinear(width, kv, bias=bias, region=region, dtype=dtype, replicate_rows=rows)
        self.query_norm = self.key_norm = None
        if model.qk_layernorm:
            self.query_norm, self.key_norm = (
                Norm(model.head_dim, model, region=region, dtype=dtype, partial_grad=True, kernels=norm_kernels)
                for _ in range(2))
        self.output = RowParallelLinear(query, width, bias=model.add_bias_linear, region=region, dtype=dtype)

    def forward(self, x: torch.Tensor, context: Context, *, normalise: Norm) -> torch.Tensor:
        """[b, s/sp(/tp), h] -> [b, s/sp(/tp), h]

        Args:
            normalise: the norm that is applied to x first. With groups and without tp, every group applies it
                again, so that only x is kept for backward and not the normalised x too. With tp that would repeat
                the communication of ``region.enter``, so the groups share one normalised x.
        """
        group_norm = normalise if self.groups and self.region.size == 1 else None
        if group_norm is None:
            x = self.region.enter(normalise(x))  # [b, s/sp(/tp), h] -> [b, s/sp, h]
        if self.groups:
            parts = (recompute(self._group_output, group, group_norm, x, context) for group in self.groups)
            # Add in place and one by one, so that only the sum and one group's output exist at a time.
            return self.output.finish(functools.reduce(torch.Tensor.add_, parts))
        qkv = self._heads(products(x, *(part.local() for part in (self.query, self.key, self.value)),
                                   joined=self.region.overlapped))
        o = self._attend(self.plan, qkv, context)
        return self.output(o.flatten(2))  # [b, s/sp, n/tp, d] -> [b, s/sp(/tp), h]

    def _group_output(self, group: AttentionPlan, normalise: Norm | None, x: torch.Tensor,
                      context: Context) -> torch.Tensor:
        """Return what one group of heads adds to the output, [b, s/sp, h]; uses the group's rows of each projection."""
        def rows(heads: tuple[int, int], first: int) -> slice:
            return slice((heads[0] - first) * self.head_dim, (heads[1] - first) * self.head_dim)

        x = x if normalise is None else normalise(x)
        whole = self.plan.heads
        query, kv = rows(group.heads.query, whole.query[0]), rows(group.heads.kv, whole.kv[0])
        chosen = [(weight[part], None if bias is None else bias[part]) for (weight, bias), part in (
            (self.query.local(), query), (self.key.local(), kv), (self.value.local(), kv))]
        qkv = self._heads(products(x, *chosen))
        o = self._attend(group, qkv, context)
        return F.linear(o.flatten(2), local_weight(self.output.weight)[:, query])

    def _heads(self, qkv: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """[b, t, n*d], [b, t, g*d] twice -> [b, t, n, d], [b, t, g, d] twice"""
        return [x.unflatten(-1, (-1, self.head_dim)) for x in qkv]

    def _attend(self, plan: AttentionPlan, qkv: list[torch.Tensor], context: Context) -> torch.Tensor:
        """Apply query and key norm, rotary positions and the core: q [b, t, n, d], k, v [b, t, g, d] -> [b, t, n, d]

        Args:
            qkv: the list is emptied, so that the caller's frame does not keep q, k and v alive after they are replaced.
        """
        v, k, q = qkv.pop(), qkv.pop(), qkv.pop()
        if self.query_norm is not None and self.key_norm is not None:
            q = self.query_norm(q)
            k = self.key_norm(k)
        if context.rotation is not None:
            q = apply_rotary(q, context.rotation, self.interleaved)
            k = apply_rotary(k, context.rotation, self.interleaved)
        dropout = None
        if context.token_keys is not None and context.sample_ids is not None and self.dropout.probability > 0:
            dropout = AttentionDropout(self.dropout, context.sample_ids, plan.first_head)
        how = {"mask": context.mask.within(self.seen.window, self.seen.pattern), "dropout": dropout}
        if context.earlier is None:
            return plan.core(q, k, v, **how)
        return context.earlier.attend(plan.core, self.layer, plan.first_head, q, k, v, **how)
