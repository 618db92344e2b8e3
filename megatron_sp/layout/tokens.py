"""Which rank owns which token. No other module decides this.

The batch reader, the position ids of rotary embeddings, the ring's masks and the labels all ask ``SequenceLayout``.
Pure arithmetic with numpy; needs no processes and no torch.

Ranks that share a sequence are numbered ``sp_rank = ring_rank * ulysses + ulysses_rank``: the
Ulysses ranks of one ring member hold adjacent pieces, so that gathering over Ulysses gives
that ring member's tokens in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_sp.config.schema import Run

Range = tuple[int, int]


@dataclass(frozen=True)
class SequenceLayout:
    """Says which rank owns which of the tokens ``0 .. seq_length`` of every sequence.

    ``contiguous``: rank i owns one range of ``s/sp`` tokens. ``zigzag``: the sequence is cut into ``2 * ring`` chunks,
    and ring member r owns chunks ``r`` and ``2 * ring - 1 - r``. So each member has an early and a late chunk, and all
    have the same work under a causal mask. The Ulysses ranks of a member divide its two chunks among them. A ring of 2
    with 2 Ulysses ranks, 16 tokens::

        chunk          0          1          2            3
        tokens     0 1 2 3    4 5 6 7    8 9 10 11   12 13 14 15
        sp rank    0 0 0 0    2 2 2 2    3 3  3  3    1  1  1  1

    ``contiguous`` with ``chunk``, for ``--sequence-chunk-size``: the model computes one chunk of so many tokens after
    another, and all ranks compute each of them together. So each rank owns an equal range of every chunk. Its local
    tokens are these ranges in order, and the tokens of chunk c are the c-th equal part of them. Two ranks, 16 tokens::

        chunk          0          1          2            3
        tokens     0 1 2 3    4 5 6 7    8 9 10 11   12 13 14 15
        sp rank    0 0 1 1    0 0 1 1    0 0  1  1    0  0  1  1

    Attributes:
        chunk: tokens of a chunk of ``--sequence-chunk-size``, of all ranks together; 0 for the whole sequence at once.
    """

    seq_length: int
    ring: int = 1
    ulysses: int = 1
    kind: str = "contiguous"
    chunk: int = 0

    @classmethod
    def of(cls, run: Run, seq_length: int = 0) -> SequenceLayout:
        """Return the layout of a run: zigzag with a ring, whose work it balances, else contiguous.

        Args:
            seq_length: tokens of a sequence; default: as the run says.
        """
        parallel = run.parallel
        return cls(seq_length or run.data.seq_length, parallel.ring, parallel.ulysses,
                   "zigzag" if parallel.ring > 1 else "contiguous", run.memory.sequence_chunk_size)

    def __post_init__(self) -> None:
        assert self.kind in ("contiguous", "zigzag"), self.kind
        assert self.seq_length % self.divisor == 0, f"{self.seq_length} tokens do not divide by {self.divisor}"
        assert self.chunk == 0 or self.ring == 1, "a ring takes the whole sequence at once"
        assert self.chunk % self.sp == 0, f"a chunk of {self.chunk} tokens does not divide by {self.sp}"

    @property
    def sp(self) -> int:
        """Ranks that share one sequence."""
        return self.ring * self.ulysses

    @property
    def divisor(self) -> int:
        """The sequence length must be a multiple of this."""
        if self.chunk:
            return self.chunk
        return self.sp * 2 if self.kind == "zigzag" and self.ring > 1 else self.sp

    @property
    def local_length(self) -> int:
        """Tokens per rank, ``s/sp``."""
        return self.seq_length // self.sp

    def ring_ranges(self, ring_rank: int) -> tuple[Range, ...]:
        """Return the token ranges that the Ulysses ranks of one ring member own together, in order."""
        if self.kind == "contiguous" or self.ring == 1:
            size = self.seq_length // self.ring
            return ((ring_rank * size, (ring_rank + 1) * size),)
        chunk = self.seq_length // (2 * self.ring)
        late = 2 * self.ring - 1 - ring_rank
        return (ring_rank * chunk, (ring_rank + 1) * chunk), (late * chunk, (late + 1) * chunk)

    def ranges(self, sp_rank: int) -> tuple[Range, ...]:
        """Return the half-open token ranges that ``sp_rank`` owns, in the order of its local tokens."""
        if self.chunk and self.sp > 1:
            size = self.chunk // self.sp
            firsts = range(sp_rank * size, self.seq_length, self.chunk)
            return tuple((first, first + size) for first in firsts)
        ring_rank, ulysses_rank = divmod(sp_rank, self.ulysses)
        skip, want = ulysses_rank * self.local_length, self.local_length
        owned: list[Range] = []
        for start, stop in self.ring_ranges(ring_rank):
            first = start + skip
            last = min(stop, first + want)
            skip = max(0, skip - (stop - start))
            if first < last:
                owned.append((first, last))
                want -= last - first
        return tuple(owned)

    def positions(self, sp_rank: int) -> npt.NDArray[np.int64]:
        """Return the position in the sequence of each token that ``sp_rank`` owns, int64 ``[s/sp]``."""
        return np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in self.ranges(sp_rank)])
