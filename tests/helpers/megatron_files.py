"""Write checkpoints as Megatron-LM and Megatron-DeepSpeed lay them out, from whole weights with our names.

No file of either program is at hand. The layouts follow their documented formats: which file holds which part, how the
parts are cut over tensor-parallel ranks, and how query, key and value are interleaved.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_sp.config.schema import Model

Weights = dict[str, Tensor]


def megatron_args(model: Model, **more: Any) -> argparse.Namespace:
    """Return the flags that Megatron stores, for a model of ours."""
    same = ("num_layers hidden_size num_attention_heads kv_channels ffn_hidden_size max_position_embeddings "
            "rotary_base rotary_percent rotary_interleaved use_rope_scaling rope_scaling_factor normalization "
            "apply_layernorm_1p add_bias_linear add_qkv_bias qk_layernorm untie_embeddings_and_output_weights "
            "init_method_std").split()
    flags = {name: getattr(model, name) for name in same} | {
        "num_query_groups": model.num_query_groups, "group_query_attention": True, "swiglu": model.is_gated,
        "squared_relu": model.activation == "squared_relu", "layernorm_epsilon": model.norm_epsilon,
        "position_embedding_type": model.position_embedding_type, "bias_gelu_fusion": False, "seq_length": 64,
        "consumed_train_samples": 40, "params_dtype": torch.float32, "rank": 0, "num_experts": None}
    return argparse.Namespace(**flags | more)


def rank_part(name: str, x: Tensor, tp: int, rank: int) -> Tensor:
    """Return what one tensor-parallel rank holds of a whole tensor."""
    if name.endswith(("attention.output.weight", "mlp.down.weight")):
        return x.chunk(tp, 1)[rank]
    whole = name.endswith(("norm.weight", "norm.bias", "output.bias", "down.bias", "position.weight"))
    return x if whole else x.chunk(tp, 0)[rank]


def fused_qkv(q: Tensor, k: Tensor, v: Tensor, d: int, layout: str) -> Tensor:
    """Return a rank's query_key_value from its query, key and value, written as a loop over heads."""
    if layout == "split":
        return torch.cat((q, k, v))
    heads = [x.split(d) for x in (q, k, v)]
    per_group = len(heads[0]) // len(heads[1])
    rows = []
    for group in range(len(heads[1])):
        if layout == "inner":
            for row in range(d):
                rows += [heads[0][group][row], heads[1][group][row], heads[2][group][row]]
        else:
            for head in (*heads[0][group * per_group:(group + 1) * per_group], heads[1][group], heads[2][group]):
                rows += list(head)
    return torch.stack(rows)


def layer_of_rank(weights: Weights, model: Model, layer: int, tp: int, rank: int, *, core: bool,
                  layout: str) -> Weights:
    """Return a layer's tensors on one rank, by the names of Megatron's legacy or core models."""
    prefix = f"layers.{layer}."
    part = {name.removeprefix(prefix): rank_part(name, x, tp, rank) for name, x in weights.items()
            if name.startswith(prefix)}
    names = {"input_norm": "self_attention.linear_qkv.layer_norm_" if core else "input_layernorm.",
             "post_attention_norm": "mlp.linear_fc1.layer_norm_" if core else "post_attention_layernorm.",
             "attention.output": "self_attention.linear_proj." if core else "self_attention.dense.",
             "attention.query_norm": "self_attention.q_layernorm.", "attention.key_norm": "self_attention.k_layernorm.",
             "mlp.down": "mlp.linear_fc2." if core else "mlp.dense_4h_to_h."}
    found = {names[name.rpartition(".")[0]] + name.rpartition(".")[2]: x for name, x in part.items()
             if name.rpartition(".")[0] in names}
    for end in ("weight", "bias"):
        if f"attention.query.{end}" in part:
            q, k, v = (part[f"attention.{name}.{end}"] for name in ("query", "key", "value"))
            qkv = "self_attention.linear_qkv." if core else "self_attention.query_key_value."
            found[qkv + end] = fused_qkv(q, k, v, model.kv_channels, layout)
        if f"mlp.up.{end}" in part:
            both = [part[f"mlp.{name}.{end}"] for name in ("gate", "up") if f"mlp.{name}.{end}" in part]
            found[("mlp.linear_fc1." if core else "mlp.dense_h_to_4h.") + end] = torch.cat(both)
    return found | {"self_attention.rotary_emb.inv_freq": torch.ones(3)}


