"""Small random models of Hugging Face's families, saved as a user would have them on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

#: vocabulary 97 as in tests/helpers/configs.py; no size equals another, so that a swapped dimension is noticed.
_SHAPE: dict[str, Any] = dict(vocab_size=97, hidden_size=48, intermediate_size=56, num_hidden_layers=2,
                              num_attention_heads=6, num_key_value_heads=2, head_dim=16, max_position_embeddings=64)
_LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
               original_max_position_embeddings=8192)
_YARN = dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=16)

#: Name -> class of the configuration, and its values.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("LlamaConfig", _SHAPE | dict(num_key_value_heads=6)),
    "llama3": ("LlamaConfig", _SHAPE | dict(rope_parameters=_LLAMA3, rms_norm_eps=1e-5, tie_word_embeddings=True)),
    "llama_biases": ("LlamaConfig", _SHAPE | dict(attention_bias=True, mlp_bias=True, rope_parameters=dict(
        rope_type="linear", factor=4.0, rope_theta=10000.0))),
    "mistral": ("MistralConfig", _SHAPE | dict(num_key_value_heads=1, sliding_window=None)),
    "qwen2": ("Qwen2Config", {key: value for key, value in _SHAPE.items() if key != "head_dim"} | dict(
        num_attention_heads=6, rms_norm_eps=1e-6, tie_word_embeddings=True, rope_parameters=_YARN)),
    "qwen3": ("Qwen3Config", _SHAPE | dict(num_key_value_heads=3)),
    "gpt2": ("GPT2Config", dict(vocab_size=97, n_embd=48, n_layer=2, n_head=6, n_positions=64)),
}


def save_model(name: str, directory: Path, *, dtype: torch.dtype = torch.float32, shard: str = "50KB",
               **changes: Any) -> Any:
    """Save a random model of ``MODELS`` into a directory, in several files, and return it.

    No bias is 0 and no norm weight is 1, so that leaving one out has an effect.

    Args:
        changes: values of the configuration that differ.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kind, values = MODELS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**values | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model = model.to(dtype)
    model.save_pretrained(directory, max_shard_size=shard)
    return model
