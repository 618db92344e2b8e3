"""Key/value cache for decoding token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_sp.activations.key_values import KeyValueStore


class KeyValueCache:
    """Keys and values of the tokens that each layer, and each group of its heads, has seen so far.

    Attributes:
        needs_output: see ``key_values.Earlier``.
    """

    needs_output = True

    def __init__(self) -> None:
        self.layers: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def length(self) -> int:
        """Return the number of tokens whose keys and values every layer has stored."""
        return min((k.shape[1] for k, _ in self.layers.values()), default=0)

    def attend(self, core: Callable[..., torch.Tensor], layer: int, first_head: int, q: torch.Tensor, k: torch.Tensor,
               v: torch.Tensor, **how: Any) -> torch.Tensor:
        """See ``key_values.Earlier``."""
        k, v = self.append((layer, first_head), k, v)
        return core(q, k, v, **how)

    def append(self, where: tuple[int, int], k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add k, v [b, t, g, d] of new tokens, and return those of all tokens [b, past + t, g, d].

        Args:
            where: the layer, and the first query head of the group of heads.
        """
        if where in self.layers:
            past_k, past_v = self.layers[where]
            k, v = torch.cat([past_k, k], dim=1), torch.cat([past_v, v], dim=1)
        self.layers[where] = (k, v)
        return k, v

    def take(self, store: KeyValueStore) -> None:
        """Add the keys and values of all chunks that a store keeps; the store forgets them."""
        for where, k, v in store.take_all():
            self.append(where, k, v)
