"""Hugging Face's model families: how the keys of config.json and the names of the weights correspond to this package's.

One ``Family`` for each family holds everything that is particular to it. ``model_fields`` reads a config.json,
``hugging_face_config`` writes one, and ``convert/`` reads and writes the weights by the family's table of names. This
module imports no torch, because ``--load-hf`` takes the flags of the model from config.json before torch is imported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_sp.config.rope_parameters import read_rotary, write_rotary
from megatron_sp.config.schema import Model
from megatron_sp.layout.masks.windows import layer_windows
from megatron_sp.layout.patterns.choice import layer_patterns

CONFIG = "config.json"
#: Names of activations in config.json -> ours. ``gelu_new`` and ``gelu_pytorch_tanh`` are the tanh approximation.
PLAIN_ACTIVATIONS = {"gelu_new": "openai_gelu", "gelu_pytorch_tanh": "openai_gelu", "gelu": "gelu",
                     "quick_gelu": "quick_gelu", "relu2": "squared_relu"}
GATED_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu"}


@dataclass(frozen=True)
class WeightName:
    """How one of our parameters is stored by Hugging Face.

    Attributes:
        own: this package's name; ``N`` stands for the number of the layer.
        theirs: their name, without the family's prefix.
        transposed: they store ``[in, out]`` (GPT-2's Conv1D), we store ``[out, in]``.
        part, parts: ours is this one of so many equal parts that they store one behind the other in a single tensor
            (GPT-2's c_attn), along the output dimension.
    """

    own: str
    theirs: str
    transposed: bool = False
    part: int = 0
    parts: int = 1


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        model_type, architecture: its names in config.json.
        prefix: what the names of all weights begin with, except the output layer's.
        keys: our field of ``Model`` -> their key of the same meaning, and its value where config.json lacks it. None
            as a value leaves our own default, for example as many key/value heads as query heads.
        fixed: values of ``Model`` that all models of the family have.
        required: keys whose other values this package cannot compute -> the value that it can compute.
        weights: the table of names.
        activation: their key for the activation.
        activations: their names of activations -> ours.
        special: fields that follow from several keys: ``(config) -> (fields, problems)``.
        written: the other keys of a config.json that is written: ``(model) -> keys``.
    """

    model_type: str
    architecture: str
    prefix: str
    keys: Mapping[str, tuple[str, Any]]
    fixed: Mapping[str, Any]
    required: Mapping[str, Any]
    weights: tuple[WeightName, ...]
    activation: str
    activations: Mapping[str, str]
    special: Callable[[Mapping[str, Any]], tuple[dict[str, Any], list[str]]]
    written: Callable[[Model], dict[str, Any]]
    ignored: tuple[str, ...] = field(default=("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias"))


# --- what is special in a family ----------------------------------------------------------------------------------

def _llama(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Biases: Llama's config can give them to attention and feed-forward layers separately, we only to both."""
    fields, problems = read_rotary(config)
    attention, mlp = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    if attention != mlp:
        problems.append(f"attention_bias {attention} with mlp_bias {mlp} is not supported; both must be equal")
    return fields | {"add_bias_linear": attention and mlp}, problems


def _write_llama(model: Model) -> dict[str, Any]:
    return {**write_rotary(model), "attention_bias": model.add_bias_linear, "mlp_bias": model.add_bias_linear}


def _windowed(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Rotary positions, and the window of the layers that have one."""
    fields, problems = read_rotary(config)
    window, layers = sliding_window(config), int(config.get("num_hidden_layers", 32))
    if not window:
        return fields, problems
    first = config.get("max_window_layers", 28) if "use_sliding_window" in config else 0
    kinds = config.get("layer_types") or ["full_attention"] * min(first, layers) + (
        ["sliding_attention"] * (layers - first))
    local = [int(kind == "sliding_attention") for kind in kinds]
    if set(kinds) - {"full_attention", "sliding_attention"} or len(kinds) != layers:
        problems.append("layer_types is not a list of full_attention and sliding_attention, one for each layer")
    elif any(local):
        fields["window_size"] = window
        if not all(local):
            fields["window_attn_skip_freq"] = str(local).replace(" ", "")
    return fields, problems


def _write_windows(model: Model) -> dict[str, Any]:
    windows = layer_windows(model)
    return {"sliding_window": max(windows) or None,
            "layer_types": ["sliding_attention" if window else "full_attention" for window in windows]}


def _write_mistral(model: Model) -> dict[str, Any]:
    return {**write_rotary(model), "sliding_window": max(layer_windows(model)) or None}


def _write_qwen(model: Model) -> dict[str, Any]:
    windows = layer_windows(model)
    return {**write_rotary(model), "use_sliding_window": any(windows),
            **(_write_windows(model) | {"max_window_layers": windows.index(max(windows))} if any(windows) else {})}


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """Return the window in tokens to which a config.json limits attention; None: every token sees all before it."""
    if config.get("model_type") == "mistral":
        return config.get("sliding_window", 4096)
    return config.get("sliding_window", 4096) if config.get("use_sliding_window") else None


def _gpt2(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    return {}, []


def _write_gpt2(model: Model) -> dict[str, Any]:
    return {"embd_pdrop": model.hidden_dropout}


# --- the tables ---------------------------------------------------------------------------------------------------

def _both(own: str, theirs: str, **how: Any) -> tuple[WeightName, WeightName]:
    """Return the names of the weight and the bias of one module; a bias is never transposed."""
    bias = {key: value for key, value in how.items() if key != "transposed"}
    return WeightName(f"{own}.weight", f"{theirs}.weight", **how), WeightName(f"{own}.bias", f"{theirs}.bias", **bias)


_LLAMA_WEIGHTS = (
    WeightName("embedding.word.weight", "embed_tokens.weight"),
    WeightName("layers.N.input_norm.weight", "layers.N.input_layernorm.weight"),
    *_both("layers.N.attention.query", "layers.N.self_attn.q_proj"),
    *_both("layers.N.attention.key", "layers.N.self_attn.k_proj"),
    *_both("layers.N.attention.value", "layers.N.self_attn.v_proj"),
    *_both("layers.N.attention.output", "layers.N.self_attn.o_proj"),
    WeightName("layers.N.attention.query_norm.weight", "layers.N.self_attn.q_norm.weight"),
    WeightName("layers.N.attention.key_norm.weight", "layers.N.self_attn.k_norm.weight"),
    WeightName("layers.N.post_attention_norm.weight", "layers.N.post_attention_layernorm.weight"),
    *_both("layers.N.mlp.gate", "layers.N.mlp.gate_proj"),
    *_both("layers.N.mlp.up", "layers.N.mlp.up_proj"),
    *_both("layers.N.mlp.down", "layers.N.mlp.down_proj"),
    WeightName("final_norm.weight", "norm.weight"),
    WeightName("output.weight", "lm_head.weight"))

_GPT2_WEIGHTS = (
    WeightName("embedding.word.weight", "wte.weight"),
    WeightName("embedding.position.weight", "wpe.weight"),
    *_both("layers.N.input_norm", "h.N.ln_1"),
    *_both("layers.N.attention.query", "h.N.attn.c_attn", transposed=True, part=0, parts=3),
    *_both("layers.N.attention.key", "h.N.attn.c_attn", transposed=True, part=1, parts=3),
    *_both("layers.N.attention.value", "h.N.attn.c_attn", transposed=True, part=2, parts=3),
    *_both("layers.N.attention.output", "h.N.attn.c_proj", transposed=True),
    *_both("layers.N.post_attention_norm", "h.N.ln_2"),
    *_both("layers.N.mlp.up", "h.N.mlp.c_fc", transposed=True),
    *_both("layers.N.mlp.down", "h.N.mlp.c_proj", transposed=True),
    *_both("final_norm", "ln_f"),
    WeightName("output.weight", "lm_head.weight"))

_LLAMA_KEYS: dict[str, tuple[str, Any]] = {
    "num_layers": ("num_hidden_layers", 32), "hidden_size": ("hidden_size", 4096),
    "num_attention_heads": ("num_attention_heads", 32), "num_query_groups": ("num_key_value_heads", None),
    "kv_channels": ("head_dim", None), "ffn_hidden_size": ("intermediate_size", 11008),
    "max_position_embeddings": ("max_position_embeddings", 2048), "norm_epsilon": ("rms_norm_eps", 1e-6),
    "vocab_size": ("vocab_size", 32000), "untie_embeddings_and_output_weights": ("tie_word_embeddings", False),
    "attention_dropout": ("attention_dropout", 0.0)}
_LLAMA_FIXED = dict(position_embedding_type="rope", normalization="RMSNorm", add_bias_linear=False,
                    add_qkv_bias=False, qk_layernorm=False, hidden_dropout=0.0, rotary_interleaved=False,
                    rotary_percent=1.0)
_QWEN_DEFAULTS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", 151936), "ffn_hidden_size": ("intermediate_size", 22016),
    "max_position_embeddings": ("max_position_embeddings", 32768)}


def _decoder(model_type: str, architecture: str, special: Any, written: Any, *, keys: dict[str, Any] | None = None,
             fixed: dict[str, Any] | None = None, required: dict[str, Any] | None = None) -> Family:
    """Return a family whose models are built as Llama's are."""
    return Family(model_type, architecture, "model.", _LLAMA_KEYS | (keys or {}), _LLAMA_FIXED | (fixed or {}),
                  {"pretraining_tp": 1} | (required or {}), _LLAMA_WEIGHTS, "hidden_act", GATED_ACTIVATIONS, special,
                  written)


#: All families, in the order in which an export chooses the first one that fits.
FAMILIES: tuple[Family, ...] = (
    _decoder("llama", "LlamaForCausalLM", _llama, _write_llama),
    _decoder("mistral", "MistralForCausalLM", _windowed, _write_mistral,
             keys={"num_query_groups": ("num_key_value_heads", 8), "ffn_hidden_size": ("intermediate_size", 14336),
                   "max_position_embeddings": ("max_position_embeddings", 131072)}),
    _decoder("qwen2", "Qwen2ForCausalLM", _windowed, _write_qwen, keys=_QWEN_DEFAULTS, fixed={"add_qkv_bias": True}),
    _decoder("qwen3", "Qwen3ForCausalLM", _windowed, _write_qwen,
             keys=_QWEN_DEFAULTS | {"kv_channels": ("head_dim", 128)}, fixed={"qk_layernorm": True},
             required={"attention_bias": False}),
    Family(
        "gpt2", "GPT2LMHeadModel", "transformer.",
        {"num_layers": ("n_layer", 12), "hidden_size": ("n_embd", 768), "num_attention_heads": ("n_head", 12),
         "ffn_hidden_size": ("n_inner", None), "max_position_embeddings": ("n_positions", 1024),
         "norm_epsilon": ("layer_norm_epsilon", 1e-5), "vocab_size": ("vocab_size", 50257),
         "untie_embeddings_and_output_weights": ("tie_word_embeddings", True),
         "attention_dropout": ("attn_pdrop", 0.1), "hidden_dropout": ("resid_pdrop", 0.1)},
        dict(position_embedding_type="learned_absolute", normalization="LayerNorm", add_bias_linear=True,
             add_qkv_bias=False, qk_layernorm=False),
        {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        _GPT2_WEIGHTS, "activation_function", PLAIN_ACTIVATIONS, _gpt2, _write_gpt2))


def family_named(model_type: str) -> Family | None:
    """Return the family of a ``model_type`` of config.json; None: it is none of ``FAMILIES``."""
    return next((family for family in FAMILIES if family.model_type == model_type), None)


# --- reading a config.json ----------------------------------------------------------------------------------------

def read_config(directory: str | Path) -> dict[str, Any]:
    """Return the config.json of a directory.

    Raises:
        ValueError: with a sentence that names the file.
    """
    path = Path(directory) / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}). Give the directory of a model in Hugging Face's "
                         "format, with config.json and *.safetensors") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError(f"{path} is not the configuration of a Hugging Face model: it has no model_type")
    return config


def model_fields(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of ``schema.Model`` that a config.json determines, and a problem for each unsupported key.

    Args:
        config: the content of config.json.

    Returns:
        Field -> value, and one sentence fragment for each problem. With problems the fields may be incomplete.
    """
    kind = config.get("model_type")
    family = family_named(str(kind))
    if family is None:
        return {}, [f"models of the type {kind!r} are not supported; {', '.join(f.model_type for f in FAMILIES)} are"]
    problems = []
    if config.get("quantization_config"):
        problems.append("the weights are quantized (quantization_config); give the model before quantization")
    for key, value in family.required.items():
        if (found := config.get(key, value)) != value:
            problems.append(f"{key} {found} is not supported; only {value} is")
    fields: dict[str, Any] = dict(family.fixed)
    for name, (key, default) in family.keys.items():
        value = config.get(key)
        value = default if value is None else value
        if value is None:
            continue
        kind_of_field = type(getattr(Model, name))
        if isinstance(value, bool) != (kind_of_field is bool) or not isinstance(value, int | float):
            problems.append(f"{key} {value!r} is not a value of this key")
            continue
        fields[name] = (not value) if name == "untie_embeddings_and_output_weights" else kind_of_field(value)
    activation = config.get(family.activation, next(iter(family.activations)))
    if activation in family.activations:
        fields["activation"] = family.activations[activation]
    else:
        problems.append(f"{family.activation} {activation!r} is not supported in {family.model_type} models; "
                        f"{', '.join(family.activations)} {'is' if len(family.activations) == 1 else 'are'}")
    more, wrong = family.special(config)
    return fields | more, problems + wrong


# --- writing one --------------------------------------------------------------------------------------------------

def misfits(family: Family, model: Model) -> list[str]:
    """Return a sentence fragment for each property of a model that a family cannot express."""
    found = []
    free = {"add_bias_linear", "hidden_dropout"} if family.model_type == "llama" else {"hidden_dropout"}
    for name, value in family.fixed.items():
        if name not in free and (mine := getattr(model, name)) != value:
            found.append(f"its {name} is {value}, the model's is {mine}")
    if model.activation not in family.activations.values():
        found.append(f"it has no activation {model.activation}")
    windows = layer_windows(model)
    if any(layer_patterns(model)):
        found.append("it has no attention to blocks of tokens (--attention-pattern)")
    if any(windows) and family.model_type in ("llama", "gpt2"):
        found.append("it has no sliding window")
    if any(windows) and not all(windows) and family.model_type == "mistral":
        found.append("all of its layers have the sliding window, and not all of the model's have")
    if family.model_type == "gpt2":
        if model.num_query_groups != model.num_attention_heads:
            found.append("it has no grouped key/value heads")
        if model.kv_channels * model.num_attention_heads != model.hidden_size:
            found.append("its heads are hidden-size / num-attention-heads wide")
        return found
    if model.use_rope_scaling and model.rotary_seq_len_interpolation_factor != 1.0:
        found.append("it has one kind of rope scaling, the model two")
    if model.add_qkv_bias and model.add_bias_linear:
        found.append("it has either query, key and value biases or all")
    return found


def choose_family(model: Model, wanted: str = "") -> Family:
    """Return the first family that can express a model, or the wanted one.

    Raises:
        ValueError: no family can, or the wanted one cannot; the message says why.
    """
    candidates = [family for family in FAMILIES if wanted in ("", family.model_type)]
    reasons = {}
    for family in candidates:
        reasons[family.model_type] = misfits(family, model)
        if not reasons[family.model_type]:
            return family
    said = ". ".join(f"{name}: {'; '.join(why)}" for name, why in reasons.items())
    raise ValueError(f"no model family of Hugging Face that this program writes can express this model. {said}")


def hugging_face_config(family: Family, model: Model, dtype: str) -> dict[str, Any]:
    """Return the config.json of a model.

    Args:
        model: the resolved model flags, vocabulary size included.
        dtype: the type of the stored weights by torch name, for example ``bfloat16``.
    """
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    for name, (key, _) in family.keys.items():
        value = getattr(model, name)
        config[key] = (not value) if name == "untie_embeddings_and_output_weights" else value
    config[family.activation] = next(theirs for theirs, own in family.activations.items() if own == model.activation)
    return config | {"initializer_range": model.init_method_std, **family.written(model), "torch_dtype": dtype,
                     "use_cache": True}
