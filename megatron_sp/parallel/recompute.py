"""Recomputation: keep a function's inputs instead of its activations, run it again in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def recompute(function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """``function(*args)``, keeping only the arguments for backward.

    Dropout masks are keyed and stateless (random.py), so no random state is kept or restored.
    """
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
