"""Rotary position embedding (Su et al., arXiv 2104.09864), with true global positions.

Angles are computed in fp64: at a million tokens, position x frequency in fp32 is off by 0.06 rad, and in bf16 different
positions get equal values. The rotation is applied to a rank's own tokens, before any exchange.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from megatron_sp.config.schema import Model

# Llama 3.1's rule divides low frequencies, whose wavelength is long compared with the original context, by a factor,
# and leaves high frequencies as they are.
LLAMA3_LOW_FREQUENCY, LLAMA3_HIGH_FREQUENCY, LLAMA3_ORIGINAL_CONTEXT = 1.0, 4.0, 8192

Rotation = tuple[torch.Tensor, torch.Tensor]


def frequencies(model: Model, device: torch.device) -> torch.Tensor:
    """Return the radians per position of each rotated pair, fp64 [rotary_width/2]."""
    width = model.rotary_width
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=device) / width
    freqs = model.scaled_rotary_base ** -exponents
    if model.rope_scaling_type == "yarn":
        kept = _kept_by_yarn(model, device)
        freqs = kept * freqs + (1 - kept) * freqs / model.rotary_scaling_factor
    if model.use_rope_scaling:
        periods = LLAMA3_ORIGINAL_CONTEXT * freqs / (2 * math.pi)  # number of periods in the original context
        share = (periods - LLAMA3_LOW_FREQUENCY) / (LLAMA3_HIGH_FREQUENCY - LLAMA3_LOW_FREQUENCY)
        share = share.clamp(0, 1)
        freqs = (1 - share) * freqs / model.rope_scaling_factor + share * freqs
    return freqs / model.rotary_seq_len_interpolation_factor


def _kept_by_yarn(model: Model, device: torch.device) -> torch.Tensor:
    """Return the share of each pair's frequency that YaRN (Peng et al., arXiv 2309.00071) keeps, fp64 [rotary_width/2].

    It is 1 for pairs that turn more than ``yarn_beta_fast`` times within the original context, 0 for those that turn
    less than ``yarn_beta_slow`` times, and falls linearly with the number of the pair in between.
    """
    width = model.rotary_width

    def pair_that_turns(times: float) -> float:
        reach = model.original_max_position_embeddings / (times * 2 * math.pi)
        return width * math.log(reach) / (2 * math.log(model.rotary_base))

    first, last = pair_that_turns(model.yarn_beta_fast), pair_that_turns(model.yarn_beta_slow)
    if model.yarn_correction_range_round_to_int:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    pairs = torch.arange(width // 2, dtype=torch.float64, device=device)
    return 1 - ((pairs - first) / (last - first or 0.001)).clamp(0, 1)


def rotation(model: Model, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
    """Return cosines and sines of every token's angles, times the attention factor of YaRN.

    Args:
        positions: int64 [b, t]
        dtype: type of the hidden states; the result is at least fp32.
    Returns:
        cos, sin, each [b, t, 1, rotary_width/2]
    """
    angles = positions.to(torch.float64).unsqueeze(-1) * frequencies(model, positions.device)
    wide = torch.promote_types(dtype, torch.float32)
    factor = model.rotary_attention_factor
    cos, sin = (part if factor == 1.0 else part * factor for part in (angles.cos(), angles.sin()))
    return cos.to(wide).unsqueeze(2), sin.to(wide).unsqueeze(2)


#: Elements rotated at a time. A CPU piece stays in a core's cache; a GPU piece is large enough to keep the GPU busy.
CPU_PIECE, GPU_PIECE = 1 << 17, 1 << 25


class _Rotate(torch.autograd.Function):
    """Rotate pairs of elements. The gradient is rotated by the negative angles."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, ctx.interleaved, -1), None, None, None


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, sign: int) -> torch.Tensor:
    """Return x [b, t, n, d] with each pair (a, b) of its first r elements as (a cos - sign b sin, b cos + sign a sin).

    The products are computed in the type of cos and written once, in the type of x. A few tokens are rotated at a time,
    so that the intermediate of that type stays small.
    """
    if torch.compiler.is_compiling():
        return _rotated_as_one(x, cos, sin, interleaved, sign)
    rotated = torch.empty_like(x, memory_format=torch.contiguous_format)
    width = 2 * cos.shape[-1]
    if width < x.shape[-1]:
        rotated[..., width:] = x[..., width:]
    tokens = max(1, (CPU_PIECE if x.device.type == "cpu" else GPU_PIECE) // max(1, x[:, :1].numel()))
    pieces = (y.split(tokens, dim=1) for y in (rotated, x, cos, sin))
    for out, part, part_cos, part_sin in zip(*pieces):
        a, b = _pairs(part[..., :width], interleaved)
        out_a, out_b = _pairs(out[..., :width], interleaved)
        torch.addcmul(a * part_cos, b, part_sin, value=-sign, out=out_a)
        torch.addcmul(b * part_cos, a, part_sin, value=sign, out=out_b)
    return rotated


def _rotated_as_one(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool,
                    sign: int) -> torch.Tensor:
    """Return what ``_rotate`` does, as an expression that ``torch.compile`` makes one kernel of."""
    width = 2 * cos.shape[-1]
    a, b = _pairs(x[..., :width].to(cos.dtype), interleaved)
    # Each half is cast before they are joined, because the compiler may write what is joined to memory.
    turned = ((a * cos - sign * b * sin).to(x.dtype), (b * cos + sign * a * sin).to(x.dtype))
    joined = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat((joined, x[..., width:]), dim=-1) if width < x.shape[-1] else joined


def _pairs(x: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and the second element of each pair, as views."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    a, b = x.chunk(2, dim=-1)
    return a, b


def apply_rotary(x: torch.Tensor, angles: Rotation, interleaved: bool) -> torch.Tensor:
    """Return x with the first r elements of each head rotated.

    Args:
        x: [b, t, n, d]
        angles: cos and sin, [b, t, 1, r/2] with r <= d
        interleaved: an element's partner is its neighbour (GPT-J); otherwise it is the same element of the other half.
    """
    return _Rotate.apply(x, *angles, interleaved)
