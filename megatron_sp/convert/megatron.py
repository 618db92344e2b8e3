"""Read the weights and model flags of a Megatron checkpoint, and give them this package's names.

Megatron stores three things otherwise than this package: the weights are cut over tensor-parallel ranks, the rows of
query, key and value are interleaved in one matrix, and gate and up projection of a gated layer share a matrix::

    rows of query_key_value on one rank       grouped  [ group 0: its q heads, k, v | group 1: ... ]     versions from 2
    (each head has d rows)                    split    [ all q heads | all k heads | all v heads ]       version 0
                                              inner    row r of the head: [ q k v ], next row ...        version 1
    rows of dense_h_to_4h on one rank         [ this rank's part of gate | this rank's part of up ]
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_sp.config.schema import Model
from megatron_sp.convert.lazy import LazyTensor, Weights, columns_joined, row_part, rows_joined
from megatron_sp.convert.megatron_files import MegatronCheckpoint, Tensors
from megatron_sp.convert.parameters import parameter_shapes
from megatron_sp.errors import CheckpointError

QKV_LAYOUTS = ("grouped", "split", "inner")
#: Largest number of problems that one message lists.
SHOWN = 5


def _ends(own: str, *theirs: str) -> dict[str, str]:
    return {f"{name}{end}": f"{own}.{end}" for name in theirs for end in ("weight", "bias")}


#: Megatron's names within a layer -> ours, where ``qkv`` and ``fc1`` hold several of our parameters.
LAYER_NAMES: dict[str, str] = {
    **_ends("input_norm", "input_layernorm.", "input_norm.", "self_attention.linear_qkv.layer_norm_"),
    **_ends("qkv", "self_attention.query_key_value.", "attention.query_key_value.", "self_attention.linear_qkv."),
    **_ends("attention.output", "self_attention.dense.", "attention.dense.", "self_attention.linear_proj."),
    **_ends("attention.query_norm", "self_attention.q_layernorm."),
    **_ends("attention.key_norm", "self_attention.k_layernorm."),
    **_ends("post_attention_norm", "post_attention_layernorm.", "post_attention_norm.", "pre_mlp_layernorm.",
            "mlp.linear_fc1.layer_norm_"),
    **_ends("fc1", "mlp.dense_h_to_4h.", "mlp.linear_fc1."),
    **_ends("mlp.down", "mlp.dense_4h_to_h.", "mlp.linear_fc2.")}
#: Weights that are cut by columns; biases of these modules are whole on every rank.
_BY_COLUMNS = ("attention.output.weight", "mlp.down.weight")
_WHOLE = ("norm.weight", "norm.bias", "attention.output.bias", "mlp.down.bias", "embedding.position.weight")


def weights_of(checkpoint: MegatronCheckpoint, model: Model, qkv_layout: str) -> Weights:
    """Return the whole weights of a checkpoint under this package's parameter names.

    Args:
        model: the resolved model flags. Their vocabulary size is the number of rows of the embedding to keep.
        qkv_layout: one of ``QKV_LAYOUTS``.

    Raises:
        CheckpointError: a weight is missing, has another shape, or has no place in the model.
    """
    if model.num_query_groups % checkpoint.tp:
        raise CheckpointError(f"{checkpoint.directory}: {model.num_query_groups} key/value heads do not divide over "
                              f"{checkpoint.tp} tensor-parallel ranks; such checkpoints are not supported")
    problems: list[str] = []
    found = _joined_outer(checkpoint, model)
    if len(checkpoint.layers) != model.num_layers:
        problems.append(f"there are {len(checkpoint.layers)} layers in the files and {model.num_layers} in the flags")
    for number, by_rank in enumerate(checkpoint.layers):
        renamed = []
        for tensors in by_rank:
            problems += [f"{tensor.source} has no place in a layer here" for name, tensor in tensors.items()
                         if name not in LAYER_NAMES]
            renamed.append({LAYER_NAMES[name]: tensor for name, tensor in tensors.items() if name in LAYER_NAMES})
        layer = _joined_layer(renamed, model, qkv_layout)
        found |= {f"layers.{number}.{name}": tensor for name, tensor in layer.items()}
    shapes = parameter_shapes(model)
    problems += [f"{name} is missing" for name in shapes if name not in found]
    problems += [f"{found[name].source} has no place in the model that the flags describe" for name in found
                 if name not in shapes]
    problems += [f"{name} has the shape {list(found[name].shape)} in the files, and the flags ask for {list(shape)}"
                 for name, shape in shapes.items() if name in found and found[name].shape != shape]
    if problems:
        more = f" (and {len(problems) - SHOWN} more)" if len(problems) > SHOWN else ""
        raise CheckpointError(f"{checkpoint.directory} does not hold the model that its flags describe: "
                              f"{'; '.join(problems[:SHOWN])}{more}")
    return {name: found[name] for name in shapes}


def embedding_rows(checkpoint: MegatronCheckpoint) -> int:
    """Return the number of rows of the embedding over all ranks, padding included; 0 where there is none."""
    return sum(rank["embedding.word.weight"].shape[0] for rank in checkpoint.outer if "embedding.word.weight" in rank)


def _joined_outer(checkpoint: MegatronCheckpoint, model: Model) -> Weights:
    """Return the weights outside of layers, without the padding of the vocabulary."""
    joined: Weights = {}
    for name in checkpoint.outer[0]:
        if name == "output.weight" and not model.untie_embeddings_and_output_weights:
            continue      # the copy of a tied embedding
        tensor = _join(name, [rank[name] for rank in checkpoint.outer if name in rank])
        if name in ("embedding.word.weight", "output.weight") and tensor.shape[0] > model.vocab_size:
            tensor = row_part(tensor, 0, model.vocab_size)
        joined[name] = tensor
    return joined


def _join(name: str, parts: list[LazyTensor]) -> LazyTensor:
    if name.endswith(_WHOLE):
        return parts[0]
    return columns_joined(parts) if name.endswith(_BY_COLUMNS) else rows_joined(parts)


def _joined_layer(ranks: list[Tensors], model: Model, qkv_layout: str) -> Weights:
    """Return the weights of one layer under this package's names without the layer's prefix."""
    joined: Weights = {}
    for name in ranks[0]:
        parts = [rank[name] for rank in ranks if name in rank]
        module, _, end = name.rpartition(".")
        if module == "qkv":
            chosen = qkv_rows(model, len(parts), qkv_layout)
            if any(part.shape[:1] != (sum(map(len, chosen)),) for part in parts):
                raise CheckpointError(f"{parts[0].source} has the shape {list(parts[0].shape)}, and the flags ask for "
                                      f"{sum(map(len, chosen))} rows of query, key and value on each rank")
            for own, rows in zip(("query", "key", "value"), chosen):
                joined[f"attention.{own}.{end}"] = rows_joined([_select(part, rows) for part in parts])
        elif module == "fc1" and model.is_gated:
            half = parts[0].shape[0] // 2
            joined[f"mlp.gate.{end}"] = rows_joined([row_part(part, 0, half) for part in parts])
            joined[f"mlp.up.{end}"] = rows_joined([row_part(part, half, 2 * half) for part in parts])
        elif module == "fc1":
            joined[f"mlp.up.{end}"] = rows_joined(parts)
        else:
            joined[name] = _join(name, parts)
    return joined


def qkv_rows(model: Model, tp: int, layout: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return which rows of one rank's query_key_value are those of query, key and value.

    Args:
        tp: tensor-parallel ranks.
        layout: one of ``QKV_LAYOUTS``.

    Returns:
        Three int64 tensors of row numbers, in our order: by head, then by element of the head.
    """
    d, groups = model.head_dim, model.num_query_groups // tp
    per_group = model.num_attention_heads // model.num_query_groups
    rows = torch.arange(groups * (per_group + 2) * d)
    if layout == "grouped":
        heads = rows.view(groups, per_group + 2, d)
        return heads[:, :per_group].flatten(), heads[:, per_group].flatten(), heads[:, per_group + 1].flatten()
    if layout == "split":
        query, key, value = rows.split([groups * per_group * d, groups * d, groups * d])
        return query, key, value
    heads = rows.view(groups, d, per_group + 2)      # "inner" exists without grouped heads only, so per_group is 1
    return heads[..., 0].flatten(), heads[..., 1].flatten(), heads[..., 2].flatten()


