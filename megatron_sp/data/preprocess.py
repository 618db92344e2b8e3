"""Turn JSON lines into token sets, with many processes and the same bytes for any number of them.

The parent reads lines and sends batches of them to the workers, the workers parse and tokenize, and the parent writes
the results in the order of the input. At most a few batches for each worker exist at a time, so memory does not grow
with the corpus.
"""

from __future__ import annotations

import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import get_context

import numpy as np

from megatron_sp.config.schema import Data
from megatron_sp.data.indexed_dataset import IndexedDatasetBuilder, best_dtype
from megatron_sp.data.json_lines import BadLine, BadLines, LineBatch, parse_lines, read_batches
from megatron_sp.data.tokenizer import Tokenizer, build_tokenizer
from megatron_sp.errors import DataError

IN_FLIGHT_PER_WORKER = 4
LONG_TEXT = 1 << 18  # characters from which on a text is encoded in parts of this length
SAMPLE = 4096  # characters of one text in each batch that are decoded again and compared


@dataclass(frozen=True)
class Job:
    """What to do with every line.

    Attributes:
        data: tokenizer flags.
        vocab_size: ``--vocab-size`` (NullTokenizer).
        keys: JSON keys to tokenize, one token set each.
        append_eod: end every document that is not empty with the end-of-document token.
        skip_errors: skip and count bad lines instead of stopping.
        parse_special: let special tokens that are spelled in a text become their ids (Hugging Face tokenizers).
    """

    data: Data
    vocab_size: int
    keys: tuple[str, ...]
    append_eod: bool
    skip_errors: bool = False
    parse_special: bool = False

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer of the job."""
        return build_tokenizer(self.data, self.vocab_size, self.parse_special)


@dataclass(frozen=True)
class EncodedBatch:
    """Tokens and document lengths for each key, and what was wrong.

    Attributes:
        tokens, lengths: for each key.
        unknown: for each key, how many tokens stand for text that the tokenizer cannot represent.
        compared: texts that were decoded again, 0 or 1.
        changed: where the first of them was whose text did not come back, or "".
        skipped, first_skipped: as in ``Summary``.
        bytes_read: of the input, for the progress bar.
    """

    tokens: list[np.ndarray]
    lengths: list[np.ndarray]
    unknown: list[int]
    compared: int
    changed: str
    skipped: Counter[str]
    first_skipped: dict[str, str]
    bytes_read: int


@dataclass
class Summary:
    """Totals over all input.

    Attributes:
        documents, empty, tokens, longest, unknown: per key. ``empty`` counts documents without text, ``unknown``
            tokens that stand for text the tokenizer cannot represent.
        compared, changed: texts that were decoded again, and those whose text did not come back.
        first_changed: where the first of them was.
        skipped: bad lines by reason; ``first_skipped``: where the first of each was.
    """

    keys: tuple[str, ...]
    documents: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    empty: Counter[str] = field(default_factory=Counter)
    longest: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    changed: int = 0
    first_changed: str = ""
    skipped: Counter[str] = field(default_factory=Counter)
    first_skipped: dict[str, str] = field(default_factory=dict)

    def add(self, batch: EncodedBatch) -> None:
        self.documents += len(batch.lengths[0])
        for key, tokens, lengths, unknown in zip(self.keys, batch.tokens, batch.lengths, batch.unknown, strict=True):
            self.tokens[key] += len(tokens)
            self.unknown[key] += unknown
            self.empty[key] += int(np.count_nonzero(lengths == 0))
            self.longest[key] = max(self.longest[key], int(lengths.max(initial=0)))
        self.compared += batch.compared
        self.changed += bool(batch.changed)
        self.first_changed = self.first_changed or batch.changed
        self.skipped.update(batch.skipped)
        for reason, where in batch.first_skipped.items():
            self.first_skipped.setdefault(reason, where)


def encode_lines(batch: LineBatch, job: Job, tokenizer: Tokenizer) -> EncodedBatch:
    """Parse and tokenize lines.

    Raises:
        DataError: a bad line, unless the job skips them.
    """
    complain = BadLines(batch.path, job.skip_errors)
    numbers, rows = parse_lines(batch, job.keys, complain)
    dtype = best_dtype(tokenizer.vocab_size)
    columns = _encode_rows(rows, numbers, tokenizer, complain, len(job.keys), dtype)
    packed = [_pack(column, tokenizer.eod if job.append_eod else None, dtype) for column in columns]
    unknown = [0 if tokenizer.unknown is None else int(np.count_nonzero(tokens == tokenizer.unknown))
               for tokens, _ in packed]
    compared, changed = _compare(numbers, rows, tokenizer)
    return EncodedBatch([tokens for tokens, _ in packed], [lengths for _, lengths in packed], unknown, compared,
                        f"{batch.path}, line {changed}" if changed else "", complain.skipped, complain.first,
                        batch.bytes_read)


def _compare(numbers: list[int], rows: list[list[str]], tokenizer: Tokenizer) -> tuple[int, int]:
    """Decode the start of one text again.

    Returns:
        Number of texts compared, 0 or 1; and the line of a text that did not come back, or 0.
    """
    for number, row in zip(numbers, rows, strict=True):
        for text in row:
            if text.strip():
                try:
                    return 1, 0 if tokenizer.gives_back(text[:SAMPLE]) else number
                except Exception:  # refused by the tokenizer, and already counted as a bad line
                    continue
    return 0, 0


def _encode_rows(rows: list[list[str]], numbers: list[int], tokenizer: Tokenizer,
                 complain: Callable[[int, BadLine], None], num_keys: int, dtype: np.dtype) -> list[list[np.ndarray]]:
    """Return token ids by key and row; a row that the tokenizer refuses is left out of all keys."""
    try:
        return [_encode_texts([row[place] for row in rows], tokenizer, dtype) for place in range(num_keys)]
    except Exception:  # find the row that caused it
        good: list[list[np.ndarray]] = [[] for _ in range(num_keys)]
        for number, row in zip(numbers, rows, strict=True):
            try:
                encoded = _encode_texts(row, tokenizer, dtype)
            except Exception as error:
                complain(number, BadLine("refused by the tokenizer", str(error).rstrip(".")))
                continue
            for column, ids in zip(good, encoded, strict=True):
                column.append(ids)
        return good


def _encode_texts(texts: list[str], tokenizer: Tokenizer, dtype: np.dtype) -> list[np.ndarray]:
    """Return the token ids of each text; long texts are encoded in parts, the others together."""
    short = iter(tokenizer.encode_batch([text for text in texts if len(text) < LONG_TEXT]))
    # As arrays at once: a list of Python numbers takes 20 times the memory.
    return [np.array(next(short), dtype=dtype) if len(text) < LONG_TEXT else
            np.concatenate([np.array(ids, dtype=dtype) for ids in tokenizer.encode_in_parts(text, LONG_TEXT)])
            for text in texts]


def _pack(documents: list[np.ndarray], eod: int | None, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return all tokens in one row, and the length of each document; an empty document stays empty."""
    end = np.array([] if eod is None else [eod], dtype=dtype)
    lengths = np.fromiter((len(ids) + len(end) if len(ids) else 0 for ids in documents), dtype=np.int64,
                          count=len(documents))
    pieces = [piece for ids in documents if len(ids) for piece in (ids, end)]
    return np.concatenate([np.empty(0, dtype=dtype), *pieces]), lengths


class _Worker:
    """State of a worker process: its tokenizer."""

    job: Job
    tokenizer: Tokenizer

    @classmethod
    def start(cls, job: Job) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        cls.job = job
        cls.tokenizer = job.tokenizer()

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

    Call ``runtime.keep_tokenizers_single_threaded`` first, as the tool does. Otherwise each worker process starts one
    tokenizer thread for every core.

    Raises:
        DataError: input or tokenizer is at fault; nothing that looks valid is left behind.
    """
    tokenizer = job.tokenizer()
    if job.append_eod and tokenizer.eod is None:
        raise DataError(f"--append-eod: this {job.data.tokenizer_type} has no end-of-document token.")
    summary = Summary(job.keys)
    with ExitStack() as stack:
        dtype = best_dtype(tokenizer.vocab_size)
        builders = [IndexedDatasetBuilder(f"{output_prefix}_{key}_document", dtype) for key in job.keys]
        for builder in builders:
            stack.push(builder)  # registered before its files exist: an interrupt may come right after they do
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
