"""Attention cores: softmax attention on one rank, all with one signature.

A core is ``core(q, k, v, mask=..., dropout=...) -> o`` and knows nothing of ranks; Ulysses wraps one. ``AttentionMask``
states the contract. (A ring is made of block kernels instead, see ``block_kernels``.) Which core a run uses is the
choice of ``--attention-core``.

Letters: b batch, s tokens, t queries (the last t of the s tokens), n query heads, g key/value heads (g divides n, query
head i uses key/value head ``i * g // n``), d head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_sp.errors import ConfigError
from megatron_sp.layout.masks.attention_mask import CAUSAL, AttentionMask
from megatron_sp.model.attention.documents import DocumentAttention, Varlen, Windowed, first_keys, send
from megatron_sp.model.attention.flash import FlashAttention, FlashSearch, passes_varlen_trials, torch_varlen
from megatron_sp.model.attention.patterns import hidden_keys
from megatron_sp.model.attention.unfused import AttentionDropout, attend_in_query_blocks, block_attention
from megatron_sp.model.norm_kernels import require_gpu
from megatron_sp.parallel.ring import Once, every_time

CPU = torch.device("cpu")
HALF = (torch.bfloat16, torch.float16)
#: torch's kernels whose memory is linear in s. What is missing is its "math" kernel, which forms an [s, s] tensor.
LINEAR_MEMORY = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


class AttentionCore(Protocol):
    """The signature that all cores share.

    Attributes:
        description: names the kernel in the log.
    """

    description: str

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: AttentionMask = CAUSAL,
                 dropout: AttentionDropout | None = None) -> torch.Tensor:
        """q [b, t, n, d], k, v [b, s, g, d] -> o [b, t, n, d]"""


class UnfusedCore:
    """The quadratic reference, which forms all probabilities at once; for tests and small runs.

    Args:
        once: runs attention, or takes its result where recomputation kept it; see ``ring.Once``. It is used with
            dropout only. Without dropout backward needs the probabilities, so recomputation forms them again.
    """

    description = "unfused"

    def __init__(self, *, once: Once = every_time):
        self.once = once

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: AttentionMask = CAUSAL,
                 dropout: AttentionDropout | None = None) -> torch.Tensor:
        if dropout is not None:
            return attend_in_query_blocks(q, k, v, mask, dropout, self.once)
        earlier = k.shape[1] - q.shape[1]
        seen_from = send(first_keys(mask, *k.shape[:2])[:, earlier:], q.device) if mask.needs else None
        hidden = None
        if mask.pattern is not None:
            hidden = hidden_keys(mask, q.shape[2], (earlier, k.shape[1]), k.shape[1])
        return block_attention(q, k, v, earlier, True, None, seen_from, hidden)[0]


class SDPACore:
    """torch's ``scaled_dot_product_attention`` without its "math" kernel, which forms an [s, s] tensor.

    On a GPU torch uses that kernel without a warning when no other accepts the input. Its flash attention accepts half
    precision and, on every GPU that has it, head widths up to 192. Its memory-efficient attention accepts fp32 too, but
    no grouped heads, and only heads of a multiple of 16 bytes. Neither accepts fp64. So here, on a GPU,

    - each query head gets a copy of its key/value head when flash attention does not accept the type,
    - attention runs in query blocks (slow, but linear in memory) when no kernel accepts the input, and
    - the "math" kernel is switched off.

    Args:
        has_flash: the GPU can run torch's flash attention (Ampere or newer).
        varlen: attends to all documents of a row at once; None: each document is attended to by itself.
        windowed: attends within a window where there is no ``varlen``; default: unfused in query blocks.
        patterned: attends under a pattern of blocks; default: unfused in query blocks.
        once: runs attention, or takes its result where recomputation kept it; see ``ring.Once``.
    """

    description = "torch's scaled_dot_product_attention"

    def __init__(self, *, has_flash: bool = True, varlen: Varlen | None = None, windowed: Windowed | None = None,
                 patterned: Windowed | None = None, once: Once = every_time):
        self.in_query_blocks = partial(attend_in_query_blocks, dropout=None, once=once)
        self.has_flash, self.patterned = has_flash, patterned or self.in_query_blocks
        self.inside_documents = DocumentAttention(self._whole, windowed or self.in_query_blocks, varlen)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: AttentionMask = CAUSAL,
                 dropout: AttentionDropout | None = None) -> torch.Tensor:
        if dropout is not None or needs_query_blocks(q, k, mask):
            return self.in_query_blocks(q, k, v, mask, dropout=dropout)
        if mask.pattern is not None:
            return self.patterned(q, k, v, mask)
        return self.inside_documents(q, k, v, mask) if mask.needs else self._whole(q, k, v)

    def _whole(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend to sequences of one document each."""
        if q.device.type != "cuda":
            return _sdpa(q, k, v)
        form = gpu_form(q.dtype, q.shape[-1], has_flash=self.has_flash)
        if form == "query blocks":
            return self.in_query_blocks(q, k, v, CAUSAL)
        if form == "copied heads":
            k, v = copy_heads(k, q.shape[2]), copy_heads(v, q.shape[2])
        with sdpa_kernel(LINEAR_MEMORY):
            return _sdpa(q, k, v)


