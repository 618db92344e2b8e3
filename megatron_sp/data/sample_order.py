"""The order of samples: pure arithmetic and seeded shuffles, the same as Megatron-core's.

The documents of a split are repeated for as many epochs as the samples need, shuffled, and laid in
one long row of tokens. Sample ``k`` is the tokens ``[k*s, k*s + s + 1)`` of that row (``s`` inputs
and one more for the last label; neighbours share that token). A second shuffle orders the samples.

When the last epoch is used for less than 80%, its documents and samples are shuffled on their own
and come last, so that no document is seen once more than another before its time.
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
        num_epochs: repetitions, at least 1.
        num_samples: samples in all repetitions together (at least as many as asked for).
        first_shuffle: samples ``[0, first_shuffle)`` are shuffled together, the rest after them.
        separate_final_epoch: whether the last repetition is shuffled on its own.
    """

    tokens_per_epoch: int
    num_epochs: int
    num_samples: int
    first_shuffle: int
    separate_final_epoch: bool


def plan_epochs(tokens_per_epoch: int, seq_length: int, num_samples: int | None, extra_token: int = 1) -> Epochs:
    """Number of epochs that yields ``num_samples`` (None: exactly one epoch).

    Args:
        tokens_per_epoch: tokens of the split, above 0.
        seq_length: tokens in a sample.
        num_samples: samples asked for.
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
    """Shuffled documents of all epochs, int32 (int64 where ids need it) ``[num_epochs * num_documents]``."""
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
    """Position in the token row at which each entry of ``document_index`` starts, then the row's length.

    Returns:
        int64 ``[len(document_index) + 1]``.
    """
    starts = np.zeros(len(document_index) + 1, dtype=np.int64)
    np.cumsum(lengths[document_index], dtype=np.int64, out=starts[1:])
    return starts


def build_shuffle_index(first: int, total: int, random: np.random.RandomState) -> np.ndarray:
    """Order of samples: ``[0, first)`` shuffled, then ``[first, total)`` shuffled; uint32 where it fits."""
    dtype = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    order = np.arange(total, dtype=dtype)
    random.shuffle(order[:first])
    if first != total:
        random.shuffle(order[first:])
    return order


def locate(starts: np.ndarray, positions: np.ndarray | int) -> np.ndarray:
    """Entry of the document index that holds each position of the token row."""
    return np.searchsorted(starts, positions, side="right") - 1


def build_sample_index(starts: np.ndarray, num_samples: int, seq_length: int, extra_token: int = 1) -> np.ndarray:
    """Where each sample starts: (entry of the document index, token offset in it), ``[num_samples + 1, 2]``.

    The last row ends the last sample. Megatron stores this array; here it is only computed to compare
    (``locate`` finds one sample's start in O(log documents)).
    """
    positions = np.minimum(np.arange(num_samples + 1, dtype=np.int64) * seq_length, starts[-1] - extra_token)
    if extra_token:
        entries = locate(starts, positions)
    else:  # a sample that ends with its document leaves the next one's start there
        entries = np.maximum(np.searchsorted(starts, positions, side="left") - 1, 0)
    return np.stack([entries, positions - starts[entries]], axis=1)
