"""Bytes of one layer's activations: what its forward keeps for backward, and the most that its backward holds.

Each term is a tensor of the code in ``model/`` and ``parallel/``; docs/background/memory.md has the formulas in prose.
The names of the tensors, in the order of the forward:

    x  --norm-->  n1  --projections-->  q, k, v  --attention-->  o  --output projection, + x-->  x1
    x1 --norm-->  n2  --up, gate-->  tensors of width f  --down, + x1-->  x of the next layer

Forward keeps x, n1, q, k, v, o and the log-sum-exp (the attention half), then x1, n2 and the tensors of width f (the
feed-forward half). Backward frees them in the opposite order. It has two peaks:

    held bytes of one layer
      ^                    feed-forward peak     attention peak
      |                    ______                  ____
      |               ____|      |____        ____|    |___
      |          ____|                |______|             |____
      |_________|  kept by forward grows, backward frees        |___
      +----------------------------------------------------------------> time
       forward: attention, feed-forward | backward: feed-forward, attention
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_sp.config.schema import Run
from megatron_sp.layout.recomputation import recompute_unit
from megatron_sp.layout.tiles import QUERY_BLOCK, num_chunks, tokens_at_once
from megatron_sp.plan.sizes import FP32, Sizes, Weights, forms_probabilities

#: For each activation function, how many tensors of width f forward keeps, and how many backward holds at its peak.
FFN_KEPT = {"swiglu": 4, "gelu": 2, "openai_gelu": 2, "squared_relu": 2, "quick_gelu": 3}
FFN_PEAK = {"swiglu": 6, "gelu": 3, "openai_gelu": 3, "squared_relu": 4, "quick_gelu": 6}


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer on one rank.

    Attributes:
        x: the layer's input.
        attention: what the attention half keeps besides x.
        exchanged: the part of ``attention`` that selective recomputation keeps: the results of attention and of its
            exchange.
        results: the part of ``exchanged`` that attention returned. Offload moves it to the host.
        mlp: what the feed-forward half keeps, with its input x1.
        backward: the most that backward holds at a time: x, kept tensors that are not freed yet, and gradients.
        backward_mlp, backward_attention: the same for each half, when the other half keeps nothing at that time.
    """

    x: float
    attention: float
    exchanged: float
    results: float
    mlp: float
    backward: float
    backward_mlp: float
    backward_attention: float


def layer_memory(run: Run, *, device: str = "cpu") -> LayerMemory:
    """Return the bytes of one layer without recomputation; ``plan.memory`` adds what recomputation changes.

    Args:
        device: "cpu" or "gpu".
    """
    sizes, memory = Sizes.of(run), run.memory
    e, x = sizes.element, float(sizes.outside * sizes.hidden * sizes.element)
    n1 = float(sizes.inside * sizes.hidden * e)  # all tokens of the tp region, also where x is split over tp
    mask = sizes.outside * sizes.hidden if run.model.hidden_dropout > 0 else 0
    groups = memory.attention_head_groups
    core = _core(run, sizes, device)
    group_core = _core(run, _one_group(sizes, groups), device) if groups > 1 else core
    # With --sequence-parallel, a gradient gathered from the tp ranks, or this rank's part of the sum over them.
    gathered = n1 if run.parallel.megatron_sp and run.parallel.tp > 1 else 0.0
    stats = sizes.outside * FP32 * (2 if run.model.normalization == "LayerNorm" else 1)

    if groups > 1:
        own_norm = run.parallel.tp == 1  # then every group applies the norm again and n1 is not kept
        attention = 0.0 if own_norm else n1 + stats
        extra = x if own_norm else 0.0
        # 2 x: the gradients of the output and of the input, summed over the groups so far
        backward_attention = (x + n1 + 2 * x + gathered + max(group_core.peak, group_core.qkv_gradients + 2 * n1)
                              + extra)
    else:
        attention = n1 + stats + core.kept
        backward_attention = x + n1 + x + gathered + max(core.peak, core.qkv_gradients + 2 * n1)
    attention += mask

    ffn, peak, tile = _feed_forward(run, sizes)
    x1_n2 = x + n1 + stats + mask
    grad = x + gathered + (x if mask else 0)  # gradient of the layer's output; with dropout also before its mask
    if tile:
        at_mlp = x1_n2 + grad + n1 + peak  # the gradient of n2 has the size of n1
        mlp = x1_n2
    else:  # two candidates: backward of the activation function, and then of the up and gate projections
        at_mlp = max(x1_n2 + grad + peak, x1_n2 + grad + ffn / 2 + 2 * n1)
        mlp = x1_n2 + ffn
    backward_mlp = max(at_mlp, 4 * x)
    backward = max(x + attention + backward_mlp, backward_attention + mask)
    return LayerMemory(x, attention, core.exchanged, core.results, mlp, backward, backward_mlp, backward_attention)


def offloaded_results(run: Run, layer: LayerMemory) -> float:
    """Return the bytes of attention's results that ``--offload-activations`` moves to host memory, of one layer."""
    memory = run.memory
    selective = memory.recompute_granularity == "selective" and memory.attention_head_groups == 1
    return layer.results if selective and recompute_unit(memory) == 1 else 0.0


