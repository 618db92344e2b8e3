"""Cut attention under a pattern of blocks into parts that every kernel can compute.

Attention of a block of queries has two parts: attention to all keys of the earlier blocks that it sees, and causal
attention to itself. Where a document or a chunk begins inside the block, the parts are smaller::

    block of keys       0       1       2
    queries of block 2  #               c         #: all pairs; one part for all earlier blocks    c: causal

Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_sp.layout.masks.attention_mask import AttentionMask, Range


@dataclass(frozen=True)
class PatternPiece:
    """Queries, and the keys that they see: all keys of some ranges, or if ``causal`` the queries' own tokens.

    Attributes:
        queries: half-open range of positions in the sequence.
        keys: half-open ranges, ascending.
        num_keys: keys in all ranges together.
        causal: the keys are the queries, and each query sees those up to its own position.
    """

    queries: Range
    keys: tuple[Range, ...]
    num_keys: int
    causal: bool

    def by_chunk(self, size: int) -> Iterator[tuple[int, PatternPiece]]:
        """Yield the numbers of the chunks of ``size`` tokens in which the piece has keys, and its part in each."""
        found: dict[int, list[Range]] = {}
        for low, high in self.keys:
            for number in range(low // size, -(-high // size)):
                found.setdefault(number, []).append((max(low, number * size), min(high, (number + 1) * size)))
        for number, ranges in found.items():
            yield number, PatternPiece(self.queries, tuple(ranges), sum(high - low for low, high in ranges), False)


def pattern_pieces(mask: AttentionMask, row: int, head: int, queries: Range, keys: Range) -> Iterator[PatternPiece]:
    """Yield the pieces of the attention of some queries of a sequence to some of its keys, under ``mask.pattern``.

    No pair of a query and a key is in two pieces, and pairs that the mask forbids are in none.

    Args:
        row: number of the sequence in the microbatch.
        head: number of the query head within the model.
        queries, keys: half-open ranges of positions. The keys hold all of the queries, or none of them.
    """
    assert mask.pattern is not None and (keys[1] <= queries[0] or keys[0] <= queries[0] and queries[1] <= keys[1])
    size = mask.pattern.block
    for first, last in mask.ranges(row, queries):  # the queries of one document
        start = max(mask.first_key(row, first), keys[0])
        while first < last:
            block = first // size
            stop = min(last, (block + 1) * size)
            seen = _clipped([*mask.pattern.earlier(head, block), block], size, start, min(first, keys[1]))
            if seen:
                yield PatternPiece((first, stop), tuple(seen), sum(high - low for low, high in seen), False)
            if stop <= keys[1]:
                yield PatternPiece((first, stop), ((first, stop),), stop - first, True)
            first = stop


def _clipped(blocks: list[int], size: int, start: int, stop: int) -> list[Range]:
    """Return the tokens of some blocks that lie in a range, as ranges; blocks that follow each other are one range."""
    found: list[Range] = []
    for block in blocks:
        low, high = max(start, block * size), min(stop, (block + 1) * size)
        if low >= high:
            continue
        if found and found[-1][1] == low:
            found[-1] = (found[-1][0], high)
        else:
            found.append((low, high))
    return found
