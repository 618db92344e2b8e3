"""Tokenize a corpus into token sets. The bytes written are the same for any number of processes.

The files appear under their names only when they are complete. A run that was killed can be continued.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_sp.data.corpus.encode import Job, encode_all
from megatron_sp.data.corpus.inputs import Part
from megatron_sp.data.corpus.journal import ASIDE, SECONDS_BETWEEN_NOTES, Journal
from megatron_sp.data.corpus.readers import Position, read_blocks
from megatron_sp.data.corpus.summary import EncodedBlock, Summary, read_report, write_report
from megatron_sp.data.token_files.indexed_dataset import best_dtype
from megatron_sp.data.token_files.token_writer import IndexedDatasetBuilder, merge_token_sets
from megatron_sp.errors import DataError


@dataclass(frozen=True)
class Output:
    """What to write.

    Attributes:
        prefix: path of the output files without key and ending.
        partitions: above 1, the documents are dealt in turn to so many token sets for each key, which are then joined,
            as Megatron's tool does it.
        checksum: whether each token set gets a checksum file.
        resume: whether to continue an unfinished run.
        may_be_empty: whether to write a token set without documents, for one of more shares than there are files.
    """

    prefix: str
    partitions: int = 1
    checksum: bool = False
    resume: bool = False
    may_be_empty: bool = False

    def builders(self, keys: Sequence[str], dtype: np.dtype) -> dict[tuple[str, int], IndexedDatasetBuilder]:
        """Return the writers of each key and partition."""
        return {(key, number): IndexedDatasetBuilder(self.path(key, number), dtype, ASIDE, self.checksum)
                for key in keys for number in range(self.partitions)}

    def path(self, key: str, partition: int | None = None) -> str:
        """Return the prefix of a key's token set, or of one of its partitions."""
        number = f"_{partition}" if self.partitions > 1 and partition is not None else ""
        return f"{self.prefix}{number}_{key}_document"