@dataclass(frozen=True)
class _Core:
    """Bytes of attention between the projections.

    Attributes:
        kept: bytes that forward keeps for backward.
        peak: largest number of bytes that backward holds at one time.
        qkv_gradients: the gradients of q, k and v, with which backward leaves attention.
        exchanged: bytes that selective recomputation keeps.
        results: the part of ``exchanged`` that attention returned.
    """

    kept: float
    peak: float
    qkv_gradients: float
    exchanged: float
    results: float


def _core(run: Run, sizes: Sizes, device: str) -> _Core:
    e, t, parallel = sizes.element, sizes.inside, run.parallel
    before_exchange = t * (sizes.query + 2 * sizes.kv) * e  # q, k, v of this rank's tokens
    q, kv = t * sizes.core_query * e, t * sizes.core_kv * e
    if device == "gpu" and e == FP32 and parallel.ring == 1 and not run.model.attention_dropout:
        kv = q  # no fused kernel takes grouped heads in fp32, so each query head has a copy (``SDPACore``)
    qkv = q + 2 * kv
    lse = t * sizes.core_heads * FP32
    # What selective recomputation keeps of attention: its merged output and, if backward uses it, the log-sum-exp.
    results = 0.0 if forms_probabilities(run) else q if run.model.attention_dropout else q + lse
    kept, exchanged = qkv + q + lse, results
    if run.model.qk_layernorm:
        kept += t * (sizes.query + sizes.kv) * e
    if parallel.ulysses > 1:  # the output is kept as attention gives it, and again as the exchange returns it
        kept += t * sizes.query * e
        # Selective recomputation keeps what all-to-alls returned. An exchange through shared memory is copied again.
        if device == "gpu" or not run.parallel.shared_memory or run.train.compile:
            exchanged += qkv + t * sizes.query * e
    dq_in_fp32 = t * sizes.core_query * FP32 if device == "gpu" else 0  # GPU kernels sum dq in an fp32 buffer
    peak = qkv + q + lse + q + qkv + dq_in_fp32  # q, k, v, o, log-sum-exp, dO, dq, dk, dv
    if parallel.ring > 1:
        # Buffers to send and to receive a block of keys and values and one of their gradients, and the own gradient.
        ring_buffers = 2 * (2 * kv) + 3 * (2 * t * sizes.core_kv * FP32)
        peak += ring_buffers + (t * sizes.core_query * FP32 if e < FP32 else q)
    if parallel.ulysses > 1:
        peak = max(peak, 2 * qkv + before_exchange)
    if num_chunks(run) > 1:
        # The gradients of one earlier chunk's keys and values, when the store makes its sum of them; dq in fp32.
        peak += 2 * kv + 2 * t * sizes.core_kv * FP32 + (t * sizes.core_query * FP32 if e < FP32 else 0)
        if not run.model.attention_dropout:  # the store of keys and values keeps the results, not the layer
            exchanged -= results
    one_by_one = run.data.reset_attention_mask and (device == "cpu" or e == FP32) and num_chunks(run) == 1
    if one_by_one and parallel.ring == parallel.ulysses == 1:
        kept, peak = kept + q, peak + q  # the outputs of single documents, and their concatenation
    if forms_probabilities(run):
        square = sizes.core_heads * t * run.data.seq_length * FP32
        kept, peak = kept + square, peak + 3 * square
    elif run.model.attention_dropout > 0:
        peak += 6 * sizes.core_heads * run.train.micro_batch_size * min(
            QUERY_BLOCK, run.data.seq_length) * run.data.seq_length * FP32 / parallel.ulysses
    return _Core(kept, peak, before_exchange, exchanged, results if num_chunks(run) == 1 else 0.0)


def _one_group(sizes: Sizes, groups: int) -> Sizes:
    """Return the sizes of the same rank with the heads of one of its groups."""
    return replace(sizes, query=-(-sizes.query // groups), kv=-(-sizes.kv // groups),
                   core_query=sizes.core_query / groups, core_kv=max(1.0, sizes.core_kv / groups),
                   core_heads=sizes.core_heads / groups)


def _feed_forward(run: Run, sizes: Sizes) -> tuple[float, float, bool]:
    """Return the bytes of the tensors of width f: kept by forward, held at the peak of backward.

    The third value says whether they are those of one tile. The peak then includes the tile's gradients of the weights.
    """
    activation, tile = run.model.activation, run.memory.mlp_tile_size
    local = tokens_at_once(run) // run.parallel.sp
    wide = sizes.ffn * sizes.element
    kept, peak = FFN_KEPT[activation] * wide, FFN_PEAK[activation] * wide
    if not 0 < tile < local:
        return kept * sizes.inside, peak * sizes.inside, False
    tokens = run.train.micro_batch_size * tile
    weights = Weights.of(run).mlp
    gradients = weights * (FP32 + sizes.element)  # the sum over the tiles in fp32, and one tile's
    return 0.0, tokens * (peak + 2 * sizes.hidden * sizes.element) + gradients, True
