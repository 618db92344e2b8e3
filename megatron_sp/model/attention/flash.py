"""Flash attention of other packages: which versions are installed, and which of them computes right on this GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn import attention

from megatron_sp.model.attention.unfused import block_attention
from megatron_sp.model.kernel_trial import same_results

#: (q [b, s, n, d], k, v [b, s, g, d], causal) -> o [b, s, n, d]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]
#: Tokens of the trial: more than one block of a flash kernel, and not a multiple of its size.
TRIAL_TOKENS = 300


@dataclass(frozen=True)
class FlashAttention:
    """One version of flash attention, ready to be called."""

    description: str
    attend: Attend


@dataclass(frozen=True)
class FlashSearch:
    """The outcome of a search.

    Args:
        found: the newest version that passed its trial, or None.
        failed: descriptions of the newer versions that are installed and did not pass.
    """

    found: FlashAttention | None
    failed: tuple[str, ...]


def find_flash_attention(device: torch.device, head_dim: int, *, include_torchs: bool,
                         versions: Callable[[], Iterator[FlashAttention]] | None = None) -> FlashSearch:
    """Try the installed versions of flash attention, newest first, until one agrees with unfused attention.

    A version may be installed and still fail: on a GPU it does not know, at this head width, or because its interface
    changed. The next older one is then tried.

    Args:
        head_dim: of the run, at which the trial computes.
        include_torchs: also try the flash attention that torch itself has, last.
        versions: where the versions come from; the default is ``installed_versions``.
    """
    failed: list[str] = []
    for version in (versions or installed_versions)():
        if _passes_trial(version.attend, device, head_dim):
            return FlashSearch(version, tuple(failed))
        failed.append(version.description)
        _restore_torchs_flash()
    if include_torchs:
        own = FlashAttention("torch's flash attention", torch_flash)
        if _passes_trial(own.attend, device, head_dim):
            return FlashSearch(own, tuple(failed))
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
        yield FlashAttention(f"flash attention {version[2:]} (through torch)", torch_flash)
    try:
        function = importlib.import_module("flash_attn").flash_attn_func
    except (ImportError, AttributeError, OSError):
        return
    yield FlashAttention("flash attention 2 (flash-attn)", lambda q, k, v, causal: function(q, k, v, causal=causal))


def torch_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Return torch's attention with all kernels but flash switched off, so that no slow kernel is used instead."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, s, n, d] -> [b, n, s, d]
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
        o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return o.transpose(1, 2)


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
