"""The layers and models that ``traffic.py`` compares: ours, a hand-written one, transformers' and torchtitan's.

All have the same sizes, compute in bf16, and hold weights without values on the "meta" device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.llama_shape import LlamaShape

META = torch.device("meta")
EPSILON = 1e-5


@dataclass(frozen=True)
class Shape(LlamaShape):
    """The sizes that all compared layers have, and the number of tokens."""

    tokens: int

    @property
    def width(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    def hidden_states(self) -> torch.Tensor:
        """Return hidden states without values, [1, t, h] in bf16, that need a gradient."""
        return torch.empty(1, self.tokens, self.hidden, dtype=torch.bfloat16, device=META, requires_grad=True)

    def angles(self, dtype: torch.dtype) -> torch.Tensor:
        """Return cosines or sines without values, [1, t, d]."""
        return torch.empty(1, self.tokens, self.width, dtype=dtype, device=META)


#: Takes hidden states and returns the layer's output.
Layer = Callable[[torch.Tensor], torch.Tensor]


def our_flags(shape: Shape, layers: int = 1) -> list[str]:
    """Return the flags of a model of Llama's type."""
    return shape.model_flags(layers) + (
        f"--bf16 --fused-kernels torch --seq-length {shape.tokens} --max-position-embeddings {shape.tokens} "
        "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer").split()


def our_run(flags: list[str]) -> Any:
    """Return a resolved run."""
    from megatron_sp.config.load import load_run
    from megatron_sp.config.resolve import with_vocab

    run, _ = load_run(flags, 1)
    return with_vocab(run, run.model.vocab_size)


def our_model(shape: Shape, *further: str) -> Any:
    """Return our model with one layer and weights in bf16 that have no values."""
    from megatron_sp.model.build import assemble, plan_stages
    from megatron_sp.model.kernels import choose_kernels
    from megatron_sp.parallel.mesh import ParallelMesh
    from megatron_sp.parallel.tensor import TensorRegion

    run = our_run([*our_flags(shape), *further])
    mesh = ParallelMesh.build(run.parallel)
    region = TensorRegion.of(mesh, megatron_sp=False)
    kernels = replace(choose_kernels(run, mesh.device), products_in_fp32=True)  # as torch has them on a GPU
    return assemble(run, plan_stages(run)[0], mesh, region, torch.bfloat16, kernels)


def our_layer(shape: Shape, *further: str) -> Layer:
    """Return our layer, with further flags."""
    from megatron_sp.model.context import Context

    block = our_model(shape, *further).layers["0"]
    cos, sin = (torch.empty(1, shape.tokens, 1, shape.width // 2, device=META) for _ in range(2))
    context = Context(torch.empty(1, shape.tokens, dtype=torch.int64, device=META), rotation=(cos, sin))
    return lambda x: block(x, context)


def plain_layer(shape: Shape) -> Layer:
    """Return the hand-written layer."""
    from benchmarks.plain_model import Layer as PlainLayer

    with META:
        layer = PlainLayer(shape.hidden, shape.heads, shape.ffn, shape.kv_heads).bfloat16()
    cos, sin = shape.angles(torch.bfloat16), shape.angles(torch.bfloat16)
    return lambda x: layer(x, cos, sin)


def transformers_config(shape: Shape, attention: str) -> Any:
    """Return the configuration of transformers' Llama."""
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=shape.hidden, num_attention_heads=shape.heads, num_hidden_layers=1,
                         num_key_value_heads=shape.kv_heads, intermediate_size=shape.ffn, vocab_size=shape.vocab,
                         max_position_embeddings=shape.tokens)
    config._attn_implementation = attention
    return config


def transformers_layer(shape: Shape, attention: str) -> Layer:
    """Return transformers' layer; ``attention``: "eager" or "sdpa"."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    with META:
        layer = LlamaDecoderLayer(transformers_config(shape, attention), 0).bfloat16()
    angles = (shape.angles(torch.bfloat16), shape.angles(torch.bfloat16))
    mask = None
    if attention == "eager":
        mask = torch.empty(1, 1, shape.tokens, shape.tokens, dtype=torch.bfloat16, device=META)
    return lambda x: layer(x, attention_mask=mask, position_embeddings=angles)


class CausalAttention(torch.nn.Module):
    """Attention with torchtitan's call signature, for q [b, t, n, d]; its own needs real positions."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def torchtitan_layer(shape: Shape) -> Layer:
    """Return the layer of torchtitan's Llama 3 with these sizes.

    Raises:
        ImportError: torchtitan or a package that it needs is not installed.
    """
    llama = importlib.import_module("torchtitan.models.llama3")
    rope = llama.ComplexRoPE.Config(dim=shape.width, max_seq_len=shape.tokens, theta=500000)
    config, = llama._build_llama3_layers(n_layers=1, dim=shape.hidden, n_heads=shape.heads, n_kv_heads=shape.kv_heads,
                                         hidden_dim=shape.ffn, rope=rope, attn_backend="varlen")
    with META:
        layer = config.build().bfloat16()
    layer.attention.inner_attention = CausalAttention()
    return lambda x: layer(x, None)



# ---------------------------------------------------------------- embedding, output layer and loss

#: Takes tokens, hidden states that the layers return, and labels; returns what backward starts from.
Ends = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], list[torch.Tensor]]


def our_ends(shape: Shape) -> Ends:
    """Return our embedding, angles, final norm, output layer and loss."""
    from megatron_sp.model.context import Context

    model = our_model(shape)

    def compute(tokens: torch.Tensor, x: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        context = Context(torch.empty_like(tokens)).with_rotation(model.config, torch.bfloat16)
        loss = model.output(model.final_norm(x), None, lambda x, weight: model.loss_sum(labels, x, weight))
        return [model.embedding(tokens, context), loss]

    return compute


def transformers_ends(shape: Shape) -> Ends:
    """Return the embedding, angles, final norm, output layer and loss of transformers' Llama."""
    from transformers import LlamaForCausalLM

    with META:
        model = LlamaForCausalLM(transformers_config(shape, "sdpa")).bfloat16()

    def compute(tokens: torch.Tensor, x: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        model.model.rotary_emb(x, torch.empty_like(tokens))
        logits = model.lm_head(model.model.norm(x))
        return [model.model.embed_tokens(tokens), model.loss_function(logits, labels, vocab_size=shape.vocab)]

    return compute


def plain_ends(shape: Shape) -> Ends:
    """Return the embedding, final norm, output layer and loss of the hand-written model."""
    from benchmarks.plain_model import PlainModel

    with META:
        model = PlainModel(layers=1, hidden=shape.hidden, heads=shape.heads, ffn=shape.ffn, vocab=shape.vocab,
                           seq_length=shape.tokens).bfloat16()

    def compute(tokens: torch.Tensor, x: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        logits = model.output(model.norm(x))
        return [model.embedding(tokens), F.cross_entropy(logits.flatten(0, 1), labels.flatten())]

    return compute
