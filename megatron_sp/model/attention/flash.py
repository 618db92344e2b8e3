"""Flash attention of other packages: which versions are installed, and which of them computes right on this GPU."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import attention

from megatron_sp.layout.masks.attention_mask import AttentionMask
from megatron_sp.model.attention.documents import DocumentAttention, Varlen, first_keys
from megatron_sp.model.attention.unfused import block_attention
from megatron_sp.model.kernel_trial import same_results

#: (q [b, s, n, d], k, v [b, s, g, d], causal) -> o [b, s, n, d]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]
#: Tokens of the trial: more than one block of a flash kernel, and not a multiple of its size.
TRIAL_TOKENS = 300
#: Window of the trial: neither a block of a flash kernel nor a divisor of one.
TRIAL_WINDOW = 77


@dataclass(frozen=True)
class FlashAttention:
    """One version of flash attention, ready to be called.

    Args:
        description: names the version in the log.
        attend: attends to whole sequences.
        varlen: attends to all documents of a row at once; None where the version has no such function.
    """

    description: str
    attend: Attend
    varlen: Varlen | None = None


@dataclass(frozen=True)
class FlashSearch:
    """The outcome of a search.

    Args:
        found: the newest version that passed its trial, or None.
        failed: descriptions of the newer versions that are installed and did not pass.
    """

    found: FlashAttention | None
    failed: tuple[str, ...]


def find_flash_attention(device: torch.device, head_dim: int, *, include_torchs: bool, documents: bool = False,
                         windows: bool = False,
                         versions: Callable[[], Iterator[FlashAttention]] | None = None) -> FlashSearch:
    """Try the installed versions of flash attention, newest first, until one agrees with unfused attention.

    A version may be installed and still fail: on a GPU it does not know, at this head width, or because its interface
    changed. The next older one is then tried.

    Args:
        head_dim: of the run, at which the trial computes.
        include_torchs: also try the flash attention that torch itself has, last.
        documents: tokens attend only to their own document. The version's function for documents is then tried too. One
            that fails is left out, and the version attends to one document after another.
        windows: layers attend within a window. The function for documents computes them too, if it is right.
        versions: where the versions come from; the default is ``installed_versions``.
    """
    def ready(version: FlashAttention) -> FlashAttention:
        works = (documents or windows) and version.varlen is not None and passes_varlen_trials(
            version.varlen, device, head_dim, windows)
        return version if works else replace(version, varlen=None)

    failed: list[str] = []
    for version in (versions or installed_versions)():
        if _passes_trial(version.attend, device, head_dim):
            return FlashSearch(ready(version), tuple(failed))
        failed.append(version.description)
        _restore_torchs_flash()
    if include_torchs:
        own = FlashAttention("torch's flash attention", torch_flash, torch_varlen)
        if _passes_trial(own.attend, device, head_dim):
            return FlashSearch(ready(own), tuple(failed))
        failed.append(own.description)
    return FlashSearch(None, tuple(failed))


def installed_versions() -> Iterator[FlashAttention]:
    """Yield the versions of other packages that can be imported, newest first.

    Versions 3 and 4 are called through torch: its registry puts them in place of torch's own flash attention. A version
    is activated there when the iterator reaches it, so the caller must be done with the one before.
    """
    list_versions = getattr(attention, "list_flash_attention_impls", list)  # torch 2.11 has no registry
    for version in sorted(list_versions(), reverse=True):  # names: "FA4", "FA3"
        try:
            attention.activate_flash_attention_impl(version)
        except (ImportError, RuntimeError, ValueError, OSError):
            continue  # its package is not installed, or not for this GPU
        yield FlashAttention(f"flash attention {version[2:]} (through torch)", torch_flash, torch_varlen)
    try:
        package = importlib.import_module("flash_attn")
        function = package.flash_attn_func
    except (ImportError, AttributeError, OSError):
        return

    def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, longest: int,
               window: int) -> torch.Tensor:
        how = {"window_size": (window - 1, 0)} if window else {}
        return package.flash_attn_varlen_func(q, k, v, cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=longest,
                                              max_seqlen_k=longest, causal=True, **how)

    yield FlashAttention("flash attention 2 (flash-attn)", lambda q, k, v, causal: function(q, k, v, causal=causal),
                         varlen)


def torch_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Return torch's attention with all kernels but flash switched off, so that no slow kernel is used instead."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, s, n, d] -> [b, n, s, d]
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
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


def passes_varlen_trials(varlen: Varlen, device: torch.device, head_dim: int, windows: bool) -> bool:
    """Return whether attention inside documents is right, and with ``windows`` also attention within a window."""
    return all(passes_varlen_trial(varlen, device, head_dim, window) for window in ((0, TRIAL_WINDOW) if windows
                                                                                    else (0,)))


def passes_varlen_trial(varlen: Varlen, device: torch.device, head_dim: int, window: int = 0) -> bool:
    """Return whether attention inside documents is right, forward and backward, with grouped heads and two sequences.

    This also finds a function that is missing or takes other arguments in the installed version.

    Args:
        window: tokens that a query sees; 0: all of its document.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, TRIAL_TOKENS, heads, head_dim, generator=generator).to(device, torch.bfloat16)
               .requires_grad_() for heads in (4, 2, 2))
    mask = AttentionMask(((0, 7, 8), (0, TRIAL_TOKENS - 1)), window)
    attend = DocumentAttention(lambda q, k, v: q, lambda q, k, v, mask: q, varlen)
    seen_from = first_keys(mask, 2, TRIAL_TOKENS).to(device)
    return same_results(lambda: attend(q, k, v, mask),
                        lambda: block_attention(q, k, v, 0, True, None, seen_from)[0], (q, k, v))


def _passes_trial(attend: Attend, device: torch.device, head_dim: int) -> bool:
    """Return whether causal attention with grouped heads is right, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, TRIAL_TOKENS, heads, head_dim, generator=generator).to(device, torch.bfloat16)
               .requires_grad_() for heads in (4, 2, 2))
    return same_results(lambda: attend(q, k, v, True), lambda: block_attention(q, k, v, 0, True, None)[0], (q, k, v))


def _restore_torchs_flash() -> None:
    """Undo the activation of another version in torch's registry."""
    restore = getattr(attention, "restore_flash_attention_impl", None)
    if restore is not None:
        restore()