class Preprocessor:
    """Tokenize the input and write the output.

    Args:
        parts: the input.
        job: how to tokenize each record.
        output: what to write.

    Call ``runtime.keep_tokenizers_single_threaded`` first, as the tool does. Otherwise each worker process starts one
    tokenizer thread for every core.

    Raises:
        DataError: the tokenizer cannot be built or used, or an unfinished run with other settings wrote to this output.
    """

    def __init__(self, parts: Sequence[Part], job: Job, output: Output):
        self.parts, self.job, self.output = parts, job, output
        self.tokenizer = job.tokenizer()
        if job.append_eod and self.tokenizer.eod is None:
            raise DataError(f"--append-eod: this {job.data.tokenizer_type} has no end-of-document token.")
        self.builders = output.builders(job.keys, best_dtype(self.tokenizer.vocab_size))
        self.journal = Journal(output.prefix)
        self.summary = Summary.of_keys(job.keys)
        self.next = Position()
        self.finished: list[str] = []  # token sets that have their names already
        self._noted = 0.0
        self._continuable = False  # whether the journal describes this run

    def run(self, workers: int, progress: Callable[[int, Summary], None] = lambda count, summary: None) -> Summary:
        """Do all the work and return the totals.

        Args:
            workers: number of processes that tokenize.
            progress: called after each block, with the bytes of the input that were read and the totals so far.

        Raises:
            DataError: the input cannot be read, or the output cannot be written. If the run has noted its progress, the
                unfinished files are kept for ``--resume``; otherwise nothing is left.
        """
        with self.journal.lock():
            found = self._unfinished()
            with contextlib.ExitStack() as stack:
                stack.push(self._leave)  # before its files exist, since an interrupt may arrive as soon as they do
                self._open(found)
                encoded = encode_all(self._blocks(), self.job, self.tokenizer, workers)
                stack.callback(encoded.close)  # type: ignore[attr-defined]
                for block in encoded:
                    self._add(block)
                    progress(block.bytes_read, self.summary)
                    if time.monotonic() - self._noted > SECONDS_BETWEEN_NOTES:
                        self._note()
                if not self.summary.documents and not self.output.may_be_empty:
                    raise DataError(f"--input has no documents ({self.summary.skipped.counts.total()} bad records); "
                                    "nothing was written.")
                self._finish()
        return self.summary

    def done_before(self) -> Summary:
        """Return the totals of an earlier process whose run will be continued.

        Raises:
            DataError: an unfinished run is there, and ``--resume`` was not given.
        """
        found = self._unfinished()
        return Summary.from_json(found["summary"]) if found else Summary.of_keys(self.job.keys)

    def _unfinished(self) -> dict[str, Any] | None:
        found = self.journal.read()
        if found and not self.output.resume:
            raise DataError(f"--output-prefix {self.output.prefix}: an unfinished run is there "
                            f"({found['summary']['documents']:,} documents so far). Pass --resume to continue it, or "
                            f"remove {self.output.prefix}*.{ASIDE}* to start again.")
        return found

    def complete_already(self) -> bool:
        """Return whether ``--resume`` was given and an earlier run with the same settings has finished."""
        if not self.output.resume or os.path.exists(self.journal.path):
            return False
        try:
            settings = read_report(self.output.prefix)["settings"]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return settings == self.settings and all(os.path.exists(self.output.path(key) + ending)
                                                   for key in self.job.keys for ending in (".bin", ".idx"))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Return all that the output depends on, by the name of the flag."""
        data = self.job.data
        files = [path for path in (data.tokenizer_model, data.vocab_file, data.merge_file) if path]
        inputs = hashlib.sha256(repr([(part, _version_of(part.path)) for part in self.parts]).encode()).hexdigest()
        names = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "vocab_extra_ids", "tiktoken_pattern",
                 "tiktoken_num_special_tokens")
        flags = {"--" + name.replace("_", "-"): getattr(data, name) for name in names}
        return {"--input (its files or --shard)": inputs, **flags, "--vocab-size": self.job.vocab_size,
                "the tokenizer's files": [_digest_of(path) for path in files], "--json-keys": list(self.job.keys),
                "--append-eod": self.job.append_eod, "--parse-special-tokens": self.job.parse_special,
                "--separator": self.job.separator.decode("latin-1"), "--partitions": self.output.partitions}

    def _open(self, found: dict[str, Any] | None) -> None:
        settings = self.settings  # computed here, so that input which changes during the run counts as changed
        if found is None:
            for builder in self.builders.values():
                builder.__enter__()
        else:
            if other := [name for name in settings if settings[name] != found["settings"].get(name)]:
                self._continuable = True  # so that the unfinished run's files stay
                raise DataError(f"--resume: the unfinished run of {self.output.prefix} differs in {', '.join(other)}. "
                                "Give the same flags and files, or remove "
                                f"{self.output.prefix}*.{ASIDE}* to start again.")
            self._continuable = True
            self.next, self.finished = Position(*found["next"]), found["finished"]
            self.summary = Summary.from_json(found["summary"])
            for builder in self.builders.values():
                if builder.prefix not in self.finished:
                    builder.continue_from(found["sizes"][builder.prefix])
        self._noted = time.monotonic()

    def _blocks(self) -> Iterator[Any]:
        return read_blocks(self.parts, self.job.keys, self.job.separator, self.next)

    def _add(self, block: EncodedBlock) -> None:
        for place, key in enumerate(self.job.keys):
            tokens, lengths = block.tokens[place], block.lengths[place]
            if self.output.partitions == 1:
                self.builders[key, 0].add_documents(tokens, lengths)
                continue
            partition = (self.summary.documents + np.arange(len(lengths))) % self.output.partitions
            of_token = np.repeat(partition, lengths)
            for number in range(self.output.partitions):
                self.builders[key, number].add_documents(tokens[of_token == number], lengths[partition == number])
        self.summary.add(block)
        self.next = Position(*block.next)

    def _note(self) -> None:
        sizes = {builder.prefix: builder.position() for builder in self.builders.values()
                 if builder.prefix not in self.finished}
        self.journal.write({"settings": self.settings, "next": list(asdict(self.next).values()), "sizes": sizes,
                            "finished": self.finished, "summary": self.summary.as_json()})
        self._continuable, self._noted = True, time.monotonic()

    def _finish(self) -> None:
        """Give the files their names, join partitions, and write the report."""
        for builder in self.builders.values():
            if builder.prefix not in self.finished:
                builder.finalize()
                self.finished.append(builder.prefix)
                if self._continuable:
                    self._note()
        if self.output.partitions > 1:
            for key in self.job.keys:
                merge_token_sets([self.output.path(key, number) for number in range(self.output.partitions)],
                                 self.output.path(key), self.output.checksum)
        write_report(self.output.prefix, self.settings, self.summary)
        self.journal.remove()

    def _leave(self, kind: object, *_: object) -> None:
        """After an error, keep the working files if a later run can continue from them; otherwise remove them."""
        for builder in self.builders.values():
            if kind is not None and not self._continuable:
                builder.abort()
            else:
                builder.close()


def _version_of(path: str) -> tuple[int, int] | None:
    """Return size and time of change of an input file; None for a pipe."""
    if not os.path.isfile(path):
        return None
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def _digest_of(path: str) -> str:
    """Return a hash of a tokenizer's file, or of the small files of its directory."""
    digest = hashlib.sha256()
    files = sorted(Path(path).rglob("*")) if os.path.isdir(path) else [Path(path)]
    for file in files:
        if file.is_file() and file.stat().st_size < 1 << 27:  # a model's weights may lie beside its tokenizer
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()