def needs_query_blocks(q: torch.Tensor, k: torch.Tensor, mask: AttentionMask) -> bool:
    """Return whether there are more keys than queries, and several queries or a mask beyond causal attention.

    Kernels do not agree on where the causal diagonal is then, and torch's put it elsewhere than ``AttentionMask`` does.
    """
    return q.shape[1] < k.shape[1] and (q.shape[1] > 1 or bool(mask.needs))


def gpu_form(dtype: torch.dtype, head_dim: int, *, has_flash: bool) -> str:
    """Return how ``SDPACore`` attends on a GPU with linear memory: "grouped heads", "copied heads" or "query blocks".

    Source: torch's ``sdp_utils.cpp`` (``can_use_flash_attention``, ``can_use_mem_efficient_attention``).
    """
    if has_flash and dtype in HALF and head_dim <= 192:
        return "grouped heads"
    is_aligned = head_dim * dtype.itemsize % 16 == 0
    return "copied heads" if is_aligned and dtype in (*HALF, torch.float32) else "query blocks"


def copy_heads(x: torch.Tensor, num_query: int) -> torch.Tensor:
    """Give every query head its own copy of its key/value head: [b, s, g, d] -> [b, s, n, d]."""
    copies = num_query // x.shape[2]
    return x.repeat_interleave(copies, 2) if copies > 1 else x


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    causal = bool(q.shape[1] == k.shape[1])  # otherwise there is one query, which sees all keys
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, s, n, d] -> [b, n, s, d]
    o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return o.transpose(1, 2)  # [b, n, s, d] -> [b, s, n, d]


class FlashCore:
    """One version of flash attention, for half precision on a GPU."""

    def __init__(self, flash: FlashAttention, windowed: Windowed | None = None, patterned: Windowed | None = None, *,
                 once: Once = every_time):
        self.description, self.attend = flash.description, flash.attend
        self.in_query_blocks = partial(attend_in_query_blocks, dropout=None, once=once)
        self.patterned = patterned or self.in_query_blocks
        self.inside_documents = DocumentAttention(lambda q, k, v: flash.attend(q, k, v, True),
                                                  windowed or self.in_query_blocks, flash.varlen)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: AttentionMask = CAUSAL,
                 dropout: AttentionDropout | None = None) -> torch.Tensor:
        assert dropout is None, "the configuration check refuses flash attention with attention dropout"
        if needs_query_blocks(q, k, mask):
            return self.in_query_blocks(q, k, v, mask)
        if mask.pattern is not None:
            return self.patterned(q, k, v, mask)
        if mask.needs:
            return self.inside_documents(q, k, v, mask)
        return self.attend(q, k, v, bool(q.shape[1] == k.shape[1]))


@dataclass(frozen=True)
class ChosenCore:
    """The attention core of a run, and warnings for the log about the choice."""

    core: AttentionCore
    warnings: tuple[str, ...] = ()