def padded(x: Tensor, multiple: int) -> Tensor:
    """Return vocabulary weights with rows of 9 after the last, up to a multiple."""
    rows = -(-len(x) // multiple) * multiple - len(x)
    return torch.cat((x, torch.full((rows, x.shape[1]), 9.0)))


def outer_of_rank(weights: Weights, tp: int, rank: int) -> tuple[Weights, Weights, Tensor | None]:
    """Return a rank's embeddings, final norm and output weight; None where it is tied."""
    embedding = {f"{kind}_embeddings.weight": rank_part(name, padded(x, 8 * tp) if kind == "word" else x, tp, rank)
                 for kind in ("word", "position") if (name := f"embedding.{kind}.weight") in weights
                 for x in (weights[name],)}
    norm = {name.removeprefix("final_norm."): x for name, x in weights.items() if name.startswith("final_norm.")}
    output = padded(weights["output.weight"], 8 * tp).chunk(tp)[rank] if "output.weight" in weights else None
    return embedding, norm, output


def write_megatron_lm(directory: Path, weights: Weights, model: Model, *, tp: int = 1, pp: int = 1, chunks: int = 1,
                      core: bool = False, layout: str = "grouped", version: float = 3.0, **args: Any) -> None:
    """Write iteration 100 in the format ``torch``.

    Args:
        chunks: virtual pipeline stages of each rank.
        core: names of Megatron-core's models with Transformer Engine instead of the legacy ones.
    """
    flags = megatron_args(model, **{"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp} | args)
    each = model.num_layers // (pp * chunks)
    for rank in range(tp):
        embedding, norm, output = outer_of_rank(weights, tp, rank)
        for stage in range(pp):
            content: dict[str, Any] = {"args": flags, "checkpoint_version": version, "iteration": 100,
                                       "optimizer": {"step": 100}}
            for chunk in range(chunks):
                first = (chunk * pp + stage) * each
                layers = {f"layers.{number}.{name}": x for number in range(each) for name, x in layer_of_rank(
                    weights, model, first + number, tp, rank, core=core, layout=layout).items()}
                is_first, is_last = stage == chunk == 0, stage == pp - 1 and chunk == chunks - 1
                last = {f"final_layernorm.{name}": x for name, x in norm.items()} if is_last else {}
                if core:
                    part: dict[str, Any] = {f"decoder.{name}": x for name, x in (layers | last).items()}
                    part |= {f"embedding.{name}": x for name, x in embedding.items()} if is_first else {}
                    if is_last and (output is not None or pp > 1):
                        part["output_layer.weight"] = embedding["word_embeddings.weight"] if output is None else output
                else:
                    language: dict[str, Any] = {"encoder": layers | last}
                    if is_first:
                        language["embedding"] = {name.removesuffix(".weight"): {"weight": x}
                                                 for name, x in embedding.items()}
                    if is_last and output is not None:
                        language["output_layer"] = {"weight": output}
                    part = {"language_model": language}
                    if is_last and output is None and pp > 1:
                        part["word_embeddings_for_head"] = {"weight": embedding["word_embeddings.weight"]}
                content["model" if chunks == 1 else f"model{chunk}"] = part
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else "")
            folder = directory / "iter_0000100" / name
            folder.mkdir(parents=True)
            torch.save(content, folder / "model_optim_rng.pt")
    (directory / "latest_checkpointed_iteration.txt").write_text("100")


def write_deepspeed(directory: Path, weights: Weights, model: Model, *, tp: int = 1, pipeline: bool = False,
                    layout: str = "grouped", **args: Any) -> None:
    """Write global_step100, with one file for each layer under a pipeline."""
    flags = megatron_args(model, normalization={"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"}[model.normalization],
                          num_key_value_heads=model.num_query_groups, group_query_attention=False, **args)
    folder = directory / "global_step100"
    folder.mkdir(parents=True)
    for rank in range(tp):
        embedding, norm, output = outer_of_rank(weights, tp, rank)
        layers = [layer_of_rank(weights, model, layer, tp, rank, core=False, layout=layout)
                  for layer in range(model.num_layers)]
        module: Any = None
        if pipeline:
            parts: list[Weights] = [{}, embedding, *layers, norm] + ([] if output is None else [
                {"lm_head.weight": output}])
            for position, part in enumerate(parts):
                if part:
                    torch.save(part, folder / f"layer_{position:02d}-model_{rank:02d}-model_states.pt")
        else:
            encoder = {f"layers.{number}.{name}": x for number, layer in enumerate(layers) for name, x in layer.items()}
            encoder |= {f"final_layernorm.{name}": x for name, x in norm.items()}
            module = {"language_model": {"encoder": encoder, "embedding": {
                name.removesuffix(".weight"): {"weight": x} for name, x in embedding.items()}}}
            if output is not None:
                module["language_model"]["output_layer"] = {"weight": output}
        torch.save({"args": flags, "iteration": 100, "checkpoint_version": 3.0, "module": module, "global_steps": 100},
                   folder / f"mp_rank_{rank:02d}_model_states.pt")
    (directory / "latest").write_text("global_step100")
