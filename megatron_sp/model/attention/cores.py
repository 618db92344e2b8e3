"""Attention cores: softmax attention on one rank, behind one signature.

A core is ``core(q, k, v, causal=..., dropout=...) -> o``; it knows nothing of ranks. What it can do
is declared in its ``capabilities`` and asked before a run starts. ``attend_with_lse`` also gives the
log-sum-exp of each query's scores, with which partial results over blocks of keys can be merged.

Letters: b batch, s tokens, n query heads, g key/value heads (g divides n, head i uses head
``i * g // n``), d head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from megatron_sp.activations.recompute import recompute
from megatron_sp.errors import ConfigError
from megatron_sp.model.other_kernels import TORCH_FLASH, agree, flash_attention, forget_flash_attention
from megatron_sp.parallel.random import Dropout

CPU = torch.device("cpu")
QUERY_BLOCK = 512  # queries per block where a core must form probabilities


@dataclass(frozen=True)
class Capabilities:
    """What an attention core supports."""

    causal: bool = True
    gqa: bool = True
    dropout: bool = False
    lse: bool = False
    window: bool = False
    documents: bool = False
    linear_memory: bool = True


@dataclass(frozen=True)
class AttentionDropout:
    """Dropout of attention probabilities: which samples and which heads the core is looking at."""

    dropout: Dropout
    sample_ids: torch.Tensor  # int64 [b], CPU
    first_head: int

    def keep(self, first_query: int, queries: int, keys: int, heads: int, device: torch.device) -> torch.Tensor:
        """The mask of a block of queries, bool [b, n, queries, keys]; equal in every layout."""
        return torch.stack([torch.stack([
            self.dropout.keep((queries, keys), device, sample, self.first_head + head, first_query)
            for head in range(heads)]) for sample in self.sample_ids.tolist()])


class AttentionCore(Protocol):
    """The signature all cores share."""

    capabilities: Capabilities
    description: str

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True,
                 dropout: AttentionDropout | None = None) -> torch.Tensor:
        """q [b, s, n, d], k, v [b, s, g, d] -> o [b, s, n, d]"""


def block_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first_query: int, causal: bool,
                    dropout: AttentionDropout | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Unfused attention of one block of queries over the given keys.

    Args:
        q: [b, t, n, d], queries ``first_query ..`` of the sequence
        k, v: [b, s', g, d], keys from position 0
    Returns:
        o [b, t, n, d] and the log-sum-exp of the scores [b, n, t], at least fp32
    """
    batch, queries, heads, width = q.shape
    keys, groups = k.shape[1], k.shape[2]
    grouped = q.unflatten(2, (groups, heads // groups))
    scores = torch.einsum("bqgrd,bkgd->bgrqk", grouped, k)  # [b, t, n, d] -> [b, g, n/g, t, s']
    scores = scores.to(torch.promote_types(q.dtype, torch.float32)).div_(math.sqrt(width))
    if causal:
        position = torch.arange(first_query, first_query + queries, device=q.device).unsqueeze(1)
        scores = scores.masked_fill_(torch.arange(keys, device=q.device) > position, -torch.inf)
    lse = scores.logsumexp(-1)
    probabilities = (scores - lse.unsqueeze(-1)).exp()
    if dropout is not None:
        keep = dropout.keep(first_query, queries, keys, heads, q.device).view_as(probabilities)
        probabilities = probabilities * keep
    o = torch.einsum("bgrqk,bkgd->bqgrd", probabilities.to(v.dtype), v)  # -> [b, t, g, n/g, d]
    if dropout is not None:
        o = o / (1.0 - dropout.dropout.probability)
    return o.flatten(2, 3), lse.flatten(1, 2)


class UnfusedCore:
    """The quadratic reference: forms all probabilities at once; for tests and small runs."""

    capabilities = Capabilities(dropout=True, lse=True, linear_memory=False)
    description = "unfused"

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True,
                 dropout: AttentionDropout | None = None) -> torch.Tensor:
        return block_attention(q, k, v, 0, causal, dropout)[0] if dropout is None else query_blocks(
            q, k, v, causal, dropout)

    def attend_with_lse(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
                        causal: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """As a call, and the log-sum-exp [b, n, s]."""
        return block_attention(q, k, v, 0, causal, None)


def query_blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool,
                 dropout: AttentionDropout | None) -> torch.Tensor:
    """Attention in blocks of queries, each recomputed in backward; memory linear in s.

    This is how probabilities are dropped: fused kernels cannot replay a keyed mask, and torch's own
    dropout falls back to a quadratic kernel.
    """
    def block(q_block: torch.Tensor, k_seen: torch.Tensor, v_seen: torch.Tensor, first: int) -> torch.Tensor:
        return block_attention(q_block, k_seen, v_seen, first, causal, dropout)[0]

    outputs = []
    for first in range(0, q.shape[1], QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, q.shape[1])
        seen = last if causal else k.shape[1]
        outputs.append(recompute(block, q[:, first:last], k[:, :seen], v[:, :seen], first))
    return torch.cat(outputs, dim=1)


class SDPACore:
    """torch's scaled_dot_product_attention; dropout in query blocks."""

    capabilities = Capabilities(dropout=True)
    description = "torch's scaled_dot_product_attention"

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True,
                 dropout: AttentionDropout | None = None) -> torch.Tensor:
        if dropout is not None:
            return query_blocks(q, k, v, causal, dropout)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, s, n, d] -> [b, n, s, d]
        o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
        return o.transpose(1, 2)  # [b, n, s, d] -> [b, s, n, d]


class FlashCore:
    """Flash attention as found on this machine, for half precision on a GPU; ``description`` says which."""

    capabilities = Capabilities()

    def __init__(self, device: torch.device):
        self.description, self.function = flash_attention(device)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True,
                 dropout: AttentionDropout | None = None) -> torch.Tensor:
        assert dropout is None, "refused at start: flash attention cannot replay a keyed mask"
        return self.function(q, k, v, causal)


def found_flash(device: torch.device, head_dim: int) -> FlashCore | None:
    """Another package's flash attention that agrees with the unfused core at this head width.

    torch's own is no better than what ``SDPACore`` chooses, and takes fewer shapes.
    """
    core = FlashCore(device)
    if core.description != TORCH_FLASH:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, 64, heads, head_dim, generator=generator).to(device, torch.bfloat16).requires_grad_()
                   for heads in (4, 2, 2))
        if agree(lambda: core(q, k, v), lambda: UnfusedCore()(q, k, v), (q, k, v)):
            return core
    forget_flash_attention()
    return None


def build_core(name: str, *, dropout: bool, device: torch.device = CPU, half_head_dim: int = 0) -> AttentionCore:
    """The core of this name.

    Args:
        half_head_dim: head width where attention computes in half precision, else 0; lets auto look for flash.

    Raises:
        ConfigError: it lacks a capability that the run needs, or a GPU.
    """
    core: AttentionCore | None = None
    if name == "flash":
        core = FlashCore(device)
    elif name == "auto" and device.type == "cuda" and half_head_dim and not dropout:
        core = found_flash(device, half_head_dim)
    core = core or (UnfusedCore() if name == "unfused" else SDPACore())
    if dropout and not core.capabilities.dropout:
        raise ConfigError(f"--attention-core {name} cannot drop attention probabilities; "
                          "pass --attention-dropout 0 or another backend")
    return core
