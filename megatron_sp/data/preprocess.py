"""From jsonl files to token sets: many processes, bounded memory, the same bytes for any number of them.

The parent reads lines and hands them out in batches; workers parse and tokenize; the parent writes the
results in input order. At most a few batches per worker are in flight.
"""

from __future__ import annotations

import gzip
import json
import signal
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import IO

import numpy as np

from megatron_sp.config.schema import Data
from megatron_sp.data.indexed_dataset import IndexedDatasetBuilder, best_dtype
from megatron_sp.data.tokenizer import Tokenizer, build_tokenizer
from megatron_sp.errors import DataError

BATCH_BYTES = 1 << 18  # large enough that sending it costs nothing, small enough to keep all workers busy
BATCH_LINES = 2000
IN_FLIGHT_PER_WORKER = 4


@dataclass(frozen=True)
class Job:
    """What to do with every line.

    Attributes:
        data: tokenizer flags.
        vocab_size: ``--vocab-size`` (NullTokenizer).
        keys: JSON keys to tokenize, one token set each.
        append_eod: end every document that is not empty with the end-of-document token.
        skip_errors: skip and count bad lines instead of stopping.
    """

    data: Data
    vocab_size: int
    keys: tuple[str, ...]
    append_eod: bool
    skip_errors: bool = False


@dataclass(frozen=True)
class LineBatch:
    """Consecutive lines of one file; ``first`` is the number of the first, from 1."""

    path: str
    first: int
    lines: list[bytes]
    bytes_read: int


@dataclass(frozen=True)
class EncodedBatch:
    """Tokens and document lengths for each key, and what was wrong."""

    tokens: list[np.ndarray]
    lengths: list[np.ndarray]
    skipped: Counter[str]
    first_skipped: dict[str, str]
    bytes_read: int


@dataclass
class Summary:
    """Totals over all input.

    Attributes:
        documents, empty, tokens, longest: per key (``empty``: documents without text).
        skipped: bad lines by reason; ``first_skipped``: where the first of each was.
    """

    keys: tuple[str, ...]
    documents: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    empty: Counter[str] = field(default_factory=Counter)
    longest: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    first_skipped: dict[str, str] = field(default_factory=dict)

    def add(self, batch: EncodedBatch) -> None:
        self.documents += len(batch.lengths[0])
        for key, tokens, lengths in zip(self.keys, batch.tokens, batch.lengths, strict=True):
            self.tokens[key] += len(tokens)
            self.empty[key] += int(np.count_nonzero(lengths == 0))
            self.longest[key] = max(self.longest[key], int(lengths.max(initial=0)))
        self.skipped.update(batch.skipped)
        for reason, where in batch.first_skipped.items():
            self.first_skipped.setdefault(reason, where)


class BadLine(Exception):
    """A line that cannot be used; the text says why, ``kind`` is the group it is counted in."""

    def __init__(self, kind: str, detail: str = ""):
        super().__init__(kind + (f" ({detail})" if detail else ""))
        self.kind = kind


def parse_line(line: bytes, keys: Sequence[str]) -> list[str]:
    """The texts of one jsonl line.

    Raises:
        BadLine: not UTF-8, not JSON, a key is missing or not a string, or half of a character.
    """
    try:
        text = line.decode("utf-8")
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


def encode_lines(batch: LineBatch, job: Job, tokenizer: Tokenizer) -> EncodedBatch:
    """Parse and tokenize lines.

    Raises:
        DataError: a bad line, unless the job skips them.
    """
    skipped: Counter[str] = Counter()
    first_skipped: dict[str, str] = {}

    def complain(number: int, error: BadLine) -> None:
        where = f"{batch.path}, line {number}"
        if not job.skip_errors:
            raise DataError(f"{where}: {error}. Correct the line, or pass --on-error skip to skip and count such "
                            "lines.") from None
        skipped[error.kind] += 1
        first_skipped.setdefault(error.kind, where)

    numbers, rows = [], []
    for number, line in enumerate(batch.lines, batch.first):
        if not line.strip():
            continue
        try:
            rows.append(parse_line(line, job.keys))
            numbers.append(number)
        except BadLine as error:
            complain(number, error)
    columns = _encode_rows(rows, numbers, tokenizer, complain, len(job.keys))
    dtype = best_dtype(tokenizer.vocab_size)
    packed = [_pack(column, tokenizer.eod if job.append_eod else None, dtype) for column in columns]
    return EncodedBatch([tokens for tokens, _ in packed], [lengths for _, lengths in packed], skipped, first_skipped,
                        batch.bytes_read)


