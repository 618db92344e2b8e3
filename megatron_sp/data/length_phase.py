"""Sequences that are parts of longer samples: the data of a phase of ``--seq-length-schedule``."""

from __future__ import annotations

import numpy as np

from megatron_sp.data.gpt_dataset import Dataset, check_window, unlabelled
from megatron_sp.layout.length_schedule import Phase

#: Number of parts in one shuffled block. The order of a block takes 8 MiB of memory.
SHUFFLED = 1 << 20


class LengthPhaseDataset:
    """The samples of another dataset, each cut into equal parts, and the parts of one phase in random order.

    The sequences ``[first x parts, stop x parts)`` of the phase are exactly the parts of the samples ``[first, stop)``.
    So each token of these samples is read once, and the next phase goes on with sample ``stop``. Parts are shuffled
    within blocks of about a million; the order depends on seed, phase and block alone, so that a run can be resumed
    anywhere. Sequences outside of the phase are not shuffled; a batch that is read ahead may contain some.

    Args:
        dataset: has samples of ``phase.parts x phase.length`` tokens.
        seed: seed of the shuffles.
    """

    def __init__(self, dataset: Dataset, phase: Phase, seed: int):
        self.dataset, self.phase, self.seed, self.seq_length = dataset, phase, seed, phase.length
        assert dataset.seq_length == phase.parts * phase.length and phase.stop is not None
        self._stop: int = phase.stop
        self._block_samples = max(1, SHUFFLED // phase.parts)
        self._block: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        return min(len(self.dataset) * self.phase.parts, 2**62)      # a cyclic dataset has 2^62 samples already

    def _place(self, sample: int) -> tuple[int, int]:
        """Return the sample of ``dataset`` that holds a sequence, and the position of the sequence's first token."""
        parts, first = self.phase.parts, self.phase.first
        if first * parts <= sample < self._stop * parts:
            block, index = divmod(sample - first * parts, self._block_samples * parts)
            start = first + block * self._block_samples
            sample = start * parts + int(self._order(block, start)[index])
        long_sample, part = divmod(sample, parts)
        return long_sample, part * self.seq_length

    def _order(self, block: int, start: int) -> np.ndarray:
        """Return the shuffled parts of a block of samples, given its first sample."""
        made = self._block
        if made[0] != block:
            samples = min(self._block_samples, self._stop - start)
            random = np.random.default_rng([self.seed, self.phase.length, block])
            made = self._block = block, random.permutation(samples * self.phase.parts)
        return made[1]

    def window(self, sample: int, start: int, stop: int) -> np.ndarray:
        """Return the tokens ``[start, stop)`` of a sequence, int64."""
        check_window(self, sample, start, stop)
        long_sample, offset = self._place(sample)
        return self.dataset.window(long_sample, offset + start, offset + stop)

    def document_starts(self, sample: int) -> np.ndarray:
        """Return the positions at which documents start, int64, ascending from 0."""
        check_window(self, sample, 0, 0)
        long_sample, offset = self._place(sample)
        inside = self._inside(self.dataset.document_starts(long_sample), offset)
        return inside if len(inside) and inside[0] == 0 else np.concatenate([np.zeros(1, dtype=np.int64), inside])

    def unlabelled(self, sample: int) -> np.ndarray:
        """Return the positions without a label, int64, ascending."""
        long_sample, offset = self._place(sample)
        return self._inside(unlabelled(self.dataset, long_sample), offset)

    def _inside(self, positions: np.ndarray, offset: int) -> np.ndarray:
        """Return those positions of a sample that are in the sequence that starts at ``offset``, counted from there."""
        return positions[(positions >= offset) & (positions < offset + self.seq_length)] - offset

    def source(self, sample: int) -> str:
        """Return the path of the file that holds a sequence, for messages."""
        return self.dataset.source(self._place(sample)[0])

    def describe(self) -> str:
        return (f"{self.dataset.describe()}; phase {self.phase.number} cuts each sample into {self.phase.parts} "
                f"sequences of {self.seq_length:,} tokens")
