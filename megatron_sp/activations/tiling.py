"""Tiles: a function of tokens applied piece by piece, in forward and again in backward.

For functions that treat every token alike (feed-forward layers): the activations of one tile exist at
a time (ALST, arXiv 2506.13996, section 3.3). Backward runs the function again per tile; the gradients
of the weights are added up over the tiles in at least fp32.
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
            return x.new_zeros(()).expand(x.shape)  # without memory
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
            del y_tile  # this and the gradients are gone before the next tile's exist
            for total in totals:
                if total is not None:
                    total += gradients.pop(0)
        return None, None, None, dx, *(None if total is None or w is None else total.to(w.dtype)
                                       for total, w in zip(totals, weights))


def tiled(function: TokenFunction, tile: int, x: torch.Tensor, *weights: torch.Tensor | None,
          skip: bool = False) -> torch.Tensor:
    """``function(x, *weights)`` in tiles of tokens.

    Args:
        function: maps [b, t', h] to [b, t', h] for any t', each token by itself.
        tile: tokens of a tile.
        x: [b, t, h]
        skip: do not compute the value (zeros instead): nobody reads it when a layer is replayed.
    Returns:
        [b, t, h]
    """
    return _Tiled.apply(function, tile, skip, x, *weights)
