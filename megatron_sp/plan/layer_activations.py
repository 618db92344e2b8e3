"""Activations of one layer: what its forward keeps for backward, and what its backward needs at its peaks.

Each term is a tensor of the code in ``model/`` and ``parallel/``; docs/background/memory.md has the formulas in prose.
All figures are bytes on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_sp.config.schema import Run
from megatron_sp.plan.sizes import FP32, Sizes, Weights

#: Feed-forward activations kept, and the most at a time in backward, in widths f, by activation.
FFN_KEPT = {"swiglu": 4, "gelu": 2, "openai_gelu": 2, "squared_relu": 2, "quick_gelu": 3}
FFN_PEAK = {"swiglu": 6, "gelu": 3, "openai_gelu": 3, "squared_relu": 4, "quick_gelu": 6}
#: Queries per block where probabilities are formed (``model.attention_core``).
QUERY_BLOCK = 512


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer on one rank.

    Attributes:
        x: its input.
        attention: what attention keeps beside the input.
        exchanged: of that, what selective recomputation keeps too.
        mlp: what the feed-forward half keeps, its input x1 included.
        backward: the most that backward holds at a time: kept tensors not yet freed, gradients, input.
        backward_mlp, backward_attention: the same with the halves kept apart.
    """

    x: float
    attention: float
    exchanged: float
    mlp: float
    backward: float
    backward_mlp: float
    backward_attention: float


def layer_memory(run: Run, *, device: str = "cpu") -> LayerMemory:
    """Of any one layer; recomputation is left to the caller."""
    sizes, memory = Sizes.of(run), run.memory
    e, x = sizes.element, float(sizes.outside * sizes.hidden * sizes.element)
    n1 = float(sizes.inside * sizes.hidden * e)  # gathered where tokens are split over tp
    mask = sizes.outside * sizes.hidden if run.model.hidden_dropout > 0 else 0
    groups = memory.attention_head_groups
    core = _core(run, sizes, device)
    part = _core(run, _one_group(sizes, groups), device) if groups > 1 else core
    gathered = n1 if run.parallel.megatron_sp and run.parallel.tp > 1 else 0.0  # of a gradient, or its summand
    stats = sizes.outside * FP32 * (2 if run.model.normalization == "LayerNorm" else 1)

    if groups > 1:
        own_norm = run.parallel.tp == 1  # every group normalises by itself
        attention = 0.0 if own_norm else n1 + stats
        extra = x if own_norm else 0.0
        # the group's tensors; two parts of the gradient of n1, or the parts summed so far
        backward_attention = x + n1 + 2 * x + gathered + max(part.peak, part.inputs + 2 * n1) + extra
    else:
        attention = n1 + stats + core.kept
        backward_attention = x + n1 + x + gathered + max(core.peak, core.inputs + 2 * n1)
    attention += mask

    ffn, peak, tile = _feed_forward(run, sizes)
    x1_n2 = x + n1 + stats + mask
    grad = x + gathered + (x if mask else 0)
    if tile:
        at_mlp = x1_n2 + grad + n1 + peak  # x1, n2, gradients of both ends, a tile
        mlp = x1_n2
    else:
        at_mlp = max(x1_n2 + grad + peak, x1_n2 + grad + ffn / 2 + 2 * n1)
        mlp = x1_n2 + ffn
    backward_mlp = max(at_mlp, 4 * x)
    backward = max(x + attention + backward_mlp, backward_attention + mask)
    return LayerMemory(x, attention, core.exchanged, mlp, backward, backward_mlp, backward_attention)


@dataclass(frozen=True)
class _Core:
    """Attention between the projections: bytes kept, at the peak of backward, of its inputs' gradients."""

    kept: float
    peak: float
    inputs: float
    exchanged: float


def _core(run: Run, sizes: Sizes, device: str) -> _Core:
    e, t, parallel = sizes.element, sizes.inside, run.parallel
    outside = t * (sizes.query + 2 * sizes.kv) * e  # q, k, v before any exchange
    q, kv = t * sizes.core_query * e, t * sizes.core_kv * e
    qkv = q + 2 * kv
    lse = t * sizes.core_heads * FP32
    kept, exchanged = qkv + q + lse, q + lse
    if run.model.qk_layernorm:
        kept += t * (sizes.query + sizes.kv) * e
    if parallel.ulysses > 1:  # the output a second time, in this rank's tokens
        kept += t * sizes.query * e
        if device == "gpu" or not run.parallel.shared_memory or run.train.compile:  # copies in memory are made again
            exchanged += qkv + t * sizes.query * e
    wide = t * sizes.core_query * FP32 if device == "gpu" else 0  # the gradient of q is summed in fp32
    peak = qkv + q + lse + q + qkv + wide  # q, k, v, o, dO, dq, dk, dv
    if parallel.ring > 1:
        travel = 2 * (2 * kv) + 2 * (2 * t * sizes.core_kv * FP32)  # visiting block and its gradient, twice
        peak += travel + (t * sizes.core_query * FP32 if e < FP32 else q)
        exchanged = parallel.ring * (q + lse)
    if parallel.ulysses > 1:
        peak = max(peak, 2 * qkv + outside)
    if run.train.attention_backend == "unfused":
        square = sizes.core_heads * t * run.data.seq_length / parallel.ring * FP32
        kept, peak = kept + square, peak + 3 * square
    elif run.model.attention_dropout > 0:
        peak += 6 * sizes.core_heads * run.train.micro_batch_size * min(
            QUERY_BLOCK, run.data.seq_length) * run.data.seq_length * FP32 / parallel.ulysses
    return _Core(kept, peak, outside, exchanged)


def _one_group(sizes: Sizes, groups: int) -> Sizes:
    """The same rank with the heads of one group."""
    return replace(sizes, query=-(-sizes.query // groups), kv=-(-sizes.kv // groups),
                   core_query=sizes.core_query / groups, core_kv=max(1.0, sizes.core_kv / groups),
                   core_heads=sizes.core_heads / groups)


def _feed_forward(run: Run, sizes: Sizes) -> tuple[float, float, bool]:
    """Bytes of width f kept, at the peak of backward, and whether they are a tile's."""
    activation, tile = run.model.activation, run.memory.mlp_tile_size
    local = run.data.seq_length // run.parallel.sp
    wide = sizes.ffn * sizes.element
    kept, peak = FFN_KEPT[activation] * wide, FFN_PEAK[activation] * wide
    if not 0 < tile < local:
        return kept * sizes.inside, peak * sizes.inside, False
    tokens = run.train.micro_batch_size * tile
    weights = Weights.of(run).mlp
    gradients = weights * (FP32 + sizes.element)  # summed in fp32, beside one tile's
    return 0.0, tokens * (peak + 2 * sizes.hidden * sizes.element) + gradients, True
