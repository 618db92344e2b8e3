"""Read a text chunk by chunk with a model in evaluation mode, so that memory does not depend on the text's length.

Keys and values of the whole text are kept, and activations of one chunk. The model must have been built with
``memory.sequence_chunk_size``, whose attention sees the chunks before its own.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from megatron_sp.activations.key_values import Chunk, KeyValueStore
from megatron_sp.model.attention.key_value_cache import KeyValueCache
from megatron_sp.model.context import Context
from megatron_sp.model.gpt import GPT


def parts_of(tokens: int, size: int) -> list[slice]:
    """Return the chunks of a text, the last one shorter where they do not divide; one for all where ``size`` is 0."""
    size = size or tokens
    return [slice(first, min(first + size, tokens)) for first in range(0, tokens, size)]


@torch.no_grad()
def token_losses(model: nn.Module, tokens: Tensor, size: int = 0) -> Tensor:
    """Return the loss of each token after the first, given those before it: ``[t]`` to fp32 ``[t - 1]``, in nats.

    Args:
        size: tokens of a chunk; 0 reads the whole text at once.
    """
    inputs, labels, store = tokens[None, :-1], tokens[None, 1:], KeyValueStore()
    positions = torch.arange(labels.numel(), device=tokens.device)[None]
    losses = []
    for number, part in enumerate(parts_of(labels.numel(), size)):
        chunk = Chunk(store, number, size, keeps=part.stop < labels.numel()) if size else None
        context = Context(positions[:, part], earlier=chunk)
        losses.append(model(inputs[:, part], context, labels=labels[:, part], reduction="none")[0])
    return torch.cat(losses)


@torch.no_grad()
def prefill(model: nn.Module, tokens: Tensor, cache: KeyValueCache, size: int) -> Tensor:
    """Fill an empty cache with the keys and values of prompts, and return the logits after them, [b, v/tp].

    Args:
        tokens: int64 [b, t]
        size: tokens of a chunk.
    """
    store, count = KeyValueStore(), tokens.shape[1]
    positions = torch.arange(count, device=tokens.device).expand_as(tokens)
    parts = parts_of(count, size)
    for number, part in enumerate(parts):
        chunk = Chunk(store, number, size, keeps=True, needs_output=part is parts[-1],
                      last_layer=cast(GPT, model).config.num_layers - 1)
        logits = model(tokens[:, part], Context(positions[:, part], earlier=chunk))
    cache.take(store)
    return logits[:, -1]
