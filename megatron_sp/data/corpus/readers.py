"""Read the input in blocks of whole records, and extract the texts of each record.

A record is a line of JSON, a text document, or a row of a Parquet file. The parent process reads blocks; worker
processes take the records out of them. Blocks have about ``BLOCK_BYTES``, so memory does not grow with a file, but a
block always holds whole records.
"""

from __future__ import annotations

import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, Any

from megatron_sp.data.corpus.inputs import STDIN, Part, open_part
from megatron_sp.data.corpus.records import BadRecord, parse_line, parse_row, parse_text
from megatron_sp.errors import DataError

BLOCK_BYTES = 1 << 19  # large, so that sending blocks to workers is cheap; small, so that all workers get some
BLOCK_RECORDS = 1000  # files or Parquet rows in a block
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # Windows programs start UTF-8 files with these bytes; they are not part of the text


@dataclass(frozen=True)
class Position:
    """Where reading continues after a block.

    Attributes:
        part: number of the part.
        offset: bytes of the part's stream (after decompression), or rows, that were read.
        records: records of the part that were read.
    """

    part: int = 0
    offset: int = 0
    records: int = 0


@dataclass(frozen=True)
class Block:
    """Consecutive records.

    Attributes:
        part: the part that the records are from; for text files without a separator the first of several.
        first: number of the first record in its part, counted from 1.
        data: lines or texts with their separators; values of the keys for each row; or paths of text files.
        separator: what ends a text; b"": each of the paths in ``data`` is one text.
        bytes_read: bytes of the input on the disk, for the progress bar.
        next: where reading continues.
    """

    part: Part
    first: int
    data: Any
    separator: bytes
    bytes_read: int
    next: Position

    def place_of(self, record: int) -> str:
        """Return file and line of a record of the block, for messages."""
        if self.part.kind == "text" and not self.separator:
            return self.data[record]
        number = self.first + record
        path = "standard input" if self.part.path == STDIN else self.part.path
        if self.part.kind == "jsonl" and self.part.start:
            number += _lines_before(self.part)
        return f"{path}, {dict(jsonl='line', text='document', parquet='row')[self.part.kind]} {number}"


@lru_cache(maxsize=16)
def _lines_before(part: Part) -> int:
    """Count the lines that begin before a part. Only messages need it, so the part's reader does not count them."""
    lines, left = 0, part.start - 1
    with open(part.path, "rb") as file:
        while left > 0 and (data := file.read(min(left, 1 << 24))):
            lines += data.count(b"\n")
            left -= len(data)
        return lines + bool(file.readline())


def read_blocks(parts: Sequence[Part], keys: Sequence[str] = (), separator: bytes = b"",
                start: Position = Position()) -> Iterator[Block]:  # noqa: B008 (it cannot be changed)
    """Yield all records in order, in blocks.

    Args:
        parts: the input.
        keys: columns of Parquet files.
        separator: what stands between the documents of a text file; b"": each file is one document.
        start: where to begin: the ``next`` of the last block that an earlier process finished.

    Raises:
        DataError: a file cannot be read.
    """
    number, first = start.part, start
    while number < len(parts):
        part = parts[number]
        name = "standard input" if part.path == STDIN else part.path
        try:
            if part.kind == "parquet":
                yield from _row_blocks(part, keys, number, first.offset)
            elif part.kind == "text" and not separator and part.path != STDIN:
                block = _file_block(parts, number)
                yield block
                number = block.next.part - 1
            else:
                yield from _stream_blocks(part, b"\n" if part.kind == "jsonl" else separator, number, first)
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise DataError(f"--input {name} cannot be read: {reason}.") from None
        except Exception as error:
            if type(error).__module__.split(".")[0] not in ("zstandard", "zstd", "pyarrow"):
                raise
            raise DataError(f"--input {name} cannot be read: {str(error).strip()}.") from None
        number, first = number + 1, Position()


def _stream_blocks(part: Part, separator: bytes, number: int, start: Position) -> Iterator[Block]:
    """Yield the records of one file that a separator ends; without a separator the whole file is one record."""
    stream, raw = open_part(part)
    with raw:
        _skip(stream, raw, start.offset)
        offset, records, seen = start.offset, start.records, _tell(raw)
        for data in _cut(_until(stream, part), separator):
            offset += len(data)
            count = data.count(separator) if separator else 1
            now = _tell(raw)
            yield Block(part, records + 1, data if separator else [data], separator or b"\n",
                        (now - seen) if raw.seekable() else len(data), Position(number, offset, records + count))
            records, seen = records + count, now


def _tell(raw: Any) -> int:
    return raw.tell() if raw.seekable() else 0  # a pipe has no position


def _skip(stream: IO[bytes], raw: Any, count: int) -> None:
    """Leave out the first bytes, which an earlier process has read. A plain file is entered there directly."""
    if stream is raw and raw.seekable():
        raw.seek(raw.tell() + count)
        return
    while count > 0:
        data = stream.read(min(count, BLOCK_BYTES))
        if not data:
            raise EOFError("it is shorter than when the unfinished run read it")
        count -= len(data)


