"""Totals over the whole input: what the summary and the report of the preprocessor say."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_sp.data.corpus.records import Skipped
from megatron_sp.output_files import complete_file

EXACT_BITS = 10  # lengths below 2^10 are counted exactly, longer ones by their first ten bits
PERCENTILES = (1, 10, 50, 90, 99)


class LengthCounts:
    """Count documents by length in bounded memory: lengths of 1024 tokens and more are rounded down by at most 0.2%.

    Attributes:
        counts: number of documents by length.
        longest: the exact length of the longest document.
    """

    def __init__(self, counts: dict[int, int] | None = None, longest: int = 0):
        self.counts, self.longest = Counter(counts or {}), longest

    def add(self, lengths: np.ndarray) -> None:
        """Count documents of these lengths in tokens."""
        if not len(lengths):
            return
        self.longest = max(self.longest, int(lengths.max()))
        bits = np.frexp(lengths.astype(np.float64))[1]  # the number of bits of each length
        shift = np.maximum(bits - EXACT_BITS, 0)
        rounded, counts = np.unique(lengths >> shift << shift, return_counts=True)
        self.counts.update(dict(zip(rounded.tolist(), counts.tolist())))

    def percentiles(self) -> dict[int, int]:
        """Return, for each percentage, a length that this share of the documents does not exceed."""
        lengths = np.array(sorted(self.counts), dtype=np.int64)
        if not len(lengths):
            return {}
        upto = np.cumsum([self.counts[length] for length in lengths.tolist()])
        places = [int(np.searchsorted(upto, upto[-1] * percent / 100)) for percent in PERCENTILES]
        return {percent: int(lengths[place]) for percent, place in zip(PERCENTILES, places)}


@dataclass
class KeyTotals:
    """Totals of one key.

    Attributes:
        tokens: number of tokens.
        empty: number of documents without text.
        unknown: number of tokens that stand for text which the tokenizer cannot represent.
        lengths: number of documents by length in tokens, without the empty ones.
    """

    tokens: int = 0
    empty: int = 0
    unknown: int = 0
    lengths: LengthCounts = field(default_factory=LengthCounts)


@dataclass(frozen=True)
class EncodedBlock:
    """The tokens of a block of records, and counts for the report.

    Attributes:
        tokens: for each key, the tokens of all documents, one document after another.
        lengths: for each key, the tokens of each document.
        unknown: for each key, how many tokens stand for text that the tokenizer cannot represent.
        compared: number of texts that were encoded and decoded for a comparison with the original, 0 or 1.
        changed: file and line of that text if decoding did not return the original, else "".
        skipped: the bad records.
        bytes_read: bytes of the input, for the progress bar.
        next: where reading continues after the block, as a tuple (see ``readers.Position``).
    """

    tokens: list[np.ndarray]
    lengths: list[np.ndarray]
    unknown: list[int]
    compared: int
    changed: str
    skipped: Skipped
    bytes_read: int
    next: tuple[int, int, int]


@dataclass
class Summary:
    """Totals over all input.

    Attributes:
        keys: totals of each key.
        documents: number of documents, the same for every key.
        bytes_read: bytes of the input that were read.
        compared: number of texts that were encoded, decoded and compared with the original.
        changed: number of those that decoding did not return as they were.
        first_changed: file and line of the first of these.
        skipped: the bad records.
    """

    keys: dict[str, KeyTotals]
    documents: int = 0
    bytes_read: int = 0
    compared: int = 0
    changed: int = 0
    first_changed: str = ""
    skipped: Skipped = field(default_factory=Skipped)

    @classmethod
    def of_keys(cls, keys: Sequence[str]) -> Summary:
        return cls({key: KeyTotals() for key in keys})

    @property
    def tokens(self) -> int:
        return sum(totals.tokens for totals in self.keys.values())

    def add(self, block: EncodedBlock) -> None:
        self.documents += len(block.lengths[0])
        self.bytes_read += block.bytes_read
        for totals, tokens, lengths, unknown in zip(self.keys.values(), block.tokens, block.lengths, block.unknown,
                                                    strict=True):
            totals.tokens += len(tokens)
            totals.unknown += unknown
            totals.empty += int(np.count_nonzero(lengths == 0))
            totals.lengths.add(lengths[lengths > 0])
        self.compared += block.compared
        self.changed += bool(block.changed)
        self.first_changed = self.first_changed or block.changed
        self.skipped.add(block.skipped)

    def as_json(self) -> dict[str, Any]:
        """Return the totals as numbers, strings and lists, from which ``from_json`` makes an equal summary."""
        keys = {key: {"tokens": totals.tokens, "empty": totals.empty, "unknown": totals.unknown,
                      "longest": totals.lengths.longest, "percentiles": totals.lengths.percentiles(),
                      "documents_by_length": sorted(totals.lengths.counts.items())}
                for key, totals in self.keys.items()}
        skipped = {kind: {"count": count, "examples": [list(example) for example in self.skipped.examples[kind]]}
                   for kind, count in self.skipped.counts.items()}
        return {"documents": self.documents, "bytes_read": self.bytes_read, "keys": keys, "compared": self.compared,
                "changed": self.changed, "first_changed": self.first_changed, "skipped": skipped}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Summary:
        """Return the summary of which ``as_json`` returned ``content``."""
        keys = {key: KeyTotals(of["tokens"], of["empty"], of["unknown"],
                               LengthCounts(dict(map(tuple, of["documents_by_length"])), of["longest"]))
                for key, of in content["keys"].items()}
        skipped = Skipped(Counter({kind: of["count"] for kind, of in content["skipped"].items()}),
                          {kind: [tuple(each) for each in of["examples"]] for kind, of in content["skipped"].items()})
        return cls(keys, content["documents"], content["bytes_read"], content["compared"], content["changed"],
                   content["first_changed"], skipped)


def report_path(prefix: str) -> str:
    """Return the path of the report of an output."""
    return f"{prefix}.report.json"


def write_report(prefix: str, settings: dict[str, Any], summary: Summary) -> None:
    """Write the settings and totals of a finished run, with examples of the records that were skipped.

    Raises:
        DataError: the disk is full, or reports another error.
    """
    with complete_file(report_path(prefix)) as file:
        file.write(json.dumps({"settings": settings, **summary.as_json()}, indent=1).encode() + b"\n")


def read_report(prefix: str) -> dict[str, Any]:
    """Return what ``write_report`` wrote."""
    return json.loads(Path(report_path(prefix)).read_text(encoding="utf-8"))
