"""The decoder: embedding, a loop over a dict of layers, final norm, logits.

Absent parts are None, so that a pipeline stage is the same class with fewer parts and unchanged
parameter names. Where this rank's tokens lie is known from ``positions`` alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate

from megatron_sp.config.schema import Model
from megatron_sp.model.block import Block
from megatron_sp.model.cache import KeyValueCache
from megatron_sp.model.norm import Norm
from megatron_sp.model.rotary import rotation
from megatron_sp.parallel.random import Dropout
from megatron_sp.parallel.tensor import TensorRegion, VocabParallelEmbedding, VocabParallelOutput, local_weight


class PositionEmbedding(nn.Module):
    """Learned absolute positions, equal on all tp ranks."""

    def __init__(self, length: int, width: int, *, region: TensorRegion, dtype: torch.dtype):
        super().__init__()
        self.region = region
        self.weight = region.parameter((length, width), Replicate(), dtype)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """[b, t] -> [b, t(/tp), h]"""
        first, count = self.region.outside_tokens(positions.shape[1])
        weight = local_weight(self.weight, partial_grad=self.region.megatron_sp)
        return F.embedding(positions[:, first:first + count], weight)


class Embedding(nn.Module):
    """Token embedding, plus learned positions where the model has them, with dropout."""

    def __init__(self, model: Model, *, seed: int, first_token: int, region: TensorRegion, dtype: torch.dtype):
        super().__init__()
        self.first_token = first_token
        self.word = VocabParallelEmbedding(model.vocab_size, model.padded_vocab_size, model.hidden_size,
                                           region=region, dtype=dtype)
        self.position = None
        if model.position_embedding_type == "learned_absolute":
            self.position = PositionEmbedding(model.max_position_embeddings, model.hidden_size, region=region,
                                              dtype=dtype)
        self.dropout = Dropout(model.hidden_dropout, seed, "embedding")

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, sample_ids: torch.Tensor) -> torch.Tensor:
        """[b, t] -> [b, t(/tp), h]"""
        x = self.word(tokens)  # [b, t] -> [b, t(/tp), h]
        if self.position is not None:
            x = x + self.position(positions)
        return self.dropout.hidden(x, sample_ids, self.first_token) if self.training else x


class GPT(nn.Module):
    """A decoder or a stage of one; built by ``build.build_model``.

    Args:
        model: its shape.
        blocks: makes the layer of a global number.
        layers: global numbers of the layers held here.
        embedding, final_norm, output: the other parts, None where another stage holds them.
    """

    def __init__(self, model: Model, layers: range, blocks: Callable[[int], Block], *, embedding: Embedding | None,
                 final_norm: Norm | None, output: VocabParallelOutput | None):
        super().__init__()
        self.config = model
        self.embedding = embedding
        self.layers = nn.ModuleDict({str(layer): blocks(layer) for layer in layers})
        self.final_norm = final_norm
        self.output = output

    def forward(self, x: torch.Tensor, positions: torch.Tensor, sample_ids: torch.Tensor,
                cache: KeyValueCache | None = None) -> torch.Tensor:
        """Logits of this rank's tokens.

        Args:
            x: tokens int64 [b, s/sp]; on a later stage hidden states [b, s/sp(/tp), h]
            positions: int64 [b, s/sp], global
            sample_ids: int64 [b] on the CPU, global sample ids (they key dropout)
            cache: for incremental decoding
        Returns:
            logits [b, s/sp, v/tp]; on an earlier stage hidden states [b, s/sp(/tp), h]
        """
        if self.embedding is not None:
            x = self.embedding(x, positions, sample_ids)  # [b, s/sp] -> [b, s/sp(/tp), h]
        turn = None
        if self.config.position_embedding_type == "rope":
            turn = rotation(self.config, positions, x.dtype)
        for block in self.layers.values():
            x = block(x, turn, sample_ids, cache)
        if self.final_norm is None or self.output is None:
            return x
        tied = None if self.embedding is None else self.embedding.word.weight
        return self.output(self.final_norm(x), tied)  # [b, s/sp(/tp), h] -> [b, s/sp, v/tp]
