"""The baseline of ``step_time.py``: a Llama-type model and a training step written in plain PyTorch.

It imports nothing from megatron_sp, is not parallel and is not tuned. Its parts are ``nn.Linear``, ``nn.RMSNorm``,
``F.scaled_dot_product_attention``, ``F.cross_entropy`` and fused AdamW.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """Return (-b, a) for the two halves (a, b) of the last dimension."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class Layer(nn.Module):
    """A layer with pre-norm attention and pre-norm SwiGLU; ``kv_heads``: key/value heads, 0 for as many as heads."""

    def __init__(self, hidden: int, heads: int, ffn: int, kv_heads: int = 0):
        super().__init__()
        self.width, self.is_grouped = hidden // heads, kv_heads not in (0, heads)
        self.input_norm, self.post_norm = nn.RMSNorm(hidden, eps=1e-5), nn.RMSNorm(hidden, eps=1e-5)
        self.q, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(hidden, (kv_heads or heads) * self.width, bias=False) for _ in range(2))
        self.gate, self.up = nn.Linear(hidden, ffn, bias=False), nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer, ``[b, s, h]``, for the input x, ``[b, s, h]``."""
        normed = self.input_norm(x)
        q, k, v = (project(normed).unflatten(-1, (-1, self.width)).transpose(1, 2)  # -> [b, n, s, d]
                   for project in (self.q, self.k, self.v))
        q, k = (y * cos + rotate_half(y) * sin for y in (q, k))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.is_grouped)
        x = x + self.o(o.transpose(1, 2).flatten(2))  # [b, n, s, d] -> [b, s, h]
        normed = self.post_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class PlainModel(nn.Module):
    """A decoder: embedding, layers, final norm, output layer."""

    def __init__(self, *, layers: int, hidden: int, heads: int, ffn: int, vocab: int, seq_length: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads, ffn) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.output = nn.Linear(hidden, vocab, bias=False)
        width = hidden // heads
        frequencies = 10000.0 ** (-torch.arange(0, width, 2) / width)
        angles = torch.arange(seq_length).unsqueeze(1) * frequencies  # [s, d/2]
        angles = torch.cat((angles, angles), dim=1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[b, s, v]`` of tokens ``[b, s]``."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.output(self.norm(x))


def make_step(model: PlainModel, tokens: torch.Tensor, labels: torch.Tensor) -> Callable[[], float]:
    """Return a function that makes one training step on a fixed batch and returns its loss.

    A step is forward, backward, clipping and AdamW.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> float:
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step
