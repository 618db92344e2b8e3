"""Key/value cache for decoding token by token."""

from __future__ import annotations

import torch


class KeyValueCache:
    """Keys and values of the tokens that each layer has seen so far."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def length(self) -> int:
        """Return the number of tokens whose keys and values every layer has stored."""
        return min((k.shape[1] for k, _ in self.layers.values()), default=0)

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add k, v [b, t, g, d] of new tokens to a layer, and return those of all its tokens [b, past + t, g, d]."""
        if layer in self.layers:
            past_k, past_v = self.layers[layer]
            k, v = torch.cat([past_k, k], dim=1), torch.cat([past_v, v], dim=1)
        self.layers[layer] = (k, v)
        return k, v