def choose_core(name: str, *, dropout: bool, device: torch.device = CPU, dtype: torch.dtype = torch.float32,
                head_dim: int = 64, documents: bool = False, windowed: Windowed | None = None,
                patterned: Windowed | None = None, search: FlashSearch | None = None,
                once: Once = every_time) -> ChosenCore:
    """Return the core that ``--attention-core name`` means on this device.

    "auto" means the version of fused attention that a search found, if there was one, else "sdpa". "sdpa" lets torch
    choose among its own kernels.

    Args:
        dtype: the type in which attention computes.
        documents: whether tokens attend only to their own document.
        windowed: attends within a window where the kernel itself cannot; None: the run has no windows.
        patterned: attends under a pattern of blocks; None: the run has none.
        search: see ``flash.find_flash_attention``; None: nothing was searched for.
        once: runs attention, or takes its result where recomputation kept it; see ``ring.Once``.

    Raises:
        ConfigError: the name is "flash", and there is no GPU or no version of flash attention works on it.
    """
    if name == "unfused":
        return ChosenCore(UnfusedCore(once=once))
    if name == "flash":
        require_gpu("--attention-core flash", device)
        if search is not None and search.found is None:
            raise ConfigError(f"--attention-core flash: at head width {head_dim}, no version of fused attention passes "
                              f"its trial on this GPU: {failures_in_words(search)}. Use --attention-core sdpa")
    warnings: tuple[str, ...] = ()
    if search is not None:
        warnings = failure_warnings(search, head_dim, search.found.description if search.found else
                                    SDPACore.description)
        if search.found is not None and not dropout:
            if documents and search.found.varlen is None:
                warnings += (_one_document_after_another(search.found.description, head_dim),)
            return ChosenCore(FlashCore(search.found, windowed, patterned, once=once), warnings)
    return _choose_sdpa(dropout, device, dtype, head_dim, documents, windowed, patterned, warnings, once)


def _choose_sdpa(dropout: bool, device: torch.device, dtype: torch.dtype, head_dim: int, documents: bool,
                 windowed: Windowed | None, patterned: Windowed | None, warnings: tuple[str, ...],
                 once: Once) -> ChosenCore:
    """Return torch's attention, with its kernel for documents and windows if that computes right here."""
    if device.type != "cuda":
        return ChosenCore(SDPACore(windowed=windowed, patterned=patterned, once=once), warnings)
    has_flash = torch.cuda.get_device_capability(device) >= (8, 0)
    form, varlen, windows = gpu_form(dtype, head_dim, has_flash=has_flash), None, windowed is not None
    if form == "query blocks" and not dropout:
        warnings += (query_blocks_warning(dtype, head_dim),)
    if (documents or windows) and form == "grouped heads":
        varlen = torch_varlen if passes_varlen_trials(torch_varlen, device, dtype, head_dim, windows) else None
        if varlen is None and documents:
            warnings += (_one_document_after_another("torch's flash attention", head_dim),)
    return ChosenCore(SDPACore(has_flash=has_flash, varlen=varlen, windowed=windowed, patterned=patterned, once=once),
                      warnings)


def failures_in_words(search: FlashSearch) -> str:
    """Return which versions did not pass their trial, and why; those with one reason together."""
    by_reason: dict[str, list[str]] = {}
    for description, why in search.failed:
        by_reason.setdefault(why, []).append(description)
    return "; ".join(f"{' and '.join(names)} {why}" for why, names in by_reason.items()) or "none takes these inputs"


def failure_warnings(search: FlashSearch, head_dim: int, used: str) -> tuple[str, ...]:
    """Return a sentence on the versions that are installed and cannot be used; none if all passed."""
    if not search.failed:
        return ()
    return (f"in trials at head width {head_dim} on this GPU, {failures_in_words(search)}. The run uses {used} "
            "instead.",)


def query_blocks_warning(dtype: torch.dtype, head_dim: int) -> str:
    """Return what the log says where no kernel of a GPU takes the input."""
    name = str(dtype).removeprefix("torch.")
    if dtype == torch.float64:
        cure = "Give --bf16"
    elif dtype in HALF:
        cure = "Choose a --kv-channels that is a multiple of 8"
    else:
        cure = "Choose a --kv-channels that is a multiple of 4, or give --bf16"
    return (f"attention is computed unfused in blocks of queries, which is many times slower, because no fused kernel "
            f"of this GPU takes {name} at head width {head_dim}. {cure}.")


def _one_document_after_another(description: str, head_dim: int) -> str:
    return (f"the kernel of {description} for documents does not compute right at head width {head_dim} on this GPU. "
            "The run attends to one document after another, which is slow where documents are short.")
