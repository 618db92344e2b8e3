"""Compare the configuration in a checkpoint with that of the run that loads it. Reads no files."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_sp.config.cli.options import flag_names
from megatron_sp.config.schema import Run
from megatron_sp.errors import CheckpointError

#: Fields of the model that decide the shapes of the weights or how they are used. A run with another value is refused.
MUST_MATCH = (
    "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size",
    "position_embedding_type", "normalization", "apply_layernorm_1p", "activation", "add_bias_linear",
    "add_qkv_bias", "qk_layernorm", "untie_embeddings_and_output_weights", "vocab_size", "rotary_interleaved")

#: Fields that decide which tokens a sample number stands for.
ORDERS_DATA = ("seed", "split", "data_path", "train_data_path", "dataset_provider", "dataset_arguments",
               "dataloader_type", "pack_documents")

#: Fields that may change on resume; the log names each change.
MAY_CHANGE = (
    ("model", "rotary_base"), ("model", "rotary_percent"), ("model", "rotary_seq_len_interpolation_factor"),
    ("model", "use_rope_scaling"), ("model", "rope_scaling_factor"), ("model", "norm_epsilon"),
    *(("model", name) for name in ("rope_scaling_type", "rotary_scaling_factor", "original_max_position_embeddings",
                                   "yarn_beta_fast", "yarn_beta_slow", "yarn_correction_range_round_to_int",
                                   "mscale", "mscale_all_dim", "yarn_attention_factor")),
    ("model", "hidden_dropout"), ("model", "attention_dropout"), ("model", "attention_pattern"),
    ("model", "window_size"), ("model", "window_attn_skip_freq"), ("model", "attention_pattern_per_layer"),
    ("model", "attention_block_size"), ("model", "attention_local_blocks"), ("model", "attention_global_blocks"),
    ("model", "attention_random_blocks"), ("model", "attention_stride"), ("model", "attention_blocks_by_head"),
    ("model", "attention_pattern_seed"), ("data", "seq_length"),
    ("data", "seq_length_schedule"), ("data", "split"),
    ("data", "data_path"), ("data", "train_data_path"), ("data", "dataset_provider"), ("data", "dataset_arguments"),
    ("data", "dataloader_type"), ("data", "eod_mask_loss"),
    ("data", "reset_position_ids"), ("data", "reset_attention_mask"), ("data", "document_boundaries"),
    ("data", "pack_documents"),
    ("optimizer", "adam_beta1"), ("optimizer", "adam_beta2"), ("optimizer", "adam_eps"),
    ("optimizer", "sgd_momentum"), ("optimizer", "clip_grad"),
    ("train", "global_batch_size"), ("train", "seed"), ("precision", "bf16"),
    ("precision", "fp16"), ("precision", "grad_reduce_in_bf16"), ("precision", "loss_scale"),
    ("precision", "min_loss_scale"), ("precision", "loss_scale_window"), ("precision", "hysteresis"))


def check_model(saved: dict[str, Any], run: Run, source: str) -> None:
    """Compare the model section of a saved configuration with the run's.

    Args:
        saved: the plain configuration stored in the checkpoint.
        source: the checkpoint's path, for the message.

    Raises:
        CheckpointError: naming every flag that differs, with both values.
    """
    mine = dataclasses.asdict(run.model)
    names = [*MUST_MATCH]
    if run.model.position_embedding_type == "learned_absolute":
        names.append("max_position_embeddings")
    theirs = saved["model"]
    wrong = [_difference(name, mine[name], theirs[name])
             for name in names if theirs.get(name, mine[name]) != mine[name]]
    if wrong:
        raise CheckpointError(f"{source} holds another model: {'; '.join(wrong)}. Give the checkpoint's values, or "
                              "another --load")


def differences_in_words(saved: dict[str, Any], run: Run) -> list[str]:
    """Return one sentence for each setting that may change on resume and differs from the checkpoint's."""
    lines = []
    for section, name in MAY_CHANGE:
        mine = getattr(getattr(run, section), name)
        theirs = saved[section].get(name, mine)
        if as_json(mine) != as_json(theirs):
            effect = "; the order of the data changes with it" if name in ORDERS_DATA else ""
            if name == "seq_length":
                effect = ("; the run continues to count samples, but cuts and shuffles them anew, so some text is "
                          "read twice and some not before the next epoch")
            lines.append(f"{flag_name(section, name)} is {value_in_words(mine)}, "
                         f"was {value_in_words(theirs)} in the checkpoint{effect}")
    before, now = saved["train"], run.train
    lengths = [f"{flag_name('train', name)} {before.get(name, 0)} -> {getattr(now, name)}"
               for name in ("train_iters", "train_samples") if before.get(name, 0) != getattr(now, name)]
    if lengths and not run.data.mock_data:
        lines.append(f"the run has another length than the checkpoint's ({', '.join(lengths)}); the shuffle depends "
                     "on how many epochs a run asks for: where that number changes, samples "
                     "already seen may come again and others later. Plan the final length from the start to avoid it")
    return lines


def flag_name(section: str, name: str) -> str:
    """Return the flag of a field, as users type it."""
    if name == "activation":
        return "the activation (--swiglu, --squared-relu ...)"
    return flag_names()[f"{section}.{name}"]


def _difference(name: str, mine: Any, theirs: Any) -> str:
    flag = flag_name("model", name)
    if isinstance(mine, bool):      # the flag takes no value, and may set the field to False (--disable-bias-linear)
        given = flag.startswith("--disable") or flag.startswith("--no-")
        words = {True: "not given", False: "given"}
        return f"{flag} is {words[mine == given]} here and {words[theirs == given]} in the checkpoint"
    return f"{flag} is {value_in_words(mine)} here and {value_in_words(theirs)} in the checkpoint"


def as_json(value: Any) -> Any:
    """Return a value as it is after writing it as JSON and reading it again: a tuple becomes a list."""
    return list(value) if isinstance(value, tuple) else value


def value_in_words(value: Any) -> str:
    """Return a value as users type it after its flag; "on" or "off" for a flag without a value."""
    value = as_json(value)
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
