"""Fused attention for GPUs: which versions there are, which of them compute right here, and which is the fastest.

Versions 3 and 4 of flash attention are called through torch: its registry puts one of them in place of torch's own
flash attention, for everything in a process that calls torch's operators. So a version is activated in the run's
process only when it is chosen, once, and before anything else that calls these operators is tried. All trials happen in
child processes (``child_trials``)::

    child processes    FA4: activate, compare, time    FA3: activate, compare, time    FA2 ...    torch ...
    run                all ranks compare the results, and each one loads the same version
                       block kernels, which call the same operators, are tried
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import attention

from megatron_sp.errors import ConfigError
from megatron_sp.layout.masks.attention_mask import AttentionMask
from megatron_sp.model.attention.documents import DocumentAttention, Varlen, first_keys
from megatron_sp.model.attention.unfused import block_attention
from megatron_sp.model.child_trials import Outcome, try_in_children
from megatron_sp.model.kernel_trial import same_results
from megatron_sp.parallel.collectives import gather_objects

#: (q [b, s, n, d], k, v [b, s, g, d], causal) -> o [b, s, n, d]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]
#: The function that a child calls for each version.
TRIAL = "megatron_sp.model.attention.flash_trial:try_version"
#: Versions that are not in torch's registry, in the order of their trials.
FLASH_2, CUDNN, TORCH = "FA2", "cuDNN", "torch"
DESCRIPTIONS = {FLASH_2: "flash attention 2 (flash-attn)", CUDNN: "cuDNN's attention (through torch)",
                TORCH: "torch's flash attention"}
#: Tokens of the trial: more than one block of a flash kernel, and not a multiple of its size.
TRIAL_TOKENS = 300
#: Window of the trial: neither a block of a flash kernel nor a divisor of one.
TRIAL_WINDOW = 77
#: Key/value heads of the trial.
TRIAL_KV_HEADS = 2
#: What torch says where the one kernel that it may use does not take the input.
NOT_TAKEN = "No available kernel"


@dataclass(frozen=True)
class FlashAttention:
    """One version of fused attention, ready to be called.

    Args:
        description: names the version in the log.
        attend: attends to whole sequences.
        varlen: attends to all documents of a row at once; None where the version has no such function.
    """

    description: str
    attend: Attend
    varlen: Varlen | None = None


@dataclass(frozen=True)
class Wanted:
    """What a version must compute in a run.

    Args:
        dtype: name of the type in which attention computes.
        copies: query heads of each key/value head.
        whole: attention to whole sequences. Otherwise only block kernels are needed, see ``block_kernels``.
        documents: tokens attend only to their own document.
        windows: layers attend within a window.
        blocks: attention to blocks of keys, of a ring, of chunks of a sequence, or of patterns.
    """

    dtype: str
    head_dim: int
    copies: int = 2
    whole: bool = True
    documents: bool = False
    windows: bool = False
    blocks: bool = False


@dataclass(frozen=True)
class FlashSearch:
    """The outcome of a search.

    Args:
        found: the fastest version that passed its trial, or None.
        failed: the versions that are installed and did not pass, by description, and why.
    """

    found: FlashAttention | None = None
    failed: tuple[tuple[str, str], ...] = ()


def describe(name: str) -> str:
    """Return how messages name a version."""
    number = name.removeprefix("FA")
    return DESCRIPTIONS.get(name) or f"{f'flash attention {number}' if number != name else name} (through torch)"


def in_registry(name: str) -> bool:
    """Return whether torch's registry puts a version in place of torch's own flash attention."""
    return name not in DESCRIPTIONS


def version_names() -> list[str]:
    """Return the names of all versions that may be installed, newest first; nothing is imported."""
    list_versions = getattr(attention, "list_flash_attention_impls", list)  # an older torch has no registry
    return [*sorted(list_versions(), reverse=True), *DESCRIPTIONS]  # of the registry: "FA4", "FA3"


def load(name: str) -> FlashAttention:
    """Import a version and return it. One of torch's registry is active in this process from then on.

    Raises:
        ModuleNotFoundError: its package is not installed.
        Exception: whatever else a package raises when it is imported or activated.
    """
    if in_registry(name):
        attention.activate_flash_attention_impl(name)
        return FlashAttention(describe(name), torch_flash, torch_varlen)
    restore_torchs_flash()
    if name == FLASH_2:
        return _flash_2(importlib.import_module("flash_attn"))
    backend = attention.SDPBackend.CUDNN_ATTENTION if name == CUDNN else attention.SDPBackend.FLASH_ATTENTION
    return FlashAttention(describe(name), partial(torch_sdpa, backend=backend), torch_varlen)


def active_version() -> str:
    """Return the description of the version that computes in place of torch's flash attention; "" if none does."""
    current = getattr(attention, "current_flash_attention_impl", lambda: None)()  # see version_names
    return describe(current) if current else ""


def restore_torchs_flash() -> None:
    """Undo the activation of another version in torch's registry, if there is one."""
    if active_version():
        attention.restore_flash_attention_impl()


