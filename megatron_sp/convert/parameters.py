"""Name and shape of every parameter of a model, from its configuration alone."""

from __future__ import annotations

from megatron_sp.config.schema import Model

NORMS_OF_LAYER = ("input_norm", "post_attention_norm")


def parameter_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by name, whole and without padding of the vocabulary.

    Args:
        model: the resolved model flags, vocabulary size included.
    """
    h, f, d = model.hidden_size, model.ffn_hidden_size, model.head_dim
    query, kv = model.num_attention_heads * d, model.num_query_groups * d
    bias = model.add_bias_linear
    shapes: dict[str, tuple[int, ...]] = {"embedding.word.weight": (model.vocab_size, h)}
    if model.position_embedding_type == "learned_absolute":
        shapes["embedding.position.weight"] = (model.max_position_embeddings, h)
    linears = {"attention.query": (query, h, bias or model.add_qkv_bias),
               "attention.key": (kv, h, bias or model.add_qkv_bias),
               "attention.value": (kv, h, bias or model.add_qkv_bias), "attention.output": (h, query, bias)}
    if model.is_gated:
        linears["mlp.gate"] = (f, h, bias)
    linears |= {"mlp.up": (f, h, bias), "mlp.down": (h, f, bias)}
    norms = dict.fromkeys(NORMS_OF_LAYER, h)
    if model.qk_layernorm:
        norms |= {"attention.query_norm": d, "attention.key_norm": d}

    def add_norm(name: str, width: int) -> None:
        shapes[f"{name}.weight"] = (width,)
        if model.normalization == "LayerNorm":
            shapes[f"{name}.bias"] = (width,)

    for layer in range(model.num_layers):
        for name, width in norms.items():
            add_norm(f"layers.{layer}.{name}", width)
        for name, (rows, columns, has_bias) in linears.items():
            shapes[f"layers.{layer}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"layers.{layer}.{name}.bias"] = (rows,)
    add_norm("final_norm", h)
    if model.untie_embeddings_and_output_weights:
        shapes["output.weight"] = (model.vocab_size, h)
    return shapes


def is_norm_weight(name: str) -> bool:
    """Return whether a parameter is the weight of a norm layer."""
    return name.endswith("norm.weight")
