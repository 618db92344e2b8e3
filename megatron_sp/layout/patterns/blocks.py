"""The patterns themselves. Positions are counted in blocks of tokens; all patterns are causal.

A query sees all keys of the earlier blocks that the pattern lists for its block, and in its own block the keys up to
itself. So a pattern needs only a list of earlier blocks for each block of queries, and no table of all pairs of tokens.
What block 7 of the queries sees (#), with 2 local blocks and 1 global block::

    block of keys       0 1 2 3 4 5 6 7
    longformer          #           # #     the first blocks, and the nearest ones
    bigbird             #   #       # #     and some at random
    fixed                 #   #   # # #     its own window of 2, and the last block of each earlier window
    strided, stride 3     #     #   # #     the nearest ones, and those 3, 6, ... blocks before

What a block of queries sees does not depend on the length of the sequence, so the parts of a sequence that is computed
in chunks, and texts of other lengths, see the same.

Sources: fixed and strided: Sparse Transformer (Child et al., arXiv 1904.10509); longformer: Beltagy et al. (arXiv
2004.05150); bigbird: Zaheer et al. (arXiv 2007.14062).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True)
class BlockPattern(ABC):
    """Which earlier blocks a block of queries sees. This class is the interface; subclasses are the patterns.

    Attributes:
        block: tokens of a block.
        by_head: whether heads see different blocks.
        heads_see_equally_many: whether all heads see equally many earlier blocks of a sequence.
    """

    block: int
    by_head: bool = False
    heads_see_equally_many: ClassVar[bool] = False

    def kind(self, head: int) -> int:
        """Return a number that two heads share if they see the same blocks.

        Args:
            head: number of a query head within the model.
        """
        return head if self.by_head else 0

    @abstractmethod
    def earlier(self, head: int, block: int) -> list[int]:
        """Return the numbers of the blocks before its own that a block of queries sees, ascending.

        Args:
            head: number of the query head within the model.
            block: number of the block of queries.
        """

    def count(self, head: int, block: int, first: int = 0) -> int:
        """Return how many of the ``earlier`` blocks have a number of at least ``first``."""
        found = self.earlier(head, block)
        return len(found) - bisect_left(found, first)


@dataclass(frozen=True)
class Fixed(BlockPattern):
    """Windows of ``local`` blocks side by side; a block sees its own window, and the last blocks of all windows before.

    Attributes:
        local: blocks of a window.
        summary: blocks of each earlier window that are seen. Heads that differ see other blocks of the windows: head 0
            the last ones, head 1 those before them, and so on.
    """

    local: int = 4
    summary: int = 1
    heads_see_equally_many: ClassVar[bool] = True

    def kind(self, head: int) -> int:
        """Return which of a window's blocks this head sees: 0 the last ones, 1 those before them, and so on."""
        return head % max(1, self.local // self.summary) if self.by_head and self.summary else 0

    def _place(self, head: int) -> int:
        """Return the position, within a window, of the first block that later windows see."""
        return self.local - (1 + self.kind(head)) * self.summary

    def earlier(self, head: int, block: int) -> list[int]:
        """Return the summary blocks of all earlier windows, then the block's predecessors in its own window."""
        own, place = block // self.local * self.local, self._place(head)
        return [start + place + number for start in range(0, own, self.local) for number in range(self.summary)
                ] + list(range(own, block))

    def count(self, head: int, block: int, first: int = 0) -> int:
        """Return how many of the ``earlier`` blocks have a number of at least ``first``."""
        own, place = block // self.local * self.local, self._place(head)

        def seen_before(number: int) -> int:
            windows, rest = divmod(number, self.local)
            return windows * self.summary + min(max(rest - place, 0), self.summary)

        return seen_before(own) - seen_before(min(first, own)) + max(0, block - max(own, first))


@dataclass(frozen=True)
class Longformer(BlockPattern):
    """The first ``first`` blocks of the sequence, and the nearest ``local`` blocks, of which the own is one."""

    local: int = 4
    first: int = 1
    heads_see_equally_many: ClassVar[bool] = True

    def earlier(self, head: int, block: int) -> list[int]:
        """Return the first ``first`` blocks of the sequence, then the nearest ones."""
        near = max(0, block - self.local + 1)
        return [*range(min(self.first, near)), *range(near, block)]

    def count(self, head: int, block: int, first: int = 0) -> int:
        """Return how many of the ``earlier`` blocks have a number of at least ``first``."""
        near = max(0, block - self.local + 1)
        return max(0, min(self.first, near) - first) + max(0, block - max(near, first))


@dataclass(frozen=True)
class BigBird(Longformer):
    """A ``Longformer`` pattern plus ``random`` blocks between its first and its nearest blocks.

    The random blocks of each block of queries are drawn from a hash of seed, head and block. So every rank, every pass
    and every version of Python draws the same blocks.
    """

    random: int = 1
    seed: int = 0

    def earlier(self, head: int, block: int) -> list[int]:
        """Return the first blocks of the sequence, then the random ones, then the nearest ones."""
        near = max(0, block - self.local + 1)
        known = min(self.first, near)
        drawn = _draw(near - known, self.random, f"{self.seed} {self.kind(head)} {block}")
        return [*range(known), *sorted(known + number for number in drawn), *range(near, block)]

    def count(self, head: int, block: int, first: int = 0) -> int:
        """Return how many of the ``earlier`` blocks have a number of at least ``first``."""
        if first:
            return BlockPattern.count(self, head, block, first)
        near = max(0, block - self.local + 1)
        return super().count(head, block) + min(self.random, near - min(self.first, near))


def _draw(below: int, count: int, key: str) -> set[int]:
    """Return ``count`` different numbers from 0 to ``below`` - 1, or all of them if they are fewer (Floyd's method)."""
    found: set[int] = set()
    for last in range(max(0, below - count), below):
        digest = hashlib.blake2b(f"{key} {last}".encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "little") % (last + 1)
        found.add(last if number in found else number)
    return found


@dataclass(frozen=True)
class Strided(BlockPattern):
    """The nearest ``local`` blocks, of which the own is one, and every ``stride``-th block before.

    Heads that differ see other ones: with a stride of 3 head 0 those 3, 6, 9 blocks before, head 1 those 1, 4, 7
    before, and so on.
    """

    local: int = 4
    stride: int = 4

    def kind(self, head: int) -> int:
        """Return the distance, modulo ``stride``, of the far blocks that this head sees."""
        return head % self.stride if self.by_head else 0

    def _far(self, head: int, block: int, first: int = 0) -> range:
        """Return the blocks from ``first`` on that the stride reaches and that are not among the nearest ones."""
        start = (block - self.kind(head)) % self.stride
        start += -(-max(0, first - start) // self.stride) * self.stride
        return range(start, max(0, block - self.local + 1), self.stride)

    def earlier(self, head: int, block: int) -> list[int]:
        """Return the blocks that the stride reaches, then the nearest ones."""
        return [*self._far(head, block), *range(max(0, block - self.local + 1), block)]

    def count(self, head: int, block: int, first: int = 0) -> int:
        """Return how many of the ``earlier`` blocks have a number of at least ``first``."""
        return len(self._far(head, block, first)) + max(0, block - max(0, block - self.local + 1, first))


@dataclass(frozen=True)
class Own(BlockPattern):
    """The blocks that a user's function returns.

    Attributes:
        function: called with the number of the head, if ``by_head``, and that of the block of queries; returns the
            numbers of blocks before it, ascending, each once. See ``own.own_pattern``, which checks them.
    """

    function: Callable[..., list[int]] = field(default=lambda *_: [])

    def earlier(self, head: int, block: int) -> list[int]:
        """Return the blocks that the user's function lists for this block of queries."""
        return self.function(head, block) if self.by_head else self.function(block)


def pairs_in_pattern(pattern: BlockPattern, heads: Sequence[int], start: int, stop: int) -> float:
    """Return how many pairs of a query and a key in a range of tokens a pattern allows, as a mean over heads.

    Args:
        heads: numbers of query heads within the model.
        start, stop: range of positions, such as a document; its tokens see no key before it.
    """
    kinds: dict[int, int] = {}
    for head in heads:
        kind = 0 if pattern.heads_see_equally_many and start == 0 else pattern.kind(head)
        kinds[kind] = kinds.get(kind, 0) + 1
    size, total = pattern.block, 0
    first, rest = divmod(start, size)  # the first block, of which ``rest`` tokens come before the range
    for block in range(first, -(-stop // size)):
        low, high = max(start, block * size), min(stop, (block + 1) * size)
        queries = high - low
        total += len(heads) * queries * (queries + 1) // 2
        if block > first:
            for head, count in kinds.items():
                partly = rest and pattern.count(head, block, first) > pattern.count(head, block, first + 1)
                total += count * queries * (pattern.count(head, block, first) * size - (rest if partly else 0))
    return total / len(heads)