def find_flash_attention(wanted: Wanted, device: torch.device, *,
                         attempt: Callable[[str, Sequence[str], Mapping[str, Any]],
                                           dict[str, Outcome]] = try_in_children) -> FlashSearch:
    """Try all installed versions in child processes, and load the fastest that agrees with unfused attention.

    All ranks call this together, each tries the versions on its own GPU, and all choose the same one. A version may be
    installed and still fail: on a GPU it does not know, at this head width, or because its interface changed.

    Args:
        attempt: see ``child_trials.try_in_children``.

    Raises:
        ConfigError: a version passed in a child and cannot be loaded in this process.
    """
    names = [name for name in version_names() if wanted.whole or in_registry(name) or name == TORCH]
    every_rank = gather_objects(attempt(TRIAL, names, {"wanted": asdict(wanted), "device": str(device)}))
    best, failed = choose_version(names, every_rank, wanted)
    if best is None:
        return FlashSearch(None, failed)
    try:
        version = load(best)
    except Exception as error:  # noqa: BLE001 (of another package)
        raise ConfigError(f"{describe(best)} passed its trial in another process, and cannot be loaded in this one: "
                          f"{error}. Give --attention-core sdpa to do without it") from None
    keeps = all(outcomes[best].found.get("varlen") for outcomes in every_rank)
    return FlashSearch(version if keeps else replace(version, varlen=None), failed)


def choose_version(names: Sequence[str], every_rank: Sequence[Mapping[str, Outcome]],
                   wanted: Wanted) -> tuple[str | None, tuple[tuple[str, str], ...]]:
    """Return the version that all ranks use, or None, and the descriptions of those that failed, each with the reason.

    The slowest rank decides how fast a version is. Where tokens attend only to their own document, a version that
    computes all documents at once comes before one that does not.
    """
    passed: dict[str, tuple[bool, float]] = {}
    failed: list[tuple[str, str]] = []
    for name in names:
        outcomes = [rank[name] for rank in every_rank]
        if all(outcome.passed for outcome in outcomes):
            slow = wanted.documents and not all(outcome.found.get("varlen") for outcome in outcomes)
            passed[name] = slow, max(outcome.found["seconds"] for outcome in outcomes)
        elif not all(outcome.missing for outcome in outcomes):
            why = next((outcome.why for outcome in outcomes if outcome.why), "is not installed on all machines")
            if NOT_TAKEN not in why:
                failed.append((describe(name), why))
    return min(passed, key=lambda name: passed[name], default=None), tuple(failed)


def _flash_2(package: Any) -> FlashAttention:
    """Return the functions of the package flash-attn."""
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        return package.flash_attn_func(q, k, v, causal=causal)  # type: ignore[no-any-return]

    def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, longest: int,
               window: int) -> torch.Tensor:
        how = {"window_size": (window - 1, 0)} if window else {}
        return package.flash_attn_varlen_func(  # type: ignore[no-any-return]
            q, k, v, cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=longest, max_seqlen_k=longest,
            causal=True, **how)

    return FlashAttention(describe(FLASH_2), attend, varlen)


def torch_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Return torch's attention with all kernels but flash switched off, so that no slow kernel is used instead."""
    return torch_sdpa(q, k, v, causal, attention.SDPBackend.FLASH_ATTENTION)


def torch_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool,
               backend: attention.SDPBackend) -> torch.Tensor:
    """Return torch's attention with all kernels but one switched off."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, s, n, d] -> [b, n, s, d]
    with attention.sdpa_kernel(backend):
        o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return o.transpose(1, 2)


def torch_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor,
                 longest: int, window: int) -> torch.Tensor:
    """Return torch's causal attention inside the documents of a row, see ``documents.Varlen``.

    torch counts the window's earlier tokens without the query's own; -1 means all of them.
    """
    from torch.nn.attention.varlen import varlen_attn

    how: dict[str, Any] = {}
    if (copies := q.shape[1] // k.shape[1]) > 1:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # from torch 2.12 on
            how["enable_gqa"] = True
        else:
            k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
    o = varlen_attn(q, k, v, lengths, lengths, longest, longest, window_size=(window - 1, 0), **how)
    assert isinstance(o, torch.Tensor)
    return o


def trial_inputs(tokens: int, device: torch.device, dtype: torch.dtype, need: Wanted, batch: int = 1) -> tuple[
        torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q [b, s, n, d], k and v [b, s, g, d] for a trial, which require gradients."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, tokens, heads, need.head_dim, generator=generator).to(device, dtype).requires_grad_()
               for heads in (TRIAL_KV_HEADS * need.copies, TRIAL_KV_HEADS, TRIAL_KV_HEADS))
    return q, k, v


def passes_varlen_trials(varlen: Varlen, device: torch.device, dtype: torch.dtype, head_dim: int,
                         windows: bool) -> bool:
    """Return whether attention inside documents is right, and with ``windows`` also attention within a window."""
    return all(passes_varlen_trial(varlen, device, dtype, head_dim, window)
               for window in ((0, TRIAL_WINDOW) if windows else (0,)))


def passes_varlen_trial(varlen: Varlen, device: torch.device, dtype: torch.dtype, head_dim: int,
                        window: int = 0) -> bool:
    """Return whether attention inside documents is right, forward and backward, with grouped heads and two sequences.

    This also finds a function that is missing or takes other arguments in the installed version.

    Args:
        window: tokens that a query sees; 0: all of its document.
    """
    q, k, v = trial_inputs(TRIAL_TOKENS, device, dtype, Wanted("", head_dim), batch=2)
    mask = AttentionMask(((0, 7, 8), (0, TRIAL_TOKENS - 1)), window)
    attend = DocumentAttention(lambda q, k, v: q, lambda q, k, v, mask: q, varlen)
    seen_from = first_keys(mask, 2, TRIAL_TOKENS).to(device)
    return same_results(lambda: attend(q, k, v, mask),
                        lambda: block_attention(q, k, v, 0, True, None, seen_from)[0], (q, k, v))
