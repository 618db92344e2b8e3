"""Tiling: apply a function to a few tokens at a time, so that the activations of only one tile exist at once.

For functions that compute each token by itself, such as feed-forward layers (ALST, arXiv 2506.13996, section 3.3).
Forward keeps no activations. Backward runs the function again, one tile after another, and adds up the tiles'
gradients of the weights in at least fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

TokenFunction = Callable[..., torch.Tensor]


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: TokenFunction, tile: int, skip: bool, x: torch.Tensor,
                *weights: torch.Tensor | None) -> torch.Tensor:
        ctx.function, ctx.tile = function, tile
        ctx.save_for_backward(x, *weights)
        if skip:
            return x.new_zeros(()).expand(x.shape)  # a view of one zero, so it takes no memory
        y = torch.empty_like(x)
        for first in range(0, x.shape[1], tile):
            y[:, first:first + tile] = function(x[:, first:first + tile], *weights)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, *weights = ctx.saved_tensors
        dx = torch.empty_like(x)
        totals = [None if w is None else torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32))
                  for w in weights]
        for first in range(0, x.shape[1], ctx.tile):
            piece = slice(first, first + ctx.tile)
            x_tile = x[:, piece].detach().requires_grad_()
            leaves = [None if w is None else w.detach().requires_grad_() for w in weights]
            with torch.enable_grad():
                y_tile = ctx.function(x_tile, *leaves)
            wanted = [x_tile, *(leaf for leaf in leaves if leaf is not None)]
            dx[:, piece], *gradients = torch.autograd.grad(y_tile, wanted, grad[:, piece])
            del y_tile  # frees this tile's graph before the next tile makes its own
            for total in totals:
                if total is not None:
                    total += gradients.pop(0)
        return None, None, None, dx, *(None if total is None or w is None else total.to(w.dtype)
                                       for total, w in zip(totals, weights))


def tiled(function: TokenFunction, tile: int, x: torch.Tensor, *weights: torch.Tensor | None,
          skip: bool = False) -> torch.Tensor:
    """Return ``function(x, *weights)``, computed one tile of tokens after another.

    Args:
        function: maps [b, t', h] to [b, t', h] for any t', each token by itself.
        tile: tokens per tile.
        x: [b, t, h]
        skip: return zeros instead of the value. Used when a layer is recomputed in backward and no gradient depends
            on the value.
    Returns:
        [b, t, h]
    """
    return _Tiled.apply(function, tile, skip, x, *weights)
