"""Tokenize blocks of records, in this process or in many.

The parent process reads blocks and sends them to the workers. The workers take the records out and tokenize them. The
parent receives the tokens in the order of the input. Only a few blocks for each worker exist at a time, so memory does
not grow with the corpus.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import astuple, dataclass
from multiprocessing import get_context, parent_process

import numpy as np

from megatron_sp.config.schema import Data
from megatron_sp.data.corpus.readers import Block, parse
from megatron_sp.data.corpus.records import BadRecord, BadRecords
from megatron_sp.data.corpus.summary import EncodedBlock
from megatron_sp.data.token_files.indexed_dataset import best_dtype
from megatron_sp.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megatron_sp.errors import DataError

IN_FLIGHT_PER_WORKER = 4
LONG_TEXT = 1 << 18  # characters; longer texts are tokenized in parts of about this length
SAMPLE = 4096  # characters of one text in each block that are encoded, decoded and compared with the original


@dataclass(frozen=True)
class Job:
    """How to tokenize every record.

    Attributes:
        data: the flags that describe the tokenizer.
        vocab_size: ``--vocab-size``, for NullTokenizer and TikTokenizer.
        keys: JSON keys whose texts are tokenized, into one token set for each key.
        append_eod: whether every document that is not empty ends with the end-of-document token.
        skip_errors: whether bad records are skipped and counted instead of ending the program.
        parse_special: whether the spelling of a special token in a text becomes that token (Hugging Face tokenizers).
        separator: what stands between the documents of a text file; b"": each file is one document.
    """

    data: Data
    vocab_size: int
    keys: tuple[str, ...]
    append_eod: bool
    skip_errors: bool = False
    parse_special: bool = False
    separator: bytes = b""

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer that the flags describe."""
        return build_tokenizer(self.data, self.vocab_size, self.parse_special)


def encode_block(block: Block, job: Job, tokenizer: Tokenizer) -> EncodedBlock:
    """Parse and tokenize a block of records.

    Raises:
        DataError: a record is bad and the job does not skip bad records.
    """
    complain = BadRecords(block.place_of, job.skip_errors)
    places, rows = parse(block, job.keys, complain)
    dtype = best_dtype(tokenizer.vocab_size)
    columns = _encode_rows(rows, places, tokenizer, complain, len(job.keys), dtype)
    packed = [_pack(column, tokenizer.eod if job.append_eod else None, dtype) for column in columns]
    unknown = [0 if tokenizer.unknown is None else int(np.count_nonzero(tokens == tokenizer.unknown))
               for tokens, _ in packed]
    compared, changed = _compare(places, rows, tokenizer)
    return EncodedBlock([tokens for tokens, _ in packed], [lengths for _, lengths in packed], unknown, compared,
                        "" if changed is None else block.place_of(changed), complain.skipped, block.bytes_read,
                        astuple(block.next))


def _compare(places: list[int], rows: list[list[str]], tokenizer: Tokenizer) -> tuple[int, int | None]:
    """Encode and decode the start of one text, and compare the result with the original.

    Returns:
        The number of texts compared, 0 or 1; and the place of that text's record if the result differs, else None.
    """
    for place, row in zip(places, rows, strict=True):
        for text in row:
            if text.strip():
                try:
                    return 1, None if tokenizer.gives_back(text[:SAMPLE]) else place
                except Exception:  # the tokenizer refuses this text; its record is already counted as bad
                    continue
    return 0, None


def _encode_rows(rows: list[list[str]], places: list[int], tokenizer: Tokenizer,
                 complain: Callable[[int, BadRecord], None], num_keys: int, dtype: np.dtype) -> list[list[np.ndarray]]:
    """Return the token ids of each key and row. A row that the tokenizer refuses is left out for all keys."""
    try:
        return [_encode_texts([row[key] for row in rows], tokenizer, dtype) for key in range(num_keys)]
    except Exception:  # one row caused the error: encode them one by one to find it
        good: list[list[np.ndarray]] = [[] for _ in range(num_keys)]
        for place, row in zip(places, rows, strict=True):
            try:
                encoded = _encode_texts(row, tokenizer, dtype)
            except Exception as error:
                complain(place, BadRecord("refused by the tokenizer", str(error).rstrip("."), " ".join(row)))
                continue
            for column, ids in zip(good, encoded, strict=True):
                column.append(ids)
        return good


def _encode_texts(texts: list[str], tokenizer: Tokenizer, dtype: np.dtype) -> list[np.ndarray]:
    """Return the token ids of each text. Long texts are encoded in parts, all others in one call."""
    short = iter(tokenizer.encode_arrays([text for text in texts if len(text) < LONG_TEXT], dtype))
    return [next(short) if len(text) < LONG_TEXT else
            np.concatenate(list(tokenizer.encode_in_parts(text, LONG_TEXT, dtype))) for text in texts]


def _pack(documents: list[np.ndarray], eod: int | None, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return all tokens in one array, and each document's length; ``eod`` is appended unless a document is empty."""
    end = np.array([] if eod is None else [eod], dtype=dtype)
    lengths = np.fromiter((len(ids) + len(end) if len(ids) else 0 for ids in documents), dtype=np.int64,
                          count=len(documents))
    pieces = [piece for ids in documents if len(ids) for piece in (ids, end)]
    return np.concatenate([np.empty(0, dtype=dtype), *pieces]), lengths


class _Worker:
    """What a worker process keeps between blocks: the job and its tokenizer."""

    job: Job
    tokenizer: Tokenizer

    @classmethod
    def start(cls, job: Job) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches workers too; the parent stops them
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        cls.job = job
        cls.tokenizer = job.tokenizer()

    @classmethod
    def encode(cls, block: Block) -> EncodedBlock:
        return encode_block(block, cls.job, cls.tokenizer)


def _end_with_parent() -> None:
    """End this worker when its parent was killed; it would wait for blocks for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def encode_all(blocks: Iterable[Block], job: Job, tokenizer: Tokenizer, workers: int) -> Iterator[EncodedBlock]:
    """Yield the encoded blocks in the order of the input.

    Args:
        blocks: the records.
        job: how to tokenize them.
        tokenizer: the tokenizer of this process.
        workers: number of processes that tokenize; 1: this process does it.

    Raises:
        DataError: a record is bad, or a worker process died.
    """
    if workers <= 1:
        for block in blocks:
            yield encode_block(block, job, tokenizer)
        return
    # Processes are spawned: a forked one would inherit the tokenizer library's locks, perhaps locked forever.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_Worker.start, initargs=(job,))
    waiting: deque[Future[EncodedBlock]] = deque()
    try:
        for block in blocks:
            waiting.append(pool.submit(_Worker.encode, block))
            if len(waiting) >= IN_FLIGHT_PER_WORKER * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise DataError(f"A worker process ended unexpectedly (often: out of memory); use fewer than --workers "
                        f"{workers}.") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