def _select(tensor: LazyTensor, rows: torch.Tensor) -> LazyTensor:
    """Return chosen rows of a tensor, in the given order."""
    return LazyTensor((len(rows), *tensor.shape[1:]), lambda a, b: tensor.whole()[rows[a:b]], tensor.source)


# --- flags --------------------------------------------------------------------------------------------------------

#: Field of ``schema.Model`` -> Megatron's names of the flag. The first name that is set gives the value.
_FLAGS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in (
        "hidden_size", "num_attention_heads", "kv_channels", "ffn_hidden_size", "max_position_embeddings",
        "rotary_base", "rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor",
        "use_rope_scaling", "rope_scaling_factor", "apply_layernorm_1p", "add_bias_linear", "add_qkv_bias",
        "qk_layernorm", "untie_embeddings_and_output_weights", "init_method_std", "attention_dropout",
        "hidden_dropout", "make_vocab_size_divisible_by")},
    "num_layers": ("num_layers", "encoder_num_layers"), "norm_epsilon": ("norm_epsilon", "layernorm_epsilon")}
_ACTIVATIONS = ("swiglu", "squared_relu", "openai_gelu", "quick_gelu")
#: Megatron's flags that change the mathematics in a way that this package lacks -> the values that change nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "num_experts": (None, 0, 1, [1], "1"), "apply_residual_connection_post_layernorm": (None, False),
    "embed_layernorm": (None, False),
    "multi_latent_attention": (None, False), "num_moe_experts": (None, 0)}


