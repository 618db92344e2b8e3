"""Recomputation: keep a function's inputs instead of its activations, run it again in backward.

Chen et al. (arXiv 1604.06174); keeping what attention and its exchange gave is the selective form
(Korthikanti et al., arXiv 2205.05198, section 5) for fused attention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# Outputs of these operators are kept by selective recomputation. Only functional collectives: the
# in-place ones would be replayed into their kept output.
KEPT_OPERATORS = ("aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_flash_attention_for_cpu",
                  "aten._scaled_dot_product_efficient_attention", "aten._scaled_dot_product_cudnn_attention",
                  "_c10d_functional.all_to_all_single")


class Replay:
    """Whether a layer is being run again in backward, where values that only flow on are not needed."""

    def __init__(self) -> None:
        self.is_active = False

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """For the time of one replay."""
        self.is_active = True
        try:
            yield
        finally:
            self.is_active = False


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = str(operator).removesuffix(".default")
    return CheckpointPolicy.MUST_SAVE if name in KEPT_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


@contextlib.contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def recompute(function: Callable[..., torch.Tensor], *args: Any, replay: Replay | None = None,
              keep_attention: bool = False) -> torch.Tensor:
    """``function(*args)``, keeping only the arguments for backward.

    Dropout masks are keyed and stateless (random.py), so no random state is kept or restored.

    Args:
        replay: told while the function runs again.
        keep_attention: keep what fused attention and the all-to-all returned as well; the second run must
            then do what the first did, therefore without ``replay``.
    """
    assert replay is None or not keep_attention
    if replay is None and not keep_attention:  # without contexts, which Dynamo cannot trace in a compiled layer
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """For the first run and for the second."""
        first: AbstractContextManager[Any] = contextlib.nullcontext()
        second: AbstractContextManager[Any] = contextlib.nullcontext()
        if keep_attention:
            first, second = create_selective_checkpoint_contexts(_policy)
        return first, _both(second, replay.active() if replay is not None else contextlib.nullcontext())

    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
