"""Find the input files of a corpus, decide how each is read, and choose one share of them.

::

    --input a.jsonl books/ 'web/*.jsonl.gz'   ->   Part(a.jsonl)  Part(books/1.txt)  Part(web/1.jsonl.gz)  ...
"""

from __future__ import annotations

import bz2
import glob
import gzip
import importlib.util
import io
import lzma
import os
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

from megatron_sp.errors import DataError, InstallationError
from megatron_sp.output_files import reason_of

STDIN = "-"
COMPRESSED_ENDINGS = (".gz", ".zst", ".bz2", ".xz")
JSON_ENDINGS = (".jsonl", ".json", ".ndjson")
TEXT_ENDINGS = (".txt", ".text", ".md", ".rst")
PARQUET_ENDINGS = (".parquet",)
#: Files that the preprocessor itself writes beside its output, which may lie in an input directory.
OWN_ENDINGS = (".report.json", ".checksums.json", ".unfinished.json")
UNREADABLE_ENDINGS = (".zip", ".tar", ".tgz", ".arrow", ".bin", ".idx")
#: First bytes of a file -> how it is compressed.
MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2", b"\xfd7zXZ": "xz"}
FORMATS = ("auto", "jsonl", "text", "parquet")


@dataclass(frozen=True)
class Part:
    """A file of the input, or a range of one.

    Attributes:
        path: the file; "-" is the standard input.
        kind: "jsonl", "text" or "parquet".
        size: bytes of the part on the disk; 0 where it is not known before it is read.
        start: where the part begins. Lines that begin before this byte belong to another part.
        end: the first byte after the part; -1: the end of the file. A line that begins before it belongs to this part.
    """

    path: str
    kind: str
    size: int
    start: int = 0
    end: int = -1


def find_parts(patterns: Sequence[str], file_format: str = "auto") -> list[Part]:
    """Return the files that the values of ``--input`` name, in order.

    Args:
        patterns: files, directories, patterns that stand for all files that match, and "-" for the standard input.
        file_format: "jsonl", "text" or "parquet" for all files; "auto": by the ending of each, and jsonl without a
            known one.

    Raises:
        DataError: a file does not exist or cannot be opened, or its format is not supported.
        InstallationError: a package that reads such files is missing.
    """
    parts: list[Part] = []
    for pattern in patterns:
        if pattern == STDIN:
            parts.append(Part(STDIN, "jsonl" if file_format == "auto" else file_format, 0))
            continue
        found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not found:
            matched = " (no file matches)" if glob.has_magic(pattern) else ""
            raise DataError(f"--input {pattern} does not exist{matched}: give files, directories or quoted patterns; "
                            f"relative paths start at {os.getcwd()}.")
        for path in found:
            parts += _parts_below(path, file_format) if os.path.isdir(path) else [_part(path, file_format)]
    if sum(part.path == STDIN for part in parts) > 1:
        raise DataError("--input names the standard input (-) twice; it can be read once.")
    if any(part.kind == "parquet" for part in parts):
        _require("pyarrow", "Parquet files")
    return parts


def _parts_below(directory: str, file_format: str) -> list[Part]:
    """Return the files of known endings in a directory and below, sorted by path; hidden files are left out."""
    parts = []
    for folder, folders, names in os.walk(directory, onerror=_cannot_list):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".") and not name.endswith(OWN_ENDINGS)):
            path = os.path.join(folder, name)
            if os.path.isfile(path) and (file_format != "auto" or _kind_of(path)):
                parts.append(_part(path, file_format))
    if not parts:
        endings = ", ".join((*JSON_ENDINGS, *TEXT_ENDINGS, *PARQUET_ENDINGS))
        raise DataError(f"--input {directory} has no files whose names end in {endings} (perhaps compressed); give the "
                        "files by name, or say with --input-format how to read them all.")
    return parts


def _cannot_list(error: OSError) -> None:
    raise DataError(f"--input {error.filename} cannot be read: {reason_of(error)}.")


def _kind_of(path: str) -> str:
    """Return how a file is read by its ending, or "" where the ending is not known."""
    name = path.lower()
    for ending in COMPRESSED_ENDINGS:
        name = name.removesuffix(ending)
    endings = {"jsonl": JSON_ENDINGS, "text": TEXT_ENDINGS, "parquet": PARQUET_ENDINGS}
    return next((kind for kind, known in endings.items() if name.endswith(known)), "")


