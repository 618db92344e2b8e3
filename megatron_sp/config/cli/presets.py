"""Published model shapes by name. ``--model-preset`` fills in the flags that are not given."""

from __future__ import annotations

from typing import Any

_GPT2: dict[str, Any] = dict(position_embedding_type="learned_absolute", normalization="LayerNorm",
                             activation="openai_gelu", max_position_embeddings=1024)
_GPT3: dict[str, Any] = dict(position_embedding_type="learned_absolute", normalization="LayerNorm", activation="gelu")
_LLAMA: dict[str, Any] = dict(position_embedding_type="rope", normalization="RMSNorm", activation="swiglu",
                              add_bias_linear=False, untie_embeddings_and_output_weights=True, attention_dropout=0.0,
                              hidden_dropout=0.0)


def _shape(layers: int, hidden: int, heads: int, **more: Any) -> dict[str, Any]:
    return dict(num_layers=layers, hidden_size=hidden, num_attention_heads=heads, **more)


#: Name -> fields of ``schema.Model``. Sources: Radford et al. 2019 and its released sizes; Brown et al.
#: (arXiv 2005.14165) table 2.1, with head counts that divide; the Llama 3 and Qwen3 model cards.
PRESETS: dict[str, dict[str, Any]] = {
    "gpt2-124m": _GPT2 | _shape(12, 768, 12),
    "gpt2-355m": _GPT2 | _shape(24, 1024, 16),
    "gpt2-774m": _GPT2 | _shape(36, 1280, 20),
    "gpt2-1.5b": _GPT2 | _shape(48, 1600, 25),
    "gpt3-125m": _GPT3 | _shape(12, 768, 12),
    "gpt3-350m": _GPT3 | _shape(24, 1024, 16),
    "gpt3-760m": _GPT3 | _shape(24, 1536, 16),
    "gpt3-1.3b": _GPT3 | _shape(24, 2048, 16),
    "gpt3-2.7b": _GPT3 | _shape(32, 2560, 32),
    "gpt3-6.7b": _GPT3 | _shape(32, 4096, 32),
    "gpt3-13b": _GPT3 | _shape(40, 5120, 40),
    "gpt3-175b": _GPT3 | _shape(96, 12288, 96),
    "gpt-30b": _GPT3 | _shape(64, 6144, 64),
    "llama3-8b": _LLAMA | _shape(32, 4096, 32, num_query_groups=8, ffn_hidden_size=14336, rotary_base=500000.0),
    "llama3-70b": _LLAMA | _shape(80, 8192, 64, num_query_groups=8, ffn_hidden_size=28672, rotary_base=500000.0),
    "qwen3-8b": _LLAMA | _shape(36, 4096, 32, num_query_groups=8, ffn_hidden_size=12288, kv_channels=128,
                                rotary_base=1000000.0, norm_epsilon=1e-6, qk_layernorm=True),
}
