"""Rotary position embedding (Su et al., arXiv 2104.09864), with true global positions.

Angles are formed in fp64: position x frequency in fp32 is off by 0.06 rad at a million tokens,
in bf16 positions collide. Applied before any exchange, on the rank's own tokens.
"""

from __future__ import annotations

import math

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


def apply_rotary(x: torch.Tensor, turn: Rotation, interleaved: bool) -> torch.Tensor:
    """Rotate the first elements of each head.

    Args:
        x: [b, t, n, d]
        turn: cos and sin, [b, t, 1, r/2] with r <= d
        interleaved: pairs are neighbours (GPT-J) instead of the two halves.
    """
    cos, sin = turn
    width = 2 * cos.shape[-1]
    turned, rest = x[..., :width].to(cos.dtype), x[..., width:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    turned = turned.to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