def _part(path: str, file_format: str) -> Part:
    if path.lower().endswith(UNREADABLE_ENDINGS):
        raise DataError(f"--input {path}: this format is not read; convert it to jsonl, text (each plain or compressed "
                        "with gzip, zstd, bzip2 or xz) or Parquet first.")
    kind = (_kind_of(path) or "jsonl") if file_format == "auto" else file_format
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            return Part(path, kind, 0)  # a pipe; looking into it now would take bytes out
        if _compression_of(path) == "zstd":
            _require("zstandard", f"{path}, which is compressed with zstd,")
    except OSError as error:
        raise DataError(f"--input {path} cannot be read: {reason_of(error)}.") from None
    return Part(path, kind, status.st_size)


def _compression_of(path: str) -> str:
    with open(path, "rb") as file:
        return _compression(file.read(6))


def _compression(head: bytes) -> str:
    return next((name for magic, name in MAGIC.items() if head.startswith(magic)), "")


def _require(package: str, what: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise InstallationError(f"{what} cannot be read without the package {package}: pip install {package}")


def choose_share(parts: Sequence[Part], index: int, count: int) -> list[Part]:
    """Return one of ``count`` shares of the input, of about equal size. In order, the shares are the whole input.

    ::

        bytes of all files in a row   | a.jsonl            | b.jsonl.gz | c.jsonl                |
        3 shares                      | share 0        | share 1          | share 2            |

    A line belongs to the share in which it begins. A file that cannot be entered in the middle, as b.jsonl.gz, belongs
    as a whole to the share in which it begins.

    Args:
        parts: the whole input.
        index: number of the share, from 0.
        count: number of shares.

    Raises:
        DataError: the size of an input is not known.
    """
    for part in parts:
        if not part.size and (part.path == STDIN or not os.path.isfile(part.path)):
            raise DataError(f"--shard cannot divide {part.path}: it is a pipe, whose size is not known; write it to a "
                            "file.")
    total = sum(part.size for part in parts)
    begin, end = total * index // count, total * (index + 1) // count
    chosen, position = [], 0
    for part in parts:
        first, last = max(begin - position, 0), min(end - position, part.size)
        if part.kind == "jsonl" and not _compression_of(part.path):
            if first < last:
                chosen.append(replace(part, size=last - first, start=first, end=last))
        elif begin <= position < end:
            chosen.append(part)
        position += part.size
    return chosen


class _ZstdStream(io.RawIOBase):
    """Decompress zstd frames. Unlike the library's own stream it refuses a file that ends within a frame."""

    def __init__(self, raw: IO[bytes]):
        import zstandard

        self._raw, self._library = raw, zstandard
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._data, self._inside = b"", False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._data:
            compressed = self._frame.unused_data if self._frame.eof else b""
            compressed = compressed or self._raw.read(1 << 16)
            if not compressed:
                if self._inside and not self._frame.eof:
                    raise EOFError("it ends in the middle; the file is cut short")
                return 0
            if self._frame.eof:
                self._frame = self._library.ZstdDecompressor().decompressobj()
            self._data, self._inside = self._frame.decompress(compressed), True
        count = min(len(buffer), len(self._data))
        buffer[:count] = self._data[:count]
        self._data = self._data[count:]
        return count


def open_part(part: Part) -> tuple[IO[bytes], Any]:
    """Open a jsonl or text file, and decompress it where it is compressed.

    Returns:
        The stream to read, and the file below it, whose position shows how much of the disk was read.

    Raises:
        OSError: the file cannot be opened.
    """
    raw = sys.stdin.buffer if part.path == STDIN else open(part.path, "rb")  # noqa: SIM115 (the reader closes it)
    compression = _compression(raw.peek(6)) if isinstance(raw, io.BufferedReader) else ""
    if compression == "gzip":
        return gzip.GzipFile(fileobj=raw), raw  # type: ignore[return-value]
    if compression == "bz2":
        return bz2.BZ2File(raw), raw  # type: ignore[return-value]
    if compression == "xz":
        return lzma.LZMAFile(raw), raw  # type: ignore[return-value]
    if compression == "zstd":
        _require("zstandard", f"{part.path}, which is compressed with zstd,")
        return io.BufferedReader(_ZstdStream(raw), 1 << 17), raw  # type: ignore[type-var]
    if part.start:
        raw.seek(part.start - 1)
        raw.readline()  # the end of a line that belongs to the part before, or the line end just before this part
    return raw, raw


def total_size(parts: Sequence[Part]) -> int | None:
    """Return the bytes of all parts on the disk, or None if one is a pipe."""
    piped = any(not part.size and (part.path == STDIN or not os.path.isfile(part.path)) for part in parts)
    return None if piped else sum(part.size for part in parts)


