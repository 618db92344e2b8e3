"""Rotary position embedding (Su et al., arXiv 2104.09864), with true global positions.

Angles are formed in fp64: position x frequency in fp32 is off by 0.06 rad at a million tokens,
in bf16 positions collide. Applied before any exchange, on the rank's own tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from megatron_sp.config.schema import Model

# Llama-3.1's rule: wavelengths beyond the original context are stretched, short ones kept.
LLAMA3_LOW_FREQUENCY, LLAMA3_HIGH_FREQUENCY, LLAMA3_ORIGINAL_CONTEXT = 1.0, 4.0, 8192

Rotation = tuple[torch.Tensor, torch.Tensor]


def rotary_width(model: Model) -> int:
    """Elements of each head that are rotated."""
    return int(model.head_dim * model.rotary_percent) // 2 * 2


def frequencies(model: Model, device: torch.device) -> torch.Tensor:
    """Radians per position of each rotated pair, fp64 [rotary_width/2]."""
    width = rotary_width(model)
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=device) / width
    freqs = model.rotary_base ** -exponents
    if model.use_rope_scaling:
        turns = LLAMA3_ORIGINAL_CONTEXT * freqs / (2 * math.pi)
        share = (turns - LLAMA3_LOW_FREQUENCY) / (LLAMA3_HIGH_FREQUENCY - LLAMA3_LOW_FREQUENCY)
        share = share.clamp(0, 1)
        freqs = (1 - share) * freqs / model.rope_scaling_factor + share * freqs
    return freqs / model.rotary_seq_len_interpolation_factor


def rotation(model: Model, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
    """Cosines and sines of every token's angles.

    Args:
        positions: int64 [b, t]
        dtype: of the model's storage; the result has at least fp32.
    Returns:
        cos, sin, each [b, t, 1, rotary_width/2]
    """
    angles = positions.to(torch.float64).unsqueeze(-1) * frequencies(model, positions.device)
    wide = torch.promote_types(dtype, torch.float32)
    return angles.cos().to(wide).unsqueeze(2), angles.sin().to(wide).unsqueeze(2)


#: Elements turned at a time: a part of a core's cache; on a GPU large enough to keep it busy.
CPU_PIECE, GPU_PIECE = 1 << 17, 1 << 25


class _Turn(torch.autograd.Function):
    """Rotate pairs of elements; backward turns the gradient the other way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _turn_in_pieces(x, cos, sin, interleaved)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _turn_in_pieces(grad, cos, -sin, ctx.interleaved), None, None, None


def _turn_in_pieces(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """``_turn`` of a few tokens at a time, so that its intermediates, wider than x, stay small."""
    tokens = max(1, (CPU_PIECE if x.device.type == "cpu" else GPU_PIECE) // max(1, x[:, :1].numel()))
    if tokens >= x.shape[1] or torch.compiler.is_compiling():
        return _turn(x, cos, sin, interleaved)
    turned = torch.empty_like(x, memory_format=torch.contiguous_format)
    pieces = (y.split(tokens, dim=1) for y in (turned, x, cos, sin))
    for out, part, part_cos, part_sin in zip(*pieces):
        out.copy_(_turn(part, part_cos, part_sin, interleaved))
    return turned


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Each pair (a, b) of x [b, t, n, r] becomes (a cos - b sin, b cos + a sin), computed in the type of cos."""
    if interleaved:
        cos, sin = cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)
        partner = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        partner = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x.to(cos.dtype) * cos, partner.to(cos.dtype), sin).to(x.dtype)


def apply_rotary(x: torch.Tensor, turn: Rotation, interleaved: bool) -> torch.Tensor:
    """Rotate the first elements of each head.

    Args:
        x: [b, t, n, d]
        turn: cos and sin, [b, t, 1, r/2] with r <= d
        interleaved: pairs are neighbours (GPT-J) instead of the two halves.
    """
    cos, sin = turn
    width = 2 * cos.shape[-1]
    if width == x.shape[-1]:
        return _Turn.apply(x, cos, sin, interleaved)
    return torch.cat((_Turn.apply(x[..., :width], cos, sin, interleaved), x[..., width:]), dim=-1)
