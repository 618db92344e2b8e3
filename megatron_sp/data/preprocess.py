"""Tokenize JSON lines into token sets with many processes. The bytes written are the same for any number of them.

The parent process reads lines and sends them to the workers in batches. The workers parse and tokenize. The parent
writes the results in the order of the input. Only a few batches for each worker exist at a time, so memory does not
grow with the corpus.
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
LONG_TEXT = 1 << 18  # characters; longer texts are tokenized in parts of about this length
SAMPLE = 4096  # characters of one text in each batch that are encoded, decoded and compared with the original


@dataclass(frozen=True)
class Job:
    """How to tokenize every line.

    Attributes:
        data: the flags that describe the tokenizer.
        vocab_size: ``--vocab-size``, for NullTokenizer.
        keys: JSON keys whose texts are tokenized, into one token set for each key.
        append_eod: whether every document that is not empty ends with the end-of-document token.
        skip_errors: whether bad lines are skipped and counted instead of ending the program.
        parse_special: whether the spelling of a special token in a text becomes that token (Hugging Face tokenizers).
    """

    data: Data
    vocab_size: int
    keys: tuple[str, ...]
    append_eod: bool
    skip_errors: bool = False
    parse_special: bool = False

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer that the flags describe."""
        return build_tokenizer(self.data, self.vocab_size, self.parse_special)


@dataclass(frozen=True)
class EncodedBatch:
    """The tokens of a batch of lines, and counts for the report.

    Attributes:
        tokens: for each key, the tokens of all documents, one document after another.
        lengths: for each key, the tokens of each document.
        unknown: for each key, how many tokens stand for text that the tokenizer cannot represent.
        compared: number of texts that were encoded and decoded for a comparison with the original, 0 or 1.
        changed: file and line of that text if decoding did not return the original, else "".
        skipped, first_skipped: as in ``Summary``.
        bytes_read: bytes of the input, for the progress bar.
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
        keys: the JSON keys.
        documents: number of documents, the same for every key.
        tokens: number of tokens by key.
        empty: number of documents without text by key.
        longest: tokens of the longest document by key.
        unknown: number of tokens, by key, that stand for text which the tokenizer cannot represent.
        compared: number of texts that were encoded, decoded and compared with the original.
        changed: number of those that decoding did not return as they were.
        first_changed: file and line of the first of these.
        skipped: number of bad lines by reason.
        first_skipped: file and line of the first bad line by reason.
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
    """Parse and tokenize a batch of lines.

    Raises:
        DataError: a line is bad and the job does not skip bad lines.
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
    """Encode and decode the start of one text, and compare the result with the original.

    Returns:
        The number of texts compared, 0 or 1; and the number of that text's line if the result differs, else 0.
    """
    for number, row in zip(numbers, rows, strict=True):
        for text in row:
            if text.strip():
                try:
                    return 1, 0 if tokenizer.gives_back(text[:SAMPLE]) else number
                except Exception:  # the tokenizer refuses this text; its line is already counted as bad
                    continue
    return 0, 0


def _encode_rows(rows: list[list[str]], numbers: list[int], tokenizer: Tokenizer,
                 complain: Callable[[int, BadLine], None], num_keys: int, dtype: np.dtype) -> list[list[np.ndarray]]:
    """Return the token ids of each key and row. A row that the tokenizer refuses is left out for all keys."""
    try:
        return [_encode_texts([row[place] for row in rows], tokenizer, dtype) for place in range(num_keys)]
    except Exception:  # one row caused the error: encode them one by one to find it
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
    """Return the token ids of each text. Long texts are encoded in parts, all others in one call."""
    short = iter(tokenizer.encode_batch([text for text in texts if len(text) < LONG_TEXT]))
    # Convert each list to an array immediately: a list of Python integers takes up to 20 times the memory.
    return [np.array(next(short), dtype=dtype) if len(text) < LONG_TEXT else
            np.concatenate([np.array(ids, dtype=dtype) for ids in tokenizer.encode_in_parts(text, LONG_TEXT)])
            for text in texts]


def _pack(documents: list[np.ndarray], eod: int | None, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return all tokens in one array, and each document's length; ``eod`` is appended unless a document is empty."""
    end = np.array([] if eod is None else [eod], dtype=dtype)
    lengths = np.fromiter((len(ids) + len(end) if len(ids) else 0 for ids in documents), dtype=np.int64,
                          count=len(documents))
    pieces = [piece for ids in documents if len(ids) for piece in (ids, end)]
    return np.concatenate([np.empty(0, dtype=dtype), *pieces]), lengths


class _Worker:
    """What a worker process keeps between batches: the job and its tokenizer."""

    job: Job
    tokenizer: Tokenizer

    @classmethod
    def start(cls, job: Job) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches workers too; the parent stops them
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        cls.job = job
        cls.tokenizer = job.tokenizer()

    @classmethod
    def encode(cls, batch: LineBatch) -> EncodedBatch:
        return encode_lines(batch, cls.job, cls.tokenizer)


def encode_all(batches: Iterable[LineBatch], job: Job, tokenizer: Tokenizer, workers: int) -> Iterator[EncodedBatch]:
    """Yield the encoded batches in the order of the input.

    Args:
        batches: the lines.
        job: how to tokenize them.
        tokenizer: the tokenizer of this process.
        workers: number of processes that tokenize; 1: this process does it.

    Raises:
        DataError: a line is bad, or a worker process died.
    """
    if workers <= 1:
        for batch in batches:
            yield encode_lines(batch, job, tokenizer)
        return
    # Processes are spawned: a forked one would inherit the tokenizer library's locks, perhaps locked forever.
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
    """Write ``{output_prefix}_{key}_document.bin`` and ``.idx`` for every key. They appear only when they are complete.

    Args:
        paths: jsonl or jsonl.gz files.
        output_prefix: path of the output files without key and ending.
        job: how to tokenize each line.
        workers: number of processes that tokenize.
        progress: called after each batch, with the batch and the totals so far.

    Call ``runtime.keep_tokenizers_single_threaded`` first, as the tool does. Otherwise each worker process starts one
    tokenizer thread for every core.

    Raises:
        DataError: the input or the tokenizer is at fault. No output files are left behind.
    """
    tokenizer = job.tokenizer()
    if job.append_eod and tokenizer.eod is None:
        raise DataError(f"--append-eod: this {job.data.tokenizer_type} has no end-of-document token.")
    summary = Summary(job.keys)
    with ExitStack() as stack:
        dtype = best_dtype(tokenizer.vocab_size)
        builders = [IndexedDatasetBuilder(f"{output_prefix}_{key}_document", dtype) for key in job.keys]
        for builder in builders:
            stack.push(builder)  # before its files exist, since an interrupt may arrive as soon as they do
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
