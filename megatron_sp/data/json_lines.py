"""Read files of JSON lines, plain or compressed with gzip, and extract the texts of each line.

The preprocessor and the training of tokenizers both use this module, so they accept the same files and report bad lines
in the same way.
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

BATCH_BYTES = 1 << 18  # large, so that sending batches to workers is cheap; small, so that all workers get some
BATCH_LINES = 2000
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # Windows programs start UTF-8 files with these bytes; they are not part of the text
UNREADABLE = (".zst", ".bz2", ".xz", ".zip", ".parquet", ".arrow")


@dataclass(frozen=True)
class LineBatch:
    """Consecutive lines of one file.

    Attributes:
        path: the file.
        first: number of the first line, counted from 1.
        lines: the lines as bytes.
        bytes_read: bytes of the file, compressed where it is, that were read for this batch.
    """

    path: str
    first: int
    lines: list[bytes]
    bytes_read: int


def find_inputs(patterns: Sequence[str]) -> list[str]:
    """Return the files that the values of ``--input`` name, in order. A pattern stands for all files that match it.

    Raises:
        DataError: a file does not exist, or its format is not supported.
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
    """Yield the lines of all files in order, in batches. Files with the ending ``.gz`` are decompressed.

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
        return raw.tell() - before if raw.seekable() else size  # a pipe has no position: count the bytes of the lines

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
    """A line that cannot be used. The message says why; ``kind`` is the reason by which such lines are counted."""

    def __init__(self, kind: str, detail: str = ""):
        super().__init__(kind + (f" ({detail})" if detail else ""))
        self.kind = kind


def parse_line(line: bytes, keys: Sequence[str]) -> list[str]:
    """Return the texts of one JSON line, one for each key.

    Raises:
        BadLine: the line is not UTF-8 or not a JSON object, a key is missing, its value is not a string, or the value
            has a lone surrogate, which is half of a character.
    """
    try:
        # Any line may begin with the mark, since files that begin with it may have been concatenated.
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
    """Return the numbers and the texts of all good lines. Blank lines are skipped.

    Args:
        batch: the lines.
        keys: keys of the texts in each JSON object.
        complain: called with the number of each bad line and the reason.
    """
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
    """Handle bad lines: raise an error at the first one, or count them by reason.

    Call the object with the number of the line and the reason, as ``parse_lines`` does.

    Args:
        path: the file, for messages.
        skip: whether to count bad lines instead of raising an error.

    Attributes:
        skipped: number of bad lines by reason.
        first: file and number of the first bad line by reason.

    Raises:
        DataError: in a call, unless ``skip``.
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
