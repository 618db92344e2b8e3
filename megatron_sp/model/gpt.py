"""The decoder: embedding, a loop over a dict of layers, final norm, output layer with the loss.

A pipeline stage is the same class. The parts that other stages hold are None, and the parameters keep their names.
The model learns from a ``Context`` alone which tokens of the sequence it is given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate

from megatron_sp.activations.offload import ActivationOffload
from megatron_sp.activations.recompute import recompute
from megatron_sp.config.schema import Model
from megatron_sp.model.block import Block
from megatron_sp.model.context import Context
from megatron_sp.model.loss import linear_cross_entropies, linear_cross_entropy_sum
from megatron_sp.model.norm import Norm
from megatron_sp.parallel.random import Dropout
from megatron_sp.parallel.tensor import TensorRegion, VocabParallelEmbedding, VocabParallelOutput, local_weight


class PositionEmbedding(nn.Module):
    """Learned absolute positions, equal on all tp ranks."""

    def __init__(self, length: int, width: int, *, region: TensorRegion, dtype: torch.dtype):
        super().__init__()
        self.region = region
        self.weight = region.parameter((length, width), Replicate(), dtype)
        self.partial_over_tp = ("weight",) if region.megatron_sp else ()

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """[b, t] -> [b, t(/tp), h]"""
        return F.embedding(self.region.outside(positions), local_weight(self.weight))


class Embedding(nn.Module):
    """Token embedding, plus learned positions where the model has them, then dropout."""

    def __init__(self, model: Model, *, seed: int, region: TensorRegion, dtype: torch.dtype):
        super().__init__()
        self.word = VocabParallelEmbedding(model.vocab_size, model.padded_vocab_size, model.hidden_size,
                                           region=region, dtype=dtype)
        self.position = None
        if model.position_embedding_type == "learned_absolute":
            self.position = PositionEmbedding(model.max_position_embeddings, model.hidden_size, region=region,
                                              dtype=dtype)
        self.dropout = Dropout(model.hidden_dropout, seed, "embedding")

    def forward(self, tokens: torch.Tensor, context: Context) -> torch.Tensor:
        """[b, t] -> [b, t(/tp), h]"""
        x = self.word(tokens)  # [b, t] -> [b, t(/tp), h]
        if self.position is not None:
            x = x + self.position(context.positions)
        return self.dropout.hidden(x, context.token_keys)


class GPT(nn.Module):
    """A decoder, or one pipeline stage of it; made by ``build.build_model``.

    Args:
        model: the shape of the whole model.
        layers: global numbers of the layers held here.
        blocks: returns a new layer, given its global number.
        embedding, final_norm, output: the other parts, None where another stage holds them.
        loss_tile, products_in_fp32: see ``loss.linear_cross_entropy_sum``.
        unit: layers that are recomputed together; 1 leaves recomputation to each layer.
        offload: moves layer inputs to host memory.
        region: splits the tokens between layers over tensor-parallel ranks.
    """

    def __init__(self, model: Model, layers: range, blocks: Callable[[int], Block], *, embedding: Embedding | None,
                 final_norm: Norm | None, output: VocabParallelOutput | None, loss_tile: int = 0,
                 products_in_fp32: bool = False, unit: int = 1, offload: ActivationOffload | None = None,
                 region: TensorRegion):
        super().__init__()
        self.region = region
        self.config, self.loss_tile, self.unit, self.offload = model, loss_tile, unit, offload
        self.products_in_fp32 = products_in_fp32
        self.embedding = embedding
        self.layers = nn.ModuleDict({str(layer): blocks(layer) for layer in layers})
        self.final_norm = final_norm
        self.output = output

    def forward(self, x: torch.Tensor, context: Context, *, labels: torch.Tensor | None = None,
                reduction: Literal["sum", "none"] = "sum") -> torch.Tensor:
        """Return the losses of this rank's tokens, or without labels their logits.

        Args:
            x: tokens int64 [b, s/sp]; on a later stage hidden states [b, s/sp(/tp), h].
            context: what the layers must know of these tokens.
            labels: int64 [b, s/sp], -100 where there is nothing to predict.
            reduction: "sum" for training; "none" for the loss of each token, without gradients.
        Returns:
            On an earlier stage, or where the context needs no output, hidden states [b, s/sp(/tp), h]; else without
            labels logits [b, s/sp, v/tp], with labels the sum of the losses [1] or, unreduced, the losses [b, s/sp].
        """
        if self.training:
            context = context.with_dropout(self.config, self.region)
        if self.embedding is not None:
            x = self.embedding(x, context)  # [b, s/sp] -> [b, s/sp(/tp), h]
        context = context.with_rotation(self.config, x.dtype)
        for index, blocks in enumerate(self.units()):
            with self.offload.around(index, x) if self.offload else contextlib.nullcontext():
                if len(blocks) > 1 and torch.is_grad_enabled():
                    x = recompute(run_layers, blocks, x, context)
                else:
                    x = run_layers(blocks, x, context)
        if self.final_norm is None or self.output is None or not context.needs_output:
            return x
        tied = None if self.embedding is None else self.embedding.word.weight
        x = self.final_norm(x)
        if labels is None:
            return self.output(x, tied)  # [b, s/sp(/tp), h] -> [b, s/sp, v/tp]
        return self.output(x, tied, partial(self.loss_sum if reduction == "sum" else self.token_losses, labels))

    def units(self) -> list[list[nn.Module]]:
        """Return the layers, grouped into those that are recomputed together."""
        blocks = list(self.layers.values())
        return [blocks[first:first + self.unit] for first in range(0, len(blocks), self.unit)]

    def loss_sum(self, labels: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Apply output layer and loss in one function: [b, s/sp, h], [v/tp, h] -> [1]"""
        assert self.output is not None
        loss = linear_cross_entropy_sum(x, weight, labels, self.output.region, self.config.vocab_size,
                                        tile=self.loss_tile, products_in_fp32=self.products_in_fp32)
        return torch.stack([loss])  # not a view, because FSDP puts hooks on the outputs of its modules

    def token_losses(self, labels: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token, without gradients: [b, s/sp, h], [v/tp, h] -> [b, s/sp]"""
        assert self.output is not None
        return linear_cross_entropies(x, weight, labels, self.output.region, self.config.vocab_size,
                                      tile=self.loss_tile)


def run_layers(blocks: Sequence[nn.Module], x: torch.Tensor, context: Context) -> torch.Tensor:
    """Apply the layers one after another: [b, s/sp(/tp), h] -> [b, s/sp(/tp), h]"""
    for block in blocks:
        x = block(x, context)
    return x
