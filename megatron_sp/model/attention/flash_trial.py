"""The trial of a version of fused attention: does it agree with unfused attention, and how fast is it?"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron_sp.model.attention.block_kernels import first_that_agrees, gpu_kernels
from megatron_sp.model.attention.flash import (
    TRIAL_TOKENS,
    Attend,
    Wanted,
    in_registry,
    load,
    passes_varlen_trials,
    trial_inputs,
)
from megatron_sp.model.attention.unfused import block_attention
from megatron_sp.model.child_trials import Outcome
from megatron_sp.model.kernel_trial import disagreement
from megatron_sp.parallel.ring import BlockKernel

#: Tokens at which versions are timed: enough that the kernels take longer than their launch.
TIMED_TOKENS = 4096


def try_version(name: str, *, wanted: Mapping[str, Any], device: str) -> Outcome:
    """Compare one version with unfused attention, forward and backward, and time it. Runs in a child process.

    A version of torch's registry must also compute blocks of keys where the run needs them, because it takes the place
    of the operators that block kernels call. The others leave these operators as they are.

    Args:
        wanted: the fields of a ``Wanted``.
        device: name of the device.

    Returns:
        the outcome with ``seconds`` of a forward and backward, and whether ``varlen`` is right
    """
    need, place = Wanted(**wanted), torch.device(device)
    try:
        version = load(name)
    except ModuleNotFoundError:
        return Outcome(False, missing=True)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    dtype: torch.dtype = getattr(torch, need.dtype)
    if need.whole and (why := _attends_wrongly(version.attend, place, dtype, need)):
        return Outcome(False, why)
    varlen = (need.documents or need.windows) and version.varlen is not None and passes_varlen_trials(
        version.varlen, place, dtype, need.head_dim, need.windows)
    kernel: BlockKernel | None = None
    if (need.blocks or (need.windows and not varlen)) and (in_registry(name) or not need.whole):
        kernel = first_that_agrees(gpu_kernels(), place, need.head_dim, dtype, need.copies)
        if kernel is None:
            return Outcome(False, "gives wrong results or errors on blocks of keys")
    compute = _whole(version.attend, place, dtype, need) if need.whole else _block(kernel, place, dtype, need)
    return Outcome(True, found={"seconds": shortest_time(compute, place), "varlen": bool(varlen)})


def shortest_time(compute: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    """Return the seconds of the shortest of some runs, after one that is not counted."""
    times = []
    for _ in range(1 + repeats):
        _wait(device)
        began = time.perf_counter()
        compute()
        _wait(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _attends_wrongly(attend: Attend, device: torch.device, dtype: torch.dtype, need: Wanted) -> str:
    """Return what is wrong with causal attention and its gradients, in words; "" if nothing is."""
    q, k, v = trial_inputs(TRIAL_TOKENS, device, dtype, need)
    return disagreement(lambda: attend(q, k, v, True), lambda: block_attention(q, k, v, 0, True, None)[0], (q, k, v))


def _whole(attend: Attend, device: torch.device, dtype: torch.dtype, need: Wanted) -> Callable[[], object]:
    """Return causal attention to a whole sequence with its backward, ready to be timed."""
    q, k, v = trial_inputs(TIMED_TOKENS, device, dtype, need)
    return lambda: torch.autograd.grad(attend(q, k, v, True), (q, k, v), torch.ones_like(q))


def _block(kernel: BlockKernel | None, device: torch.device, dtype: torch.dtype, need: Wanted) -> Callable[[], object]:
    """Return attention to a block of keys with its backward, ready to be timed."""
    assert kernel is not None
    q, k, v = (x.detach() for x in trial_inputs(TIMED_TOKENS, device, dtype, need))

    def compute() -> None:
        o, lse = kernel.forward(q, k, v, False)
        kernel.backward(o, q, k, v, o, lse, False)

    return compute