def _until(stream: IO[bytes], part: Part) -> Iterator[bytes]:
    """Yield the bytes of a stream up to the end of the last line that begins in the part."""
    if part.end < 0:
        while data := stream.read(BLOCK_BYTES):
            yield data
        return
    left = part.end - stream.tell()
    while left > 0 and (data := stream.read(min(left, BLOCK_BYTES))):
        left -= len(data)
        yield data + (stream.readline() if not left and not data.endswith(b"\n") else b"")


def _cut(pieces: Iterator[bytes], separator: bytes) -> Iterator[bytes]:
    """Yield whole records with their separators, many at a time. The last record may have no separator.

    Separators are found from left to right and do not overlap, so that the records do not depend on the pieces.
    """
    held: list[bytes] = []  # the beginning of a record whose end has not been read yet
    for piece in pieces:
        # A separator may begin in the bytes held and end in this piece.
        border = held[-1][-(len(separator) - 1):] if held and len(separator) > 1 else b""
        if not separator or separator not in border + piece:
            held.append(piece)
            if len(piece) < len(separator):
                held = [b"".join(held)]
            continue
        data = b"".join([*held, piece])
        rest = len(data) - (data.rfind(b"\n") + 1) if separator == b"\n" else len(data.split(separator)[-1])
        yield data[:len(data) - rest]
        held = [data[len(data) - rest:]] if rest else []
    if last := b"".join(held):
        yield last


def _file_block(parts: Sequence[Part], number: int) -> Block:
    """Return a block of the next text files, each of which is one document. The workers open them."""
    chosen = [parts[number]]
    for part in parts[number + 1:number + BLOCK_RECORDS]:
        if part.kind != "text" or part.path == STDIN or sum(each.size for each in chosen) + part.size > BLOCK_BYTES:
            break
        chosen.append(part)
    return Block(chosen[0], 1, [part.path for part in chosen], b"", sum(part.size for part in chosen),
                 Position(number + len(chosen)))


def _row_blocks(part: Part, keys: Sequence[str], number: int, skip: int) -> Iterator[Block]:
    """Yield the rows of a Parquet file, without the first ``skip`` rows."""
    import pyarrow.parquet

    if not os.path.isfile(part.path):
        raise DataError(f"--input {part.path}: a Parquet file cannot be read from a pipe; write it to a file.")
    with pyarrow.parquet.ParquetFile(part.path) as file:
        present = file.schema_arrow.names
        if missing := [key for key in keys if key not in present]:
            raise DataError(f"--input {part.path} has no column {missing[0]!r}; its columns are "
                            f"{', '.join(map(repr, present[:8]))}. Name the columns with --json-keys.")
        rows, reported, total = 0, 0, max(file.metadata.num_rows, 1)
        for batch in file.iter_batches(batch_size=BLOCK_RECORDS, columns=list(keys)):
            begin, rows = rows, rows + batch.num_rows
            if rows <= skip:
                continue
            batch = batch.slice(max(skip - begin, 0))
            columns = [batch.column(batch.schema.get_field_index(key)).to_pylist() for key in keys]
            share = part.size * rows // total - reported
            reported += share
            yield Block(part, rows - batch.num_rows + 1, list(zip(*columns)), b"", share, Position(number, rows, rows))


def parse(block: Block, keys: Sequence[str], complain: Callable[[int, BadRecord], None]
          ) -> tuple[list[int], list[list[str]]]:
    """Return the place in the block, and the texts, of every good record. Blank lines are left out.

    Args:
        block: the records.
        keys: keys of the texts in each record.
        complain: called with the place of each bad record and the reason.
    """
    places, rows = [], []
    for place, record in enumerate(_records_of(block)):
        if block.part.kind == "jsonl" and not record.strip():
            continue
        try:
            rows.append(parse_row(record, keys) if block.part.kind == "parquet" else
                        parse_line(record, keys) if block.part.kind == "jsonl" else [parse_text(record)])
            places.append(place)
        except BadRecord as error:
            complain(place, error)
    return places, rows


def _records_of(block: Block) -> Iterator[Any]:
    if block.part.kind == "parquet":
        yield from block.data
    elif not block.separator:
        for path in block.data:
            yield _read_whole(Part(path, "text", 0))
    else:
        records: list[bytes] = block.data if isinstance(block.data, list) else block.data.split(block.separator)
        if len(records) > 1 and not records[-1]:
            records.pop()  # the block ends with a separator
        for record in records:
            # Any record may begin with the mark, since files that begin with it may have been concatenated.
            yield record.removeprefix(BYTE_ORDER_MARK)


def _read_whole(part: Part) -> bytes:
    try:
        stream, raw = open_part(part)
        with raw:
            return stream.read().removeprefix(BYTE_ORDER_MARK)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"--input {part.path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
