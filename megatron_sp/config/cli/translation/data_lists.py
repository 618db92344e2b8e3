"""Data paths that a file lists (``--data-args-path``, ``--per-split-data-args-path``), and validation sets by name."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Any

from megatron_sp.config.cli.claims import Claims
from megatron_sp.config.cli.named_sets import named_sets
from megatron_sp.config.cli.values import is_number, strip_quotes

LIST, PER_SPLIT, SEVERAL = "--data-args-path", "--per-split-data-args-path", "--multiple-validation-sets"
SPLITS = ("train", "valid", "test")
VALID = "data.valid_data_path"


def translate_data_lists(claims: Claims) -> None:
    """Claim the data paths that files list, and give a name to each of several validation sets."""
    _list(claims)
    _per_split(claims)
    if SEVERAL in claims.given:
        _name_validation_sets(claims)


def _list(claims: Claims) -> None:
    """Read the values of ``--data-path`` from a file: prefixes, or weights and prefixes in turn, on any lines."""
    text = _content(LIST, claims)
    if text is None:
        return
    words = tuple(text.split())
    if words:
        claims.claim("data.data_path", words, LIST)
    else:
        claims.problems.append(f"{LIST} {_path(LIST, claims)} is empty; list prefixes, or weights and prefixes in "
                               "turn.")


def _per_split(claims: Claims) -> None:
    """Read the data paths of the splits from a JSON object with the keys train, valid and test."""
    text = _content(PER_SPLIT, claims)
    if text is None:
        return
    where = f"{PER_SPLIT} {_path(PER_SPLIT, claims)}"
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError("a JSON object is expected")
        if unknown := [key for key in content if key not in SPLITS]:
            raise ValueError(f"the key {unknown[0]!r} is unknown")
        words = {name: _words(name, content.get(name)) for name in SPLITS}
    except ValueError as error:
        claims.problems.append(f"{where} cannot be read: {error}. Write "
                               '{"train": ["0.3", "A", "0.7", "B"], "valid": ["C"], "test": ["D"]}.')
        return
    if not any(words.values()) or not (words["train"] or claims.claimed("train.skip_train")):
        claims.problems.append(f"{where} has no data for training; give the key train.")
        return
    for name in SPLITS:
        if words[name]:
            claims.claim(f"data.{name}_data_path", words[name], PER_SPLIT)


def _words(name: str, value: Any) -> tuple[str, ...]:
    """Return the data path of one split, which the file gives as a list, a string, or validation sets by name."""
    if value is None:
        return ()
    if isinstance(value, str):
        return tuple(value.split())
    if isinstance(value, dict) and name == "valid":
        return tuple(word for own, part in value.items()
                     for word in _with_name(own, _words("", part)))
    if not isinstance(value, list) or not all(isinstance(word, (str, int, float)) for word in value):
        raise ValueError(f"{name or 'valid'} is neither a list of prefixes and weights nor a string")
    return tuple(str(word) for word in value)


def _with_name(name: str, words: tuple[str, ...]) -> tuple[str, ...]:
    return (f"{name}={words[0]}", *words[1:]) if words else ()


def _content(flag: str, claims: Claims) -> str | None:
    """Return the text of the file that a flag names; None without the flag, or where the file cannot be read."""
    path = _path(flag, claims)
    if not path or (claims.plan and not os.path.exists(path)):  # a plan needs no data
        return None
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror or str(error)) if isinstance(error, OSError) else "it is not UTF-8 text"
        claims.problems.append(f"{flag} {path} cannot be read: {why}.")
        return None


def _path(flag: str, claims: Claims) -> str:
    words = claims.given.get(flag) or [""]
    return "" if flag in claims.broken else os.path.expanduser(strip_quotes(words[0]))


def _name_validation_sets(claims: Claims) -> None:
    """Make a validation set of each prefix of ``--valid-data-path``, named like its file; weights have no effect."""
    words = claims.claimed(VALID)
    if not words:
        if not claims.plan:
            claims.problems.append(f"{SEVERAL} needs --valid-data-path with the prefixes of the sets.")
        return
    try:
        if "" not in named_sets(words):
            return
    except ValueError:
        return  # the check of --valid-data-path reports it
    prefixes = _without_weights(words)
    names = [re.sub(r"[^\w.-]", "_", os.path.basename(prefix)) for prefix in prefixes]
    names = [name if re.match("[A-Za-z_]", name) else f"_{name}" for name in names]
    names = [name if names.count(name) == 1 else f"{name}.{names[:place].count(name) + 1}"
             for place, name in enumerate(names)]
    [spelling] = list(claims.values[VALID])[-1:]
    claims.claim_alone(VALID, tuple(f"{name}={prefix}" for name, prefix in zip(names, prefixes, strict=True)), spelling)


def _without_weights(words: Sequence[str]) -> list[str]:
    if len(words) % 2 == 0 and all(map(is_number, words[::2])):
        return list(words[1::2])
    return list(words)
