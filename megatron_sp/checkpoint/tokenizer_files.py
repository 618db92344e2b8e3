"""Keep the tokenizer's files in each checkpoint, so that it can be used where the originals are gone. No torch."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_sp.checkpoint.files import TOKENIZER, checksum
from megatron_sp.config.schema import Data

#: Files of a Hugging Face tokenizer. Others in its directory, such as weights or Python code, are not copied.
HUGGING_FACE_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
                      "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "config.json",
                      "chat_template.jinja", "generation_config.json", "spiece.model", "sentencepiece.bpe.model")

#: Fields of ``Data`` that name a tokenizer's file (or directory), and the flag of each.
FIELDS = {"vocab_file": "--vocab-file", "merge_file": "--merge-file", "tokenizer_model": "--tokenizer-model"}


def copied_names(data: Data) -> dict[str, Path]:
    """Return the tokenizer's files that exist: name within the copy -> original.

    A tokenizer that is named by its entry in Hugging Face's local cache has none here.
    """
    found: dict[str, Path] = {}
    for name in FIELDS:
        path = Path(getattr(data, name))
        if not getattr(data, name):
            continue
        if path.is_dir():
            found |= {file: path / file for file in HUGGING_FACE_FILES if (path / file).is_file()}
        elif path.is_file():
            found[path.name] = path
    return found


def copy_tokenizer(data: Data, checkpoint: Path) -> None:
    """Copy the tokenizer's files into a checkpoint that is being built; nothing without such files.

    Raises:
        OSError: a file cannot be read or written.
    """
    for name, original in copied_names(data).items():
        (checkpoint / TOKENIZER).mkdir(exist_ok=True)
        shutil.copyfile(original, checkpoint / TOKENIZER / name)


def with_existing_tokenizer(data: Data, checkpoint: Path) -> tuple[Data, list[str]]:
    """Return the data flags of a checkpoint's run, with the checkpoint's copies in place of files that are gone.

    Args:
        data: the flags as the checkpoint's configuration holds them.
        checkpoint: its directory.

    Returns:
        the flags, and sentences for the log
    """
    changes: dict[str, Any] = {}
    notes = []
    for name, flag in FIELDS.items():
        value = getattr(data, name)
        if not value:
            continue
        original, copy = Path(value), checkpoint / TOKENIZER / Path(value).name
        if name == "tokenizer_model" and not copy.exists() and _is_hugging_face(checkpoint / TOKENIZER):
            copy = checkpoint / TOKENIZER
        if copy.exists() and not original.exists():
            changes[name] = str(copy)
            notes.append(f"{flag} {value} is not there; the copy in the checkpoint is used: {copy}")
    return replace(data, **changes), notes


def _is_hugging_face(directory: Path) -> bool:
    return any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def tokenizer_differences(data: Data, checkpoint: Path) -> list[str]:
    """Return a sentence for each tokenizer file of a run that differs from the checkpoint's copy of that name.

    Training on with another tokenizer would give the tokens other meanings. The shapes of the weights do not show it.
    """
    lines = []
    for name, original in copied_names(data).items():
        copy = checkpoint / TOKENIZER / name
        if copy.is_file() and checksum(copy) != checksum(original):
            lines.append(f"the tokenizer's file {original} differs from the one of the checkpoint's run, whose copy is "
                         f"{copy}; tokens may have other meanings now")
    return lines
