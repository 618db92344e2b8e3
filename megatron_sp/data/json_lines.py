"""Read JSON lines: files, compressed or not, in batches of lines, and the texts of each line.

The preprocessor and the tokenizer's training read through this module, so both accept the same files and describe bad
lines in the same words.
"""

from __future__ import annotations

import glob
import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from megatron_sp.errors import DataError

BATCH_BYTES = 1 << 18  # large enough that sending it costs nothing, small enough to keep all workers busy
BATCH_LINES = 2000
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # Windows programs put it at the start of UTF-8 files; it is no character of a text
UNREADABLE = (".zst", ".bz2", ".xz", ".zip", ".parquet", ".arrow")


@dataclass(frozen=True)
class LineBatch:
    """Consecutive lines of one file; ``first`` is the number of the first, from 1."""

    path: str
    first: int
    lines: list[bytes]
    bytes_read: int


def find_inputs(patterns: Sequence[str]) -> list[str]:
    """Return the files of ``--input`` in order, with the files that match where a pattern is given.

    Raises:
        DataError: a file does not exist or has a format that is not read.
    """
    paths: list[str] = []
    for pattern in patterns:
        found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern))
        if not found:
            raise DataError(f"--input {pattern} does not exist" +
                            (" (no file matches)." if glob.has_magic(pattern) else "."))
        for path in found:
            if os.path.isdir(path):
                raise DataError(f"--input {path} is a directory; give files, for example '{path}/*.jsonl'.")
            if path.endswith(UNREADABLE):
                raise DataError(f"--input {path}: only .jsonl and .jsonl.gz are read; convert it first.")
        paths += found
    return paths


def read_batches(paths: Iterable[str]) -> Iterator[LineBatch]:
    """Read the lines of all files, in order, in batches; ``.gz`` files are unpacked on the way.

    Raises:
        DataError: a file cannot be read.
    """
    for path in paths:
        try:
            with open(path, "rb") as raw:
                lines: Iterable[bytes] = gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw
                yield from _batches_of(path, lines, raw)
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise DataError(f"--input {path} cannot be read: {reason}.") from None


def _batches_of(path: str, lines: Iterable[bytes], raw: IO[bytes]) -> Iterator[LineBatch]:
    batch: list[bytes] = []
    first, size, before = 1, 0, 0

    def bytes_read() -> int:
        return raw.tell() - before if raw.seekable() else size  # pipes do not know their position

    for number, line in enumerate(lines, 1):
        batch.append(line)
        size += len(line)
        if size >= BATCH_BYTES or len(batch) >= BATCH_LINES:
            yield LineBatch(path, first, batch, bytes_read())
            before += bytes_read()
            batch, size, first = [], 0, number + 1
    if batch:
        yield LineBatch(path, first, batch, bytes_read())


class BadLine(Exception):
    """A line that cannot be used; the text says why, ``kind`` is the group it is counted in."""

    def __init__(self, kind: str, detail: str = ""):
        super().__init__(kind + (f" ({detail})" if detail else ""))
        self.kind = kind


def parse_line(line: bytes, keys: Sequence[str]) -> list[str]:
    """Return the texts of one JSON line, one for each key.

    Raises:
        BadLine: not UTF-8, not JSON, a key is missing or not a string, or half of a character.
    """
    try:
        # Not only in the first line: files that begin with the mark may have been concatenated.
        text = line.removeprefix(BYTE_ORDER_MARK).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadLine("invalid UTF-8", f"byte {error.start + 1} of the line") from None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        detail = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise BadLine("malformed JSON", detail) from None
    if not isinstance(record, dict):
        raise BadLine("not a JSON object", f"it is a {type(record).__name__}")
    texts = []
    for key in keys:
        if key not in record:
            raise BadLine(f"no key {key!r}", "keys: " + ", ".join(map(repr, list(record)[:8])))
        value = record[key]
        if not isinstance(value, str):
            raise BadLine(f"{key!r} is not a string", f"it is a {type(value).__name__}")
        if b"\\u" in line and not _is_encodable(value):
            raise BadLine(f"{key!r} has a lone surrogate", "half of a character, such as \\ud800")
        texts.append(value)
    return texts


def _is_encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def parse_lines(batch: LineBatch, keys: Sequence[str], complain: Callable[[int, BadLine], None]
                ) -> tuple[list[int], list[list[str]]]:
    """Return the numbers and texts of all lines that are not blank; bad lines go to ``complain``."""
    numbers, rows = [], []
    for number, line in enumerate(batch.lines, batch.first):
        if not line.removeprefix(BYTE_ORDER_MARK).strip():
            continue
        try:
            rows.append(parse_line(line, keys))
            numbers.append(number)
        except BadLine as error:
            complain(number, error)
    return numbers, rows


class BadLines:
    """Stops at a bad line, or counts it; call it with the number of the line and what is wrong.

    Args:
        path: the file.
        skip: count and go on instead of raising.

    Raises:
        DataError: on a call, unless ``skip``.
    """

    def __init__(self, path: str, skip: bool):
        self.path, self.skip = path, skip
        self.skipped: Counter[str] = Counter()
        self.first: dict[str, str] = {}

    def __call__(self, number: int, error: BadLine) -> None:
        where = f"{self.path}, line {number}"
        if not self.skip:
            raise DataError(f"{where}: {error}. Correct the line, or pass --on-error skip to skip and count such "
                            "lines.") from None
        self.skipped[error.kind] += 1
        self.first.setdefault(error.kind, where)
