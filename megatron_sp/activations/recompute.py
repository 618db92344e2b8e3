"""Recomputation: keep a function's inputs instead of its activations, and run it again in backward.

Chen et al. (arXiv 1604.06174). The selective form keeps the results of attention and of its exchange as well, which
cost most to compute again (Korthikanti et al., arXiv 2205.05198, section 5, here for fused attention).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from megatron_sp.activations.results import (
    KeepResults,
    KeptResults,
    LayerResults,
    ResultsOnHost,
    TakeResults,
    operator_name,
)
from megatron_sp.activations.storage import DeviceStorage
from megatron_sp.torch_internals import ALL_TO_ALL_OPERATOR

#: Operators that compute attention. Selective recomputation keeps their results, except inside ``KeptResults.once``.
ATTENTION_OPERATORS = (
    "aten._scaled_dot_product_flash_attention",  # also flash attention 3 and 4 where torch's registry put them here
    "aten._scaled_dot_product_flash_attention_for_cpu", "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "flash_attn._flash_attn_forward", "flash_attn_3._flash_attn_forward",  # of the packages of these names
    "torch_attn._varlen_attn", "flash_attn._flash_attn_varlen_forward")  # inside documents
#: Selective recomputation keeps the results of these operators. The all-to-all must be the functional one: an
#: in-place one would run again and overwrite the result that was kept.
KEPT_OPERATORS = (*ATTENTION_OPERATORS, ALL_TO_ALL_OPERATOR)


class Replay:
    """Whether a layer is being run again in backward. Then values that no gradient depends on need not be computed."""

    def __init__(self) -> None:
        self.is_active = False

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Mark the time of one second run."""
        self.is_active = True
        try:
            yield
        finally:
            self.is_active = False


def _policy(keep: Sequence[str], results: KeptResults, _: Any, operator: Any, *args: Any,
            **kwargs: Any) -> CheckpointPolicy:
    is_kept = operator_name(operator) in keep and not results.computes
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


@contextlib.contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def recompute(function: Callable[..., torch.Tensor], *args: Any, replay: Replay | None = None,
              keep: Sequence[str] = (), results: KeptResults | None = None,
              on_host: ResultsOnHost | None = None) -> torch.Tensor:
    """Compute ``function(*args)`` and keep only the arguments for backward, which runs the function again.

    No random state is kept or restored: a dropout mask is a hash (``parallel/random.py``), which gives the same mask
    again.

    Args:
        replay: is active while the function runs again.
        keep: also keep the results of these operators. The second run must then call the same operators as the first,
            so ``replay``, which lets it leave some out, is not allowed.
        results: with ``keep``, also keeps what attention gives to ``KeptResults.once``.
        on_host: keeps in host memory what ``results`` keeps, and what ``ATTENTION_OPERATORS`` return. Results of
            exchanges stay on the device: they are not complete yet when their operator returns.
    """
    assert replay is None or not keep
    how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if keep:
        how["context_fn"] = partial(_keeping, keep, results or KeptResults(), on_host)
    elif replay is not None:
        how["context_fn"] = lambda: (contextlib.nullcontext(), replay.active())
    # Without either there are no contexts, which Dynamo could not trace in a compiled layer.
    return checkpoint(function, *args, **how)


def _keeping(keep: Sequence[str], results: KeptResults,
             on_host: ResultsOnHost | None) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of the first and of the second run of one call of a layer; see ``recompute``."""
    there = [name for name in keep if name in ATTENTION_OPERATORS] if on_host is not None else []
    here = [name for name in keep if name not in there]
    layer = LayerResults(DeviceStorage()) if on_host is None else on_host.of_next_layer()
    first, second = create_selective_checkpoint_contexts(partial(_policy, here, results))
    if there:
        first = _both(KeepResults(there, layer, results), first)
        second = _both(TakeResults(there, layer, results), second)
    return _both(results.run(layer, second=False), first), _both(results.run(layer, second=True), second)
