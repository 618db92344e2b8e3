"""Find where documents start inside samples, and deal the samples of a global batch out to ranks by their documents.

A sample is a piece of a long row of documents, so it may hold the end of one document, several whole ones, and the
start of another. The index of the token files says where each document ends. So the boundaries inside any sample follow
by arithmetic: no token is read and nothing is communicated. Megatron looks for end-of-document tokens instead;
``--document-boundaries eod`` does the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_sp.config.schema import Data
from megatron_sp.data.gpt_dataset import Dataset
from megatron_sp.errors import DataError
from megatron_sp.layout.masks.attention_mask import AttentionMask

#: Tokens that are searched for end-of-document tokens at a time.
SCAN = 1 << 20


@dataclass(frozen=True)
class Documents:
    """What a run does with the documents inside its samples.

    Args:
        reset_positions: positions count from the start of each document (``--reset-position-ids``).
        reset_attention: tokens attend only to their own document (``--reset-attention-mask``).
        eod_token: a document starts after each of these tokens (``--document-boundaries eod``); None: where the index
            of the dataset says.
    """

    reset_positions: bool = False
    reset_attention: bool = False
    eod_token: int | None = None

    @classmethod
    def of(cls, data: Data, eod_token: int | None) -> Documents:
        """Return the settings that the flags ask for.

        Raises:
            DataError: documents end at tokens, and the tokenizer has no end-of-document token.
        """
        resets = data.reset_position_ids or data.reset_attention_mask
        by_token = resets and data.document_boundaries == "eod"
        if by_token and eod_token is None:
            raise DataError("--document-boundaries eod needs a tokenizer with an end-of-document token, and this one "
                            "has none. Use --document-boundaries index.")
        return cls(data.reset_position_ids, data.reset_attention_mask, eod_token if by_token else None)

    @property
    def matter(self) -> bool:
        """Return whether the boundaries inside samples change anything."""
        return self.reset_positions or self.reset_attention

    @property
    def balances_work(self) -> bool:
        """Return whether samples are dealt out to ranks by the work of their attention.

        It follows from the index. To find it from tokens, every rank would have to read the whole global batch.
        """
        return self.reset_attention and self.eod_token is None

    def starts(self, dataset: Dataset, sample: int) -> np.ndarray:
        """Return the positions ``[0, seq_length)`` of a sample at which documents start, int64, ascending from 0.

        The first document may have begun before the sample. Its part in the sample counts as a document, as in
        Megatron. With ``eod_token`` this reads all tokens of the sample, a piece at a time.
        """
        if self.eod_token is None:
            return dataset.document_starts(sample)
        found = [np.zeros(1, dtype=np.int64)]
        for start in range(0, dataset.seq_length, SCAN):
            tokens = dataset.window(sample, start, min(start + SCAN, dataset.seq_length))
            found.append(np.flatnonzero(tokens == self.eod_token) + (start + 1))
        starts = np.concatenate(found)
        return starts[starts < dataset.seq_length]

    def mask(self, starts: Sequence[np.ndarray]) -> AttentionMask:
        """Return the mask of a microbatch whose samples have these document starts, with ``reset_attention``."""
        assert self.reset_attention
        return AttentionMask(tuple(tuple(of_sample.tolist()) for of_sample in starts))

    def positions(self, starts: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return the position ids of the tokens at these places of a sample, int64."""
        if not self.reset_positions:
            return places
        return places - starts[np.searchsorted(starts, places, side="right") - 1]


#: Samples are whole rows of tokens: documents inside them change nothing.
IGNORE_DOCUMENTS = Documents()


def attention_work(starts: np.ndarray, seq_length: int) -> int:
    """Return the sum of the squared lengths of a sample's documents. The work of attention is in proportion to it."""
    lengths = np.diff(starts, append=seq_length)
    return int((lengths * lengths).sum())
