"""``--load-hf DIR``: take the flags of the model, and of the tokenizer, from a Hugging Face model's directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_sp.config.cli.claims import Claims
from megatron_sp.config.cli.options import flag_names
from megatron_sp.config.families import CONFIG, model_fields, read_config

LOAD_HF = "--load-hf"
_KEY = "checkpoint.load_hf"
#: Fields for which the command line wins over config.json: they change no weight, and users change them to train on
#: longer sequences or with another dropout.
MAY_DIFFER = {"rotary_base", "rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor",
              "rope_scaling_type", "rotary_scaling_factor", "original_max_position_embeddings", "yarn_beta_fast",
              "yarn_beta_slow", "yarn_correction_range_round_to_int", "mscale", "mscale_all_dim",
              "yarn_attention_factor",
              "max_position_embeddings", "attention_dropout", "hidden_dropout", "attention_pattern", "window_size",
              "window_attn_skip_freq", "attention_pattern_per_layer", "attention_block_size", "attention_local_blocks",
              "attention_global_blocks", "attention_random_blocks", "attention_stride", "attention_blocks_by_head",
              "attention_pattern_seed"}
#: A directory that contains one of these files holds a tokenizer.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def claim_model_of_load_hf(claims: Claims) -> None:
    """Set every field that config.json determines and no flag gives; report each flag that contradicts it."""
    directory = claims.claimed(_KEY)
    if not directory:
        return
    if claims.given.get("--model-preset"):
        claims.problems.append(f"--model-preset and {LOAD_HF} both describe the model; keep one of them.")
    try:
        config = read_config(directory)
    except ValueError as error:
        claims.problems.append(f"{LOAD_HF}: {error}.")
        return
    fields, problems = model_fields(config)
    claims.problems += [f"{LOAD_HF} {directory}: {CONFIG}: {problem}." for problem in problems]
    if problems:
        return
    # Learned positions are weights, so their number cannot change.
    fixed = {"max_position_embeddings"} if fields.get("position_embedding_type") == "learned_absolute" else set()
    for name, value in fields.items():
        _claim(claims, name, value, directory, name in MAY_DIFFER - fixed)
    _claim_tokenizer(claims, directory)


def _claim(claims: Claims, name: str, value: Any, directory: str, may_differ: bool) -> None:
    key = f"model.{name}"
    given = claims.values.get(key)
    if not given:
        claims.claim(key, value, LOAD_HF)
        return
    spelling, typed = next(iter(given.items()))
    if typed == value:
        return
    said = spelling if isinstance(typed, bool) or not claims.given.get(spelling) else f"{spelling} {_text(typed)}"
    theirs = "the activation" if name == "activation" else flag_names().get(key, name)
    if may_differ:
        claims.notes.append(f"{said} is used; {CONFIG} of {LOAD_HF} {directory} says {_text(value)}.")
    else:
        claims.problems.append(f"{said} contradicts {LOAD_HF} {directory}, whose {CONFIG} makes {theirs} "
                               f"{_text(value)}; leave {spelling} out.")


def _claim_tokenizer(claims: Claims, directory: str) -> None:
    """Take the tokenizer of the directory, where there is one and no flag names another."""
    named = [name for name in ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
             if claims.values.get(f"data.{name}")]
    if named or not any((Path(directory) / name).is_file() for name in TOKENIZER_FILES):
        return
    claims.claim("data.tokenizer_type", "HuggingFaceTokenizer", LOAD_HF)
    claims.claim("data.tokenizer_model", directory, LOAD_HF)


def _text(value: Any) -> str:
    """Return a value as messages show it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
