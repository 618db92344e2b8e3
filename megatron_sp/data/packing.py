"""Samples of whole documents (``--pack-documents best-fit``).

The usual samples are cut out of one long row of documents, so that most documents shorter than a sample are cut in two
somewhere. Here documents are packed into samples like parcels into boxes, and only those that are longer than a sample
are cut. What remains free in a sample is padding without a loss::

    row of documents    [ A A A A A | B B B|B B | C C C | D D|D D D D D | E E ]      3 samples of 8, B and D cut
    packed by best fit  [ D D D D D D D . ] [ A A A A A C C C ] [ B B B B B E E . ]   none cut, 2 tokens of padding

Source: Ding et al. (arXiv 2404.10830), best-fit decreasing: from the longest document to the shortest, each goes into
the sample with the least room that is enough.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from megatron_sp.data.gpt_dataset import check_window
from megatron_sp.data.index_cache import Arrays, IndexCache
from megatron_sp.data.token_files.indexed_dataset import TokenSequences
from megatron_sp.errors import DataError

PADDING = 0  # token id of padding; the model reads it and nothing is predicted from it


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Return the number of the box of each parcel, int64, from best-fit decreasing.

    Parcels of equal length are placed together, so the work grows with the number of different lengths and not with
    the number of parcels times the number of boxes.

    Args:
        lengths: lengths of the parcels, int ``[n]``, each at least 1 and at most ``capacity``.
        capacity: largest total length in one box.
    """
    boxes = np.empty(len(lengths), dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    values, firsts = np.unique(-lengths[order], return_index=True)
    ends = [*firsts.tolist()[1:], len(order)]
    groups: dict[int, np.ndarray] = {}  # boxes with the same room left
    rooms: list[int] = []  # the keys of groups, ascending
    opened = 0

    def put_back(room: int, members: np.ndarray) -> None:
        if room and len(members):
            if room not in groups:
                insort(rooms, room)
            groups[room] = np.concatenate([groups[room], members]) if room in groups else members

    for length, first, end in zip((-values).tolist(), firsts.tolist(), ends):
        while first < end:
            place = bisect_left(rooms, length)
            room = rooms[place] if place < len(rooms) else capacity
            # The box with the least room stays the one with the least room until the length no longer fits.
            each, left = room // length, end - first
            if place < len(rooms):
                members = groups.pop(rooms.pop(place))
            else:
                members = np.arange(opened, opened + -(-left // each))
                opened += len(members)
            filled, rest = divmod(left, each)
            whole = members[:filled]
            boxes[order[first:first + len(whole) * each]] = np.repeat(whole, each)
            first += len(whole) * each
            put_back(room - each * length, whole)
            if filled < len(members):  # the next box gets the rest, and the boxes after it stay as they are
                if rest:
                    boxes[order[first:end]] = members[filled]
                put_back(room - rest * length, members[filled:filled + 1])
                put_back(room, members[filled + 1:])
                first = end
    return boxes


def cut_into_parcels(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut documents that are longer than ``capacity``. All parts of a document but the last have ``capacity`` tokens.

    Returns:
        for each part the number of its document, its first token there, and its tokens
    """
    counts = -(-lengths.astype(np.int64) // capacity)
    documents = np.repeat(np.arange(len(lengths)), counts)
    part = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = part * capacity
    return documents, offsets, np.minimum(lengths[documents] - offsets, capacity)


def cuts_of_row(lengths: np.ndarray, seq_length: int) -> int:
    """Return how many documents that fit into one sample a row of documents in this order would cut."""
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = ends - lengths
    is_cut = (starts // seq_length != (ends - 1) // seq_length) & (lengths <= seq_length) & (lengths > 0)
    return int(is_cut.sum())


@dataclass(frozen=True)
class Packing:
    """What packing achieves for one pass over the documents.

    Attributes:
        documents, tokens, samples: how many there are.
        too_long: documents longer than a sample, which have to be cut.
        cut_in_row: other documents that a row of documents would cut.
        padding: share of the samples' tokens that is padding.
        padding_alone: the same if every document, or part of a long one, had a sample of its own.
    """

    documents: int
    tokens: int
    samples: int
    too_long: int
    cut_in_row: int
    padding: float
    padding_alone: float

    def __str__(self) -> str:
        return (f"{self.documents:,} documents, {self.tokens:,} tokens packed into {self.samples:,} samples per epoch; "
                f"documents that are cut: {self.too_long:,}, all longer than a sample (a row of documents would cut "
                f"{self.cut_in_row:,} more); padding: {self.padding:.2%} of the tokens ({self.padding_alone:.2%} with "
                "one document a sample)")


class PackedDataset:
    """Samples of whole documents, in a random order that is new for each pass.

    Args:
        indexed: the tokens.
        document_ids: sequences of ``indexed`` that belong to this split.
        num_samples: how many samples are needed; the passes are repeated as often as that takes. None: one pass.
        seq_length: inputs in a sample.
        seed: seed of the orders.
        name: name of the split, for messages.
        cache: stores the packing; default: keep it in memory.

    Attributes:
        starts: for each sample of a pass the number of its first part, int64 ``[samples + 1]``.
        documents, offsets, lengths: for each part, the number of its sequence in ``indexed``, its first token in that
            sequence, and its number of tokens.

    Raises:
        DataError: samples are needed, but the split has no tokens.
    """

    def __init__(self, indexed: TokenSequences, document_ids: np.ndarray, num_samples: int | None, seq_length: int,
                 seed: int, name: str = "train", cache: IndexCache | None = None):
        self.indexed, self.seq_length, self.seed, self.name = indexed, seq_length, seed, name
        self.document_ids = np.asarray(document_ids)
        own = indexed.lengths[self.document_ids]
        if not own.sum(dtype=np.int64):
            raise DataError(f"The {name} split of {indexed.prefix} has {len(self.document_ids)} of {len(indexed)} "
                            "documents and no tokens. Give it a larger share in --split, use more data, or ask for no "
                            "samples (--eval-iters 0 for validation and test).")
        arrays = (cache or IndexCache()).get(self._key(), self._build)
        self.starts, self.documents = arrays["starts"], arrays["documents"]
        self.offsets, self.lengths = arrays["offsets"], arrays["lengths"]
        self.per_pass = len(self.starts) - 1
        self.num_samples = self.per_pass if num_samples is None else -(-num_samples // self.per_pass) * self.per_pass
        tokens, parts = int(own.sum(dtype=np.int64)), len(self.lengths)
        self.packing = Packing(
            len(own), tokens, self.per_pass, int((own > seq_length).sum()), cuts_of_row(own, seq_length),
            1 - tokens / (self.per_pass * seq_length), 1 - tokens / (parts * seq_length))
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def _key(self) -> dict[str, object]:
        """Return all values that determine the packing, as the key of the cache."""
        ids = np.ascontiguousarray(self.document_ids, dtype=np.int64)
        contiguous = bool(np.all(np.diff(ids) == 1))
        documents: object = [int(ids[0]), int(ids[-1]) + 1] if contiguous else ids.tolist()
        return dict(kind="packed", lengths=self.indexed.fingerprint(), documents=documents, seq_length=self.seq_length)

    def _build(self) -> Arrays:
        documents, offsets, lengths = cut_into_parcels(self.indexed.lengths[self.document_ids], self.seq_length)
        boxes = best_fit(lengths, self.seq_length)
        # Parts of one sample lie next to each other, the longest first.
        order = np.lexsort((-lengths, boxes))
        starts = np.searchsorted(boxes[order], np.arange(int(boxes.max()) + 2))
        return dict(starts=starts.astype(np.int64), documents=self.document_ids[documents[order]].astype(np.int64),
                    offsets=offsets[order].astype(np.int64), lengths=lengths[order].astype(np.int64))

    def __len__(self) -> int:
        return self.num_samples

    def _parts(self, sample: int) -> slice:
        """Return which parts a sample has."""
        epoch, place = divmod(sample, self.per_pass)
        order = self._order
        if order[0] != epoch:
            order = (epoch, np.random.default_rng([self.seed, epoch]).permutation(self.per_pass))
            self._order = order
        number = int(order[1][place])
        return slice(int(self.starts[number]), int(self.starts[number + 1]))

    def window(self, sample: int, start: int, stop: int) -> np.ndarray:
        """Return the tokens ``[start, stop)`` of a sample, int64, without reading any others."""
        check_window(self, sample, start, stop)
        out = np.full(stop - start, PADDING, dtype=np.int64)
        parts, position = self._parts(sample), 0
        for part in range(parts.start, parts.stop):
            document, offset, length = int(self.documents[part]), int(self.offsets[part]), int(self.lengths[part])
            # After a part that fills the sample comes one more token of its document, the label of its last one.
            more = int(length == self.seq_length and offset + length < int(self.indexed.lengths[document]))
            low, high = max(start, position), min(stop, position + length + more)
            if low < high:
                out[low - start:high - start] = self.indexed.get(document, offset + low - position, high - low)
            position += length
        return out

    def document_starts(self, sample: int) -> np.ndarray:
        """Return the positions at which documents start, int64, ascending from 0. Padding counts as a document."""
        check_window(self, sample, 0, 0)
        ends = np.cumsum(self.lengths[self._parts(sample)])
        return np.concatenate([np.zeros(1, dtype=np.int64), ends[ends < self.seq_length]])

    def unlabelled(self, sample: int) -> np.ndarray:
        """Return the positions without a label, int64, ascending: the ends of documents, and padding."""
        check_window(self, sample, 0, 0)
        parts = self._parts(sample)
        ends = np.cumsum(self.lengths[parts])
        last = parts.stop - 1
        goes_on = self.offsets[last] + self.lengths[last] < self.indexed.lengths[int(self.documents[last])]
        if ends[-1] == self.seq_length and goes_on:
            return ends[:-1] - 1
        return np.concatenate([ends[:-1] - 1, np.arange(ends[-1] - 1, self.seq_length)])

    def source(self, sample: int) -> str:
        """Return the path of the file that holds a sample, for messages."""
        return self.indexed.path

    def describe(self) -> str:
        """Describe the data for the log."""
        return f"{self.name}: {self.indexed.prefix}: {self.packing}; {len(self):,} samples"