def model_fields(checkpoint: MegatronCheckpoint) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of ``schema.Model`` that Megatron's flags set, and a problem for each unsupported flag."""
    args = checkpoint.args
    fields: dict[str, Any] = {}
    for name, spellings in _FLAGS.items():
        value = next((args[spelling] for spelling in spellings if args.get(spelling) is not None), None)
        kind = type(getattr(Model, name))
        if isinstance(value, bool) == (kind is bool) and isinstance(value, int | float):
            fields[name] = kind(value)
    problems = [f"{name} {args[name]} is not supported" for name, fine in _REFUSED.items()
                if args.get(name) not in fine]
    groups = args.get("num_query_groups") if args.get("group_query_attention") else args.get("num_key_value_heads")
    if isinstance(groups, int) and groups > 0:
        fields["num_query_groups"] = groups
    fields |= _window(args) | _yarn(args)
    fields["normalization"] = "RMSNorm" if "rms" in str(args.get("normalization", "")).lower() else "LayerNorm"
    fields["activation"] = next((name for name in _ACTIVATIONS if args.get(name)), "gelu")
    if fields["activation"] == "gelu" and args.get("bias_gelu_fusion") and fields.get("add_bias_linear", True):
        fields["activation"] = "openai_gelu"      # what Megatron's fusion of bias and GELU computes
    kind_of_positions, problem = _positions(args)
    fields["position_embedding_type"] = kind_of_positions
    return fields, problems + ([problem] if problem else [])


def _window(args: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the window: Megatron's pair counts the tokens before a token, and after it."""
    pair, skipped = args.get("window_size"), args.get("window_attn_skip_freq")
    if not pair or pair[0] < 0:
        return {}
    return {"window_size": pair[0] + 1} | ({"window_attn_skip_freq": str(skipped)} if skipped else {})


#: Field of ``schema.Model`` about YaRN -> Megatron's names of the argument. The first name that is set gives the value.
_YARN = {
    "rotary_scaling_factor": ("yarn_rotary_scaling_factor", "rotary_scaling_factor"),
    "original_max_position_embeddings": ("yarn_original_max_position_embeddings", "original_max_position_embeddings"),
    "yarn_beta_fast": ("yarn_beta_fast", "beta_fast"), "yarn_beta_slow": ("yarn_beta_slow", "beta_slow"),
    "mscale": ("yarn_mscale", "mscale"), "mscale_all_dim": ("yarn_mscale_all_dim", "mscale_all_dim"),
    "yarn_correction_range_round_to_int": ("yarn_correction_range_round_to_int",)}


def _yarn(args: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of YaRN, where the model has it. Megatron's arguments of YaRN have values in every model."""
    if args.get("position_embedding_type") != "yarn":
        return {}
    found = {name: next((args[theirs] for theirs in names if args.get(theirs) is not None), None)
             for name, names in _YARN.items()}
    return {"rope_scaling_type": "yarn"} | {
        name: type(getattr(Model, name))(value) for name, value in found.items() if isinstance(value, int | float)}


def _positions(args: dict[str, Any]) -> tuple[str, str]:
    """Return the kind of position embedding, and a problem or ""."""
    said = args.get("position_embedding_type")
    if args.get("use_rotary_position_embeddings") or said in ("rope", "yarn"):
        return "rope", ""
    if said in ("none", "learned_absolute"):
        return said, ""
    if said is not None:
        known = {1: "rope", 2: "learned_absolute"}      # the members of BigScience's enumeration
        number = getattr(said, "arguments", (None,))[0]
        return known.get(number or 0, "learned_absolute"), "" if number in known else (
            f"position_embedding_type {number or said} is not supported")
    return "none" if args.get("add_position_embedding") is False else "learned_absolute", ""


def qkv_layout_of(checkpoint: MegatronCheckpoint) -> str:
    """Return in which order the rows of query_key_value are.

    Raises:
        CheckpointError: the files do not say.
    """
    if not checkpoint.of_deepspeed:
        return "split" if checkpoint.version < 1 else "inner" if checkpoint.version < 2 else "grouped"
    args = checkpoint.args
    if _is_above_one(args.get("ds_sequence_parallel_size")) or args.get("force_ds_sequence_parallel"):
        return "split"
    if "ds_sequence_parallel_fpdt" in args:
        raise CheckpointError(
            f"{checkpoint.directory}: versions of Megatron-DeepSpeed differ in the order of the rows of query, key and "
            "value, and the files do not say which one wrote them. Give --qkv-layout split where the code that trained "
            "the model cuts mixed_x_layer into three contiguous parts (2024 and later), else --qkv-layout grouped. The "
            "wrong one gives a loss as high as that of an untrained model")
    return "grouped"


def _is_above_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1
