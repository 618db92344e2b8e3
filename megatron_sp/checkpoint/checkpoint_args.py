"""``--use-checkpoint-args``: take flags that the command line leaves out from the checkpoint. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_sp.checkpoint.state_file import read_newest_state, read_part
from megatron_sp.checkpoint.tokenizer_files import FIELDS, with_existing_tokenizer
from megatron_sp.config.cli.flags import parse
from megatron_sp.config.cli.options import Option, schema_options
from megatron_sp.config.cli.translation.foreign import SWITCHES
from megatron_sp.config.schema import Run
from megatron_sp.config.serialize import from_dict

#: Flags outside the model's section that belong to a trained model: how long its sequences are, and its tokenizer.
ALSO = ("data.seq_length", "data.seq_length_schedule", "data.tokenizer_type", "data.trust_remote_code",
        *(f"data.{name}" for name in FIELDS))
#: Flags that give the sequence length. If the command line has one of them, none is taken from the checkpoint.
LENGTHS = {"data.seq_length", "data.seq_length_schedule"}

#: Fields of the model that do not come from a checkpoint: padding depends on the layout, and no weights are drawn.
NOT_TAKEN = ("model.padded_vocab_size", "model.init_method_std", "model.init_method_xavier_uniform",
             "model.embedding_init_method_std")


def with_checkpoint_args(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command line with the checkpoint's flags added, and sentences for the log.

    Without ``--use-checkpoint-args``, or where ``--load`` holds no checkpoint, it is returned as it is. Flags on the
    command line win over the checkpoint's. If the model's shape then differs from the checkpoint's, loading refuses the
    checkpoint.

    Raises:
        CheckpointError: the checkpoint in ``--load`` cannot be read.
    """
    words = list(argv)
    parsed = parse(words)
    flags = parsed.run.checkpoint
    if not flags.use_checkpoint_args:
        return words, []
    found = read_newest_state(Path(flags.load), flags.ckpt_step or None) if flags.load else None
    if found is None:
        return words, [f"--use-checkpoint-args: --load {flags.load} holds no checkpoint to take flags from"]
    checkpoint, state = found
    saved = read_part(state, "config", from_dict)
    data, notes = with_existing_tokenizer(saved.data, checkpoint.path)
    values = _values(saved, data)
    if LENGTHS & parsed.given:
        values = {key: value for key, value in values.items() if key not in LENGTHS}
    added = [word for key, option in schema_options().items() if key in values and key not in parsed.given
             for word in _words(option, values[key])]
    if "model.activation" not in parsed.given:      # several switches set this field
        added += [name for name, setting in SWITCHES.items() if setting == ("model.activation", saved.model.activation)]
    return words + added, [*notes, f"flags from {checkpoint.path}: {' '.join(added) or 'none'}"]


def _values(saved: Run, data: Any) -> dict[str, Any]:
    """Return the values to take, by ``section.field``."""
    keys = [key for key in schema_options() if (key.startswith("model.") and key not in NOT_TAKEN) or key in ALSO]
    if saved.model.position_embedding_type != "learned_absolute" and (
            saved.model.max_position_embeddings == saved.data.seq_length):
        keys.remove("model.max_position_embeddings")     # derived from --seq-length, which may have changed
    sections = {"model": saved.model, "data": data}
    return {key: getattr(sections[section], name) for key in keys for section, _, name in (key.partition("."),)}


def _words(option: Option, value: Any) -> list[str]:
    """Return the arguments that set a field to this value; none if the value is the field's default."""
    if value == option.default:
        return []
    if isinstance(value, bool):
        return [option.off or option.names[0]]
    # --num-query-groups, unlike --num-key-value-heads, has no effect without --group-query-attention
    name = "--num-key-value-heads" if option.key == "model.num_query_groups" else option.names[0]
    return [name, *(map(str, value) if isinstance(value, (tuple, list)) else [str(value)])]
