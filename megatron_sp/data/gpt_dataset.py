"""Samples of fixed length cut from shuffled documents. A rank can read any part of a sample without the rest."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from megatron_sp.data import sample_order as order
from megatron_sp.data.index_cache import Arrays, IndexCache
from megatron_sp.data.token_files.indexed_dataset import TokenSequences
from megatron_sp.errors import DataError


class Dataset(Protocol):
    """What training needs of a dataset: numbered samples of ``seq_length + 1`` tokens."""

    seq_length: int

    def __len__(self) -> int:
        """Return the number of samples."""

    def window(self, sample: int, start: int, stop: int) -> np.ndarray:
        """Return the tokens ``[start, stop)`` of one sample, int64; ``0 <= start <= stop <= seq_length + 1``."""

    def document_starts(self, sample: int) -> np.ndarray:
        """Return the positions ``[0, seq_length)`` at which documents start, int64, ascending from 0.

        The part of a document at the start of a sample counts as one. A dataset without documents returns ``[0]``.
        """

    def source(self, sample: int) -> str:
        """Return the path of the file that holds a sample, for messages."""

    def describe(self) -> str:
        """Describe the data for the log, in one or more lines."""


def check_window(dataset: Dataset, sample: int, start: int, stop: int) -> None:
    """Raise IndexError unless the dataset has this sample and the sample has the tokens ``[start, stop)``."""
    if not 0 <= sample < len(dataset):
        raise IndexError(f"sample {sample} of a dataset of {len(dataset)} samples")
    if not 0 <= start <= stop <= dataset.seq_length + 1:
        raise IndexError(f"tokens [{start}, {stop}) of a sample of {dataset.seq_length} + 1 tokens")


def unlabelled(dataset: Dataset, sample: int) -> np.ndarray:
    """Return the positions of a sample without a label, int64, ascending: none, where a dataset has no such method."""
    positions = getattr(dataset, "unlabelled", None)
    return np.empty(0, dtype=np.int64) if positions is None else positions(sample)


class GPTDataset:
    """Samples in the order that Megatron-core's GPTDataset has for the same seed, sizes and documents.

    Args:
        indexed: the tokens.
        document_ids: sequences of ``indexed`` that belong to this split, int ``[num_documents]``.
        num_samples: how many samples are needed; the documents are repeated as often as that takes. None: one epoch.
        seq_length: inputs in a sample; a sample has one more token, the label of the last input.
        seed: seed of the shuffles of documents and of samples.
        name: name of the split, for messages.
        cache: stores the order; default: keep it in memory.

    Attributes:
        document_index: the documents of all epochs, shuffled. Laid end to end they are one long row of tokens.
        starts: position of each document in that row, int64 ``[len(document_index) + 1]``.
        shuffle_index: which piece of the row each sample is.

    Raises:
        DataError: samples are needed, but the split has no documents or no tokens.
    """

    def __init__(self, indexed: TokenSequences, document_ids: np.ndarray, num_samples: int | None, seq_length: int,
                 seed: int, name: str = "train", cache: IndexCache | None = None):
        self.indexed, self.seq_length, self.seed, self.name = indexed, seq_length, seed, name
        self.document_ids = np.asarray(document_ids)
        lengths = indexed.lengths if len(document_ids) == len(indexed) else indexed.lengths[self.document_ids]
        tokens = int(lengths.sum(dtype=np.int64))
        self._refuse_empty(tokens, num_samples)
        self.epochs = order.plan_epochs(tokens, seq_length, num_samples)
        arrays = (cache or IndexCache()).get(self._key(), self._build)
        self.document_index = arrays["document_index"]
        self.starts = arrays["starts"]
        self.shuffle_index = arrays["shuffle_index"]

    def _refuse_empty(self, tokens: int, num_samples: int | None) -> None:
        where = f"The {self.name} split of {self.indexed.prefix} has {len(self.document_ids)} of " \
                f"{len(self.indexed)} documents"
        if not tokens:
            raise DataError(f"{where} and no tokens, but {'' if num_samples is None else f'{num_samples} '}samples "
                            "are needed from it. Give it a larger share in --split, use more data, or ask for no "
                            "samples (--eval-iters 0 for validation and test).")
        if num_samples is None and tokens <= self.seq_length:
            raise DataError(f"{where} and {tokens} tokens, which do not fill one sample of {self.seq_length} + 1 "
                            "tokens; use a smaller --seq-length or more data.")

    def _key(self) -> dict[str, object]:
        """Return all values that determine the arrays, as the key of the cache."""
        ids = np.ascontiguousarray(self.document_ids, dtype=np.int64)
        contiguous = len(ids) > 0 and bool(np.all(np.diff(ids) == 1))
        documents: object = [int(ids[0]), int(ids[-1]) + 1] if contiguous else ids.tolist()
        return dict(kind="gpt", lengths=self.indexed.fingerprint(), documents=documents, seq_length=self.seq_length,
                    seed=self.seed, num_epochs=self.epochs.num_epochs, num_samples=self.epochs.num_samples,
                    first_shuffle=self.epochs.first_shuffle, separate=self.epochs.separate_final_epoch)

    def _build(self) -> Arrays:
        random = np.random.RandomState(self.seed)
        document_index = order.build_document_index(self.document_ids, self.epochs, random)
        starts = order.build_starts(self.indexed.lengths, document_index)
        shuffle = order.build_shuffle_index(self.epochs.first_shuffle, self.epochs.num_samples, random)
        return dict(document_index=document_index, starts=starts, shuffle_index=shuffle)

    def __len__(self) -> int:
        return self.epochs.num_samples

    def window(self, sample: int, start: int, stop: int) -> np.ndarray:
        """Return the tokens ``[start, stop)`` of a sample, int64, without reading any others."""
        check_window(self, sample, start, stop)
        position = int(self.shuffle_index[sample]) * self.seq_length + start
        out = np.empty(stop - start, dtype=np.int64)
        entry, filled = int(order.locate(self.starts, position)), 0
        while filled < len(out):
            document, start, end = self._entry(entry, sample)
            offset = position + filled - start
            count = min(end - start - offset, len(out) - filled)
            if offset < 0 or count < 0:
                raise self._index_is_damaged(sample)
            if count:
                out[filled:filled + count] = self.indexed.get(document, offset, count)
            filled += count
            entry += 1
        return out

    def _entry(self, entry: int, sample: int) -> tuple[int, int, int]:
        """Return an entry of the document index, with the positions in the row where it starts and ends."""
        if not 0 <= entry < len(self.document_index):
            raise self._index_is_damaged(sample)
        document, start, end = int(self.document_index[entry]), int(self.starts[entry]), int(self.starts[entry + 1])
        if not 0 <= document < len(self.indexed) or end - start != self.indexed.lengths[document]:
            raise self._index_is_damaged(sample)
        return document, start, end

    def _index_is_damaged(self, sample: int) -> DataError:
        return DataError(f"The index of {self.indexed.prefix} points outside of the data for sample {sample}: its "
                         "index cache is damaged. Remove the cache (--data-cache-path, else cache/megatron_sp beside "
                         "the data); it is built again.")

    def document_starts(self, sample: int) -> np.ndarray:
        """Return the positions at which documents start, int64, ascending from 0. Reads no token."""
        check_window(self, sample, 0, 0)
        position = int(self.shuffle_index[sample]) * self.seq_length
        first, last = np.searchsorted(self.starts, (position, position + self.seq_length), side="left")
        inside = np.unique(self.starts[first:last]) - position  # where documents are empty, several start at one place
        return inside if len(inside) and inside[0] == 0 else np.concatenate([np.zeros(1, dtype=np.int64), inside])

    def source(self, sample: int) -> str:
        """Return the path of the file that holds a sample, for messages."""
        return self.indexed.path

    def sample_index(self) -> np.ndarray:
        """Compute the sample index that Megatron stores, int64 ``[num_samples + 1, 2]``; see ``build_sample_index``."""
        return order.build_sample_index(self.starts, len(self), self.seq_length)

    def describe(self) -> str:
        epochs = self.epochs
        per_epoch = (epochs.tokens_per_epoch - 1) // self.seq_length
        times = "once" if epochs.num_epochs == 1 else f"{epochs.num_epochs} times"
        return (f"{self.name}: {self.indexed.prefix}: {len(self.document_ids):,} documents, "
                f"{epochs.tokens_per_epoch:,} tokens = {per_epoch:,} samples of {self.seq_length:,} tokens per epoch; "
                f"read up to {times} for {len(self):,} samples")