def _encode_rows(rows: list[list[str]], numbers: list[int], tokenizer: Tokenizer,
                 complain: Callable[[int, BadLine], None], num_keys: int) -> list[list[list[int]]]:
    """Token ids by key and row; rows the tokenizer refuses are left out of all keys."""
    try:
        return [tokenizer.encode_batch([row[place] for row in rows]) for place in range(num_keys)]
    except Exception:  # find the row that caused it
        good: list[list[list[int]]] = [[] for _ in range(num_keys)]
        for number, row in zip(numbers, rows, strict=True):
            try:
                encoded = [tokenizer.encode(text) for text in row]
            except Exception as error:
                complain(number, BadLine("refused by the tokenizer", str(error).rstrip(".")))
                continue
            for column, ids in zip(good, encoded, strict=True):
                column.append(ids)
        return good


def _pack(documents: list[list[int]], eod: int | None, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """All tokens in a row and the length of each document; an empty one stays empty."""
    if eod is not None:
        for ids in documents:
            if ids:
                ids.append(eod)
    lengths = np.fromiter(map(len, documents), dtype=np.int64, count=len(documents))
    tokens = np.empty(int(lengths.sum()), dtype=dtype)
    place = 0
    for ids in documents:
        tokens[place:place + len(ids)] = ids
        place += len(ids)
    return tokens, lengths


def read_batches(paths: Iterable[str]) -> Iterator[LineBatch]:
    """Lines of all files, in order; ``.gz`` files are unpacked on the way.

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


class _Worker:
    """State of a worker process: its tokenizer."""

    job: Job
    tokenizer: Tokenizer

    @classmethod
    def start(cls, job: Job) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        cls.job = job
        cls.tokenizer = build_tokenizer(job.data, job.vocab_size)

    @classmethod
    def encode(cls, batch: LineBatch) -> EncodedBatch:
        return encode_lines(batch, cls.job, cls.tokenizer)


def encode_all(batches: Iterable[LineBatch], job: Job, tokenizer: Tokenizer, workers: int) -> Iterator[EncodedBatch]:
    """Encode batches with ``workers`` processes (1: in this one); results come in input order.

    Raises:
        DataError: a bad line or a worker that died.
    """
    if workers <= 1:
        for batch in batches:
            yield encode_lines(batch, job, tokenizer)
        return
    # Spawned, never forked: a fork copies the tokenizer library's locks in whatever state they are.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_Worker.start, initargs=(job,))
    waiting: deque[Future[EncodedBatch]] = deque()
    try:
        for batch in batches:
            waiting.append(pool.submit(_Worker.encode, batch))
            if len(waiting) >= IN_FLIGHT_PER_WORKER * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise DataError(f"A worker process ended unexpectedly (often: out of memory); use fewer than --workers "
                        f"{workers}.") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def preprocess(paths: Sequence[str], output_prefix: str, job: Job, workers: int,
               progress: Callable[[EncodedBatch, Summary], None] = lambda batch, summary: None) -> Summary:
    """Write ``{output_prefix}_{key}_document.bin/.idx`` for every key; they appear only when complete.

    Args:
        paths: jsonl or jsonl.gz files.
        output_prefix: path of the results without key and ending.
        job: what to do with each line.
        workers: processes that tokenize.
        progress: called after each batch.

    Set TOKENIZERS_PARALLELISM=false before, as the tool does: these processes are the parallelism, and the
    tokenizer library's own threads would only fight over the cores.

    Raises:
        DataError: input or tokenizer is at fault; nothing that looks valid is left behind.
    """
    tokenizer = build_tokenizer(job.data, job.vocab_size)
    if job.append_eod and tokenizer.eod is None:
        raise DataError(f"--append-eod: this {job.data.tokenizer_type} has no end-of-document token.")
    summary = Summary(job.keys)
    with ExitStack() as stack:
        dtype = best_dtype(tokenizer.vocab_size)
        builders = [IndexedDatasetBuilder(f"{output_prefix}_{key}_document", dtype) for key in job.keys]
        for builder in builders:
            stack.push(builder)  # before its files exist: an interrupt may come the moment they do
            builder.__enter__()
        encoded = encode_all(read_batches(paths), job, tokenizer, workers)
        stack.callback(encoded.close)  # type: ignore[attr-defined]
        for batch in encoded:
            for builder, tokens, lengths in zip(builders, batch.tokens, batch.lengths, strict=True):
                builder.add_documents(tokens, lengths)
            summary.add(batch)
            progress(batch, summary)
        if not summary.documents:
            raise DataError(f"--input has no documents ({sum(summary.skipped.values())} bad lines); nothing was "
                            "written.")
        for builder in builders:
            builder.finalize()
    return summary
