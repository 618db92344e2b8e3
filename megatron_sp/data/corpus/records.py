"""Extract the texts of one record, and say what is wrong with a record that cannot be used."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_sp.errors import DataError

EXCERPT = 160  # characters of a bad record that a report shows
EXAMPLES = 10  # bad records of each kind that a report shows


CURE = "Correct it, or pass --on-error skip to skip and count such records."


class BadRecord(Exception):
    """A record that cannot be used. The message says why.

    Attributes:
        kind: the reason by which such records are counted.
        cure: what the user can do.
    """

    def __init__(self, kind: str, detail: str = "", excerpt: object = "", cure: str = CURE):
        super().__init__(kind + (f" ({detail})" if detail else ""))
        self.kind, self.cure = kind, cure
        self.excerpt = (excerpt[:4 * EXCERPT].decode("utf-8", "backslashreplace") if isinstance(excerpt, bytes)
                        else str(excerpt))[:EXCERPT]


def parse_line(line: bytes, keys: Sequence[str]) -> list[str]:
    """Return the texts of one JSON line, one for each key.

    Raises:
        BadRecord: the line is not UTF-8 or not a JSON object, a key is missing, its value is not a string, or the value
            has a lone surrogate, which is half of a character.
    """
    try:
        record = json.loads(_decode(line))
    except (ValueError, RecursionError) as error:
        detail = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise BadRecord("malformed JSON", detail, line) from None
    if not isinstance(record, dict):
        raise BadRecord("not a JSON object", f"it is a {type(record).__name__}", line)
    texts = []
    for key in keys:
        if key not in record:
            present = ", ".join(map(repr, list(record)[:8]))
            raise BadRecord(f"no key {key!r}", f"keys: {present}", line, _cure_for(record))
        texts.append(_text(record[key], key, line))
        if b"\\u" in line and not _is_encodable(texts[-1]):
            raise BadRecord(f"{key!r} has a lone surrogate", "half of a character, such as \\ud800", line)
    return texts


def _cure_for(record: dict[str, Any]) -> str:
    """Return what to do about a record that lacks a key. All records of the file are probably alike."""
    for key, value in record.items():
        if isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value):
            return (f"Its key {key!r} holds a conversation, and preprocessing takes plain texts. Write each "
                    "conversation as one text first, for example with apply_chat_template of a tokenizer in "
                    "transformers.")
    if texts := [key for key, value in record.items() if isinstance(value, str)]:
        return f"Name the key of the text, for example --json-keys {max(texts, key=lambda key: len(record[key]))}."
    return CURE


def parse_row(row: Sequence[Any], keys: Sequence[str]) -> list[str]:
    """Return the texts of a row of a Parquet file.

    Raises:
        BadRecord: a value is not a string.
    """
    return [_text(value, key, value) for value, key in zip(row, keys, strict=True)]


def parse_text(record: bytes) -> str:
    """Return the text of a document of a text file.

    Raises:
        BadRecord: it is not UTF-8, or it has NUL bytes, as files do that are not text.
    """
    if b"\0" in record:
        raise BadRecord("NUL byte", f"byte {record.index(0) + 1}; is this a text file?", record)
    return _decode(record)


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRecord("invalid UTF-8", f"byte {error.start + 1} of it", data[max(error.start - 40, 0):]) from None


def _text(value: Any, key: str, record: object) -> str:
    if not isinstance(value, str):
        raise BadRecord(f"{key!r} is not a string", f"it is a {type(value).__name__}", record)
    return value


def _is_encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


@dataclass
class Skipped:
    """The bad records that were left out.

    Attributes:
        counts: number of them by reason.
        examples: by reason, the first few: where each is, what is wrong with it, and how it begins.
    """

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[tuple[str, str, str]]] = field(default_factory=dict)

    def note(self, where: str, error: BadRecord) -> None:
        self.counts[error.kind] += 1
        examples = self.examples.setdefault(error.kind, [])
        if len(examples) < EXAMPLES:
            examples.append((where, str(error), error.excerpt))

    def add(self, other: Skipped) -> None:
        self.counts.update(other.counts)
        for kind, examples in other.examples.items():
            mine = self.examples.setdefault(kind, [])
            mine += examples[:EXAMPLES - len(mine)]

    def first(self, kind: str) -> str:
        """Return where the first bad record of a kind is."""
        return self.examples[kind][0][0]


class BadRecords:
    """Handle bad records: raise an error at the first one, or count them.

    Call the object with the place of the record in its block and the reason, as ``readers.parse`` does.

    Args:
        place_of: returns file and line of a record, for messages.
        skip: whether to count bad records instead of raising an error.

    Attributes:
        skipped: the bad records so far.

    Raises:
        DataError: in a call, unless ``skip``.
    """

    def __init__(self, place_of: Callable[[int], str], skip: bool):
        self.place_of, self.skip = place_of, skip
        self.skipped = Skipped()

    def __call__(self, place: int, error: BadRecord) -> None:
        where = self.place_of(place)
        if not self.skip:
            raise DataError(f"{where}: {error}. {error.cure}")
        self.skipped.note(where, error)
