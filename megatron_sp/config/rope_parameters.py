"""Rotary positions in Hugging Face's config.json: base and scaling, read and written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_sp.config.schema import Model

#: Settings of Llama 3's rule for rotary frequencies that ``--use-rope-scaling`` computes with (``model/rotary.py``).
LLAMA3_RULE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_rotary(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return base and scaling of the rotary positions; transformers 5 writes other keys for them than 4."""
    rope = config.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        return {}, ["rope_parameters differ from layer to layer, and one rule for all layers is supported"]
    scaling = {**(config.get("rope_scaling") or {}), **rope}
    fields: dict[str, Any] = {"rotary_base": float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    share = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) or 1.0
    problems = [f"partial_rotary_factor {share} is not supported in this family"] if share != 1.0 else []
    if kind == "llama3":
        problems += [f"{key} {scaling.get(key)} of the llama3 rope scaling is not supported; only {value:g} is"
                     for key, value in LLAMA3_RULE.items() if scaling.get(key) != value]
        fields |= {"use_rope_scaling": True, "rope_scaling_factor": float(scaling.get("factor", 8.0))}
    elif kind == "linear":
        fields["rotary_seq_len_interpolation_factor"] = float(scaling.get("factor", 1.0))
    elif kind == "yarn":
        fields |= _yarn(scaling, config)
    elif kind != "default":
        problems.append(f"rope scaling of the type {kind!r} is not supported; default, linear, llama3 and yarn are")
    return fields, problems


def _yarn(scaling: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of YaRN. transformers reads ``mscale`` and ``mscale_all_dim`` only where both are given.

    Where no original context is given, it is the one of the model; where no factor is, ``resolve`` computes it.
    """
    original = scaling.get("original_max_position_embeddings") or config.get("max_position_embeddings") or 0
    fields: dict[str, Any] = {"rope_scaling_type": "yarn", "original_max_position_embeddings": int(original)}
    for key, name in (("factor", "rotary_scaling_factor"), ("beta_fast", "yarn_beta_fast"),
                      ("beta_slow", "yarn_beta_slow"), ("attention_factor", "yarn_attention_factor")):
        if scaling.get(key):
            fields[name] = float(scaling[key])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        fields |= {"mscale": float(scaling["mscale"]), "mscale_all_dim": float(scaling["mscale_all_dim"])}
    return fields | {"yarn_correction_range_round_to_int": bool(scaling.get("truncate", True))}


def _write_yarn(model: Model) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "yarn", "factor": model.rotary_scaling_factor, "beta_fast": model.yarn_beta_fast,
        "beta_slow": model.yarn_beta_slow, "original_max_position_embeddings": model.original_max_position_embeddings}
    if not model.yarn_correction_range_round_to_int:
        scaling["truncate"] = False
    if model.mscale and model.mscale_all_dim and not model.yarn_attention_factor:
        return scaling | {"mscale": model.mscale, "mscale_all_dim": model.mscale_all_dim}
    if model.rotary_attention_factor != replace(
            model, mscale=1.0, mscale_all_dim=0.0, yarn_attention_factor=0.0).rotary_attention_factor:
        scaling["attention_factor"] = model.rotary_attention_factor
    return scaling


def write_rotary(model: Model) -> dict[str, Any]:
    """Return the keys for rotary positions in the form that all versions of transformers read.

    NTK-aware scaling is a larger base, which is written as such.
    """
    scaling: dict[str, Any] | None = None
    if model.rope_scaling_type == "yarn":
        scaling = _write_yarn(model)
    elif model.use_rope_scaling:
        scaling = {"rope_type": "llama3", "factor": model.rope_scaling_factor, **LLAMA3_RULE}
    elif model.rotary_seq_len_interpolation_factor != 1.0:
        scaling = {"rope_type": "linear", "factor": model.rotary_seq_len_interpolation_factor}
    return {"rope_theta": model.scaled_rotary_base, "rope_scaling": scaling}
