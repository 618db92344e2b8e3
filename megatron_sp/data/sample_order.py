"""Compute the order of samples as Megatron-core does, by arithmetic and seeded shuffles.

The documents of a split are repeated for as many epochs as the samples need, shuffled, and laid end to end in one long
row of tokens. Sample ``k`` is the tokens ``[k*s, k*s + s + 1)`` of that row: ``s`` inputs, and one more token for the
last label, which is also the first input of sample ``k + 1``. A second shuffle orders the samples::

    row of tokens   | document 7 | document 2      | document 5 ...
    samples         | 0       | 1       | 2       | 3 ...

When less than 80% of the last epoch is used, its documents and samples are shuffled separately and come last.
Otherwise some documents would be read once more than others long before the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SEPARATE_BELOW = 0.80


@dataclass(frozen=True)
class Epochs:
    """How often a split is repeated.

    Attributes:
        tokens_per_epoch: tokens of the split.
        num_epochs: how often the documents are repeated, at least 1.
        num_samples: samples in all epochs together, at least as many as needed.
        first_shuffle: samples ``[0, first_shuffle)`` are shuffled together; the others are shuffled and come last.
        separate_final_epoch: whether the documents of the last epoch are shuffled separately.
    """

    tokens_per_epoch: int
    num_epochs: int
    num_samples: int
    first_shuffle: int
    separate_final_epoch: bool


def plan_epochs(tokens_per_epoch: int, seq_length: int, num_samples: int | None, extra_token: int = 1) -> Epochs:
    """Return how many epochs ``num_samples`` samples need, and how they are shuffled.

    Args:
        tokens_per_epoch: tokens of the split, above 0.
        seq_length: tokens in a sample.
        num_samples: how many samples are needed; None: those of one epoch.
        extra_token: 1 when a sample has one more token than ``seq_length``, for the last label.
    """
    needed = 0 if num_samples is None else num_samples * seq_length + extra_token
    num_epochs = max(1, -(-needed // tokens_per_epoch))
    total = (num_epochs * tokens_per_epoch - extra_token) // seq_length
    if num_epochs == 1 or num_samples is None:
        return Epochs(tokens_per_epoch, num_epochs, total, total, False)
    before_final = ((num_epochs - 1) * tokens_per_epoch - extra_token) // seq_length
    per_epoch = (tokens_per_epoch - extra_token) // seq_length
    separate = num_samples - before_final < int(SEPARATE_BELOW * per_epoch)
    return Epochs(tokens_per_epoch, num_epochs, total, before_final if separate else total, separate)


def build_document_index(document_ids: np.ndarray, epochs: Epochs, random: np.random.RandomState) -> np.ndarray:
    """Return the shuffled documents of all epochs, int32 or, for large ids, int64 ``[num_epochs * num_documents]``."""
    fits = not len(document_ids) or int(document_ids.max()) < 2**31
    document_ids = document_ids.astype(np.int32 if fits else np.int64)
    parts = [epochs.num_epochs - 1, 1] if epochs.separate_final_epoch else [epochs.num_epochs]
    shuffled = []
    for repeats in parts:
        row = np.tile(document_ids, repeats)
        random.shuffle(row)
        shuffled.append(row)
    return np.concatenate(shuffled)


def build_starts(lengths: np.ndarray, document_index: np.ndarray) -> np.ndarray:
    """Return where in the row of tokens each entry of ``document_index`` starts, and at the end the length of the row.

    Returns:
        int64 ``[len(document_index) + 1]``.
    """
    starts = np.zeros(len(document_index) + 1, dtype=np.int64)
    np.cumsum(lengths[document_index], dtype=np.int64, out=starts[1:])
    return starts


def build_shuffle_index(first: int, total: int, random: np.random.RandomState) -> np.ndarray:
    """Return the order of samples: ``[0, first)`` shuffled, then ``[first, total)`` shuffled; uint32 if it fits."""
    dtype = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    order = np.arange(total, dtype=dtype)
    random.shuffle(order[:first])
    if first != total:
        random.shuffle(order[first:])
    return order


def locate(starts: np.ndarray, positions: np.ndarray | int) -> np.ndarray:
    """Return the entry of the document index that holds each position of the row of tokens."""
    return np.searchsorted(starts, positions, side="right") - 1


def build_sample_index(starts: np.ndarray, num_samples: int, seq_length: int, extra_token: int = 1) -> np.ndarray:
    """Return where each sample starts: entry of the document index and token offset in it, ``[num_samples + 1, 2]``.

    The last row is the end of the last sample. Megatron stores this array. Here only tests compute it, to compare the
    orders: ``locate`` finds the start of one sample with O(log documents) work.
    """
    positions = np.minimum(np.arange(num_samples + 1, dtype=np.int64) * seq_length, starts[-1] - extra_token)
    if extra_token:
        entries = locate(starts, positions)
    else:  # where a sample ends with a document, Megatron says that the next one starts at the end of that document
        entries = np.maximum(np.searchsorted(starts, positions, side="left") - 1, 0)
    return np.stack([entries, positions - starts[entries]], axis=1)
