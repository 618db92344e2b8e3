"""Random tokens for runs without data files. Any part of a sample can be computed without the rest."""

from __future__ import annotations

import numpy as np

from megatron_sp.data.gpt_dataset import check_window

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
#: A sample of random tokens is 1 to this many documents.
MOST_DOCUMENTS = 8


def _mix(x: np.ndarray) -> np.ndarray:
    """Return a hash of each uint64 counter as uint64, with the output function of the generator SplitMix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class MockDataset:
    """Uniformly random tokens. Each depends only on seed, sample and position, so all ranks compute the same ones.

    Args:
        vocab_size: tokens are below this.
        seq_length: inputs in a sample; a sample has one more token.
        num_samples: number of samples.
        seed: seed of the tokens.
        name: name of the split, for messages.
    """

    def __init__(self, vocab_size: int, seq_length: int, num_samples: int, seed: int, name: str = "train"):
        if vocab_size < 1:
            raise ValueError(f"vocabulary of {vocab_size} tokens")
        self.vocab_size, self.seq_length, self.num_samples = vocab_size, seq_length, num_samples
        self.seed, self.name = seed, name

    def __len__(self) -> int:
        return self.num_samples

    def _stream(self, sample: int) -> np.ndarray:
        """Return the number from which the random numbers of a sample are computed, uint64 [1]."""
        key = np.array([self.seed & _MASK, sample], dtype=np.uint64)
        return _mix(_mix(key[:1]) + key[1:] * np.uint64(_GOLDEN))

    def window(self, sample: int, start: int, stop: int) -> np.ndarray:
        """Return the tokens ``[start, stop)`` of a sample, int64."""
        check_window(self, sample, start, stop)
        counters = np.arange(start, stop, dtype=np.uint64) * np.uint64(_GOLDEN) + self._stream(sample)
        return (_mix(counters) % np.uint64(self.vocab_size)).astype(np.int64)

    def document_starts(self, sample: int) -> np.ndarray:
        """Return the positions at which documents start, int64, ascending from 0; they are random, too."""
        check_window(self, sample, 0, 0)
        draws = _mix(np.arange(MOST_DOCUMENTS, dtype=np.uint64) * np.uint64(_GOLDEN) + _mix(self._stream(sample)))
        count = int(draws[0] % np.uint64(MOST_DOCUMENTS))
        return np.unique(np.append(draws[1:1 + count] % np.uint64(self.seq_length), np.uint64(0)).astype(np.int64))

    def source(self, sample: int) -> str:
        """Return the flag that asked for random tokens, for messages: a sample comes from no file."""
        return "--mock-data"

    def describe(self) -> str:
        return f"{self.name}: {len(self):,} made-up samples of {self.seq_length:,} random tokens (--mock-data)"
