"""Which keys each query may see. Pure arithmetic with the standard library; needs no torch.

Every attention core, every wrapper of one (Ulysses, ring) and every block of a chunked sequence is given one
``AttentionMask`` and asks it. No other module decides which keys a query sees.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from megatron_sp.layout.patterns.blocks import BlockPattern
from megatron_sp.layout.patterns.choice import LayerAttention

Range = tuple[int, int]
T = TypeVar("T")

#: What a mask may ask of an attention core beyond causal attention of s queries to the same s tokens. A core names in
#: ``supports`` what it can do, and a run whose masks need more is refused before it starts.
DOCUMENTS = "documents"
WINDOW = "window"
PATTERN = "pattern"


@dataclass(frozen=True)
class Piece:
    """A part of attention that every kernel can compute: a range of queries and a range of keys.

    Attributes:
        queries, keys: half-open ranges of positions in the sequence.
        causal: the two ranges are equal, and each query sees the keys up to its own position. Otherwise each query sees
            all keys of the piece.
        mirrored: there are as many queries as keys, and query number i of the piece sees key number i and all later
            ones. This is where the keys that a window hides begin. A causal kernel computes it on tokens in reverse
            order. It is never causal too.
    """

    queries: Range
    keys: Range
    causal: bool
    mirrored: bool = False


@dataclass(frozen=True)
class AttentionMask:
    """Says which keys each query of a microbatch may see.

    Positions count from the first key that attention is given. A query sees the key at its own position and those
    before it that every field below allows, and no later one: all masks are causal.

    **Contract of an attention core.** ``core(q, k, v, mask=..., dropout=...)`` is given q [b, t, n, d] and k, v
    [b, t', g, d] with t <= t'. *The queries are the last t of the t' positions*: query i is at position t' - t + i.
    Usually t = t'. When text is generated, or a sequence is computed in chunks, the keys of earlier tokens come first
    and t < t'. The output of a query is softmax attention over exactly the keys that the mask allows, so a value at any
    other key changes no bit of it. A core that supports less says so in ``supports``.

    Ulysses gives a core whole sequences, so it passes the mask on unchanged. A ring, and whoever holds only some of the
    queries or keys, asks ``pieces`` for what to compute and merges the results by their log-sum-exp. Two documents of
    four tokens, computed in two chunks of queries (x: sees)::

        position      0 1 2 3 4 5 6 7
        query 0       x                       pieces(0, queries=(0, 6), keys=(0, 6)):
              1       x x                         (0, 4) x (0, 4) causal
              2       x x x                       (4, 6) x (4, 6) causal
              3       x x x x
              4               x
              5               x x
              6               x x x           pieces(0, queries=(6, 8), keys=(0, 8)):
              7               x x x x             (6, 8) x (4, 6) all pairs
                                                  (6, 8) x (6, 8) causal

    A mask is a Python object that does not change, equal on all ranks that share a sequence. It remembers what kernels
    compute from it, such as the places of its pieces on the device (``remember``). Recomputation keeps it like any
    other argument, and FSDP and torch's pipeline, which move and split tensors, leave it alone.

    To add a rule, add a field whose default allows everything, a name by which cores declare that they know the rule,
    and its part in ``pieces``. The pieces of a pattern of blocks come from ``patterns.pieces`` instead, because heads
    may differ.

    A window cuts a band out of the triangle. Blocks of W queries make it of pieces that kernels know: a causal square
    on the diagonal, and before it a mirrored one of W - 1 tokens. Nine tokens with a window of W = 4 (c: causal,
    m: mirrored)::

        query 0   c
              1   c c
              2   c c c
              3   c c c c
              4     m m m c                pieces(0, queries=(0, 9), keys=(0, 9)):
              5       m m c c                (0, 4) x (0, 4) causal
              6         m c c c              (4, 8) x (4, 8) causal, (4, 7) x (1, 4) mirrored
              7           c c c c            (8, 9) x (8, 9) causal, (8, 9) x (5, 6) mirrored, (8, 9) x (6, 8) all pairs
              8             m # # c

    Attributes:
        documents: for each sequence of the microbatch, the positions at which its documents start, ascending from 0. A
            query sees only keys of its own document. Empty: each sequence is one document.
        window: a query sees the key at its own position and the ``window - 1`` before it. 0: all before it. Batches
            come without a window, and each layer adds its own (``within``).
        pattern: a query sees only keys of its own block and of the blocks that this pattern lists for it. None: of all
            blocks. Each layer adds its own; a layer has a window or a pattern.
        first_head: number, within the model, of the first query head that attention is given. Patterns whose heads
            differ need it; ``of_heads`` sets it on the rank that attends.
        computed: what ``remember`` has computed. Masks made with ``within`` and ``of_heads`` share it. None: nothing is
            remembered, as for the constant ``CAUSAL``, which would otherwise grow as long as the process lives.
    """

    documents: tuple[tuple[int, ...], ...] = ()
    window: int = 0
    pattern: BlockPattern | None = None
    first_head: int = 0
    computed: dict[Any, Any] | None = field(default_factory=dict, repr=False, compare=False)

    def remember(self, key: Any, compute: Callable[[], T]) -> T:
        """Return what a function computes from the documents, the window and the key; compute it once for each of them.

        All layers attend with the same documents. The mask travels with its microbatch, so that recomputation in
        backward finds what forward computed, however many microbatches were begun in between.
        """
        if self.computed is None:
            return compute()
        whole_key = self.window, key
        if whole_key not in self.computed:
            self.computed[whole_key] = compute()
        return self.computed[whole_key]  # type: ignore[no-any-return]

    @property
    def needs(self) -> frozenset[str]:
        """Return the names of what a core must compute beyond causal attention; empty for a purely causal mask."""
        documents = any(len(starts) > 1 for starts in self.documents)
        return frozenset(name for name, is_used in ((DOCUMENTS, documents), (WINDOW, self.window > 0),
                                                    (PATTERN, self.pattern is not None)) if is_used)

    def within(self, window: int, pattern: BlockPattern | None = None) -> AttentionMask:
        """Return the mask with a window and a pattern of blocks; 0 and None leave it as it is."""
        return replace(self, window=window, pattern=pattern) if window or pattern is not None else self

    def of_heads(self, first_head: int) -> AttentionMask:
        """Return the mask for heads that start with this one; the mask itself if all heads see the same keys."""
        return self if self.pattern is None else replace(self, first_head=first_head)

    def after(self, tokens: int) -> AttentionMask:
        """Return the mask for sequences without their first ``tokens`` tokens, whose keys no query needs.

        Blocks of a pattern are counted from the beginning of the sequence, so with a pattern nothing can be left out.
        """
        if not tokens:
            return self
        assert self.pattern is None
        return replace(self, computed={}, documents=tuple(
            (0, *(start - tokens for start in starts if start > tokens)) for starts in self.documents))

    def ranges(self, row: int, within: Range) -> Iterator[Range]:
        """Yield, in order, the part of each document of a sequence that lies within a range of positions.

        Args:
            row: number of the sequence in the microbatch.
            within: half-open, not empty.
        """
        starts = self.documents[row] if self.documents else (0,)
        position, following = within[0], bisect_right(starts, within[0])
        while position < within[1]:
            stop = min(starts[following], within[1]) if following < len(starts) else within[1]
            yield position, stop
            position, following = stop, following + 1

    def first_key(self, row: int, query: int) -> int:
        """Return the position of the first key of a sequence that a query may see. Later queries see no earlier key."""
        starts = self.documents[row] if self.documents else (0,)
        first = starts[bisect_right(starts, query) - 1]
        return max(first, query - self.window + 1) if self.window else first

    def lengths(self, batch: int, tokens: int) -> list[int]:
        """Return the lengths of the documents of all sequences, those of the first sequence first.

        Args:
            batch: number of sequences.
            tokens: length of each sequence.
        """
        return [stop - start for row in range(batch) for start, stop in self.ranges(row, (0, tokens))]

    def attention_share(self, batch: int, tokens: int,
                        layers: Sequence[LayerAttention] = (LayerAttention(),)) -> float:
        """Return the work of attention to all sequences, relative to sequences of one document each: 1.0 or less.

        The work of a document is in proportion to the square of its length, or to the part of it in a window or
        pattern.

        Args:
            layers: the attention of each layer, see ``patterns.choice``.
        """
        if DOCUMENTS not in self.needs:
            return 1.0
        counts = {layer: layers.count(layer) for layer in layers}
        work = sum(count * layer.area(*place) for layer, count in counts.items()
                   for row in range(batch) for place in self.ranges(row, (0, tokens)))
        return work / (batch * sum(count * layer.area(0, tokens) for layer, count in counts.items()))

    def pieces(self, row: int, queries: Range, keys: Range) -> list[Piece]:
        """Return the pieces that make up the attention of some queries of a sequence to some of its keys.

        No pair of a query and a key is in two pieces. Pairs that the mask forbids are in none, so a query may be in no
        piece at all.

        Args:
            row: number of the sequence in the microbatch.
            queries, keys: half-open ranges of positions; they may overlap in any way.
        """
        assert self.pattern is None, "patterns.pieces knows the pieces of a pattern"
        found: list[Piece] = []
        for start, stop in self.ranges(row, (min(queries[0], keys[0]), max(queries[1], keys[1]))):
            first, last = max(start, queries[0]), min(stop, queries[1])
            low, high = max(start, keys[0]), min(stop, keys[1])
            if first >= last or low >= high:
                continue
            found += self._to_earlier((first, last), (low, min(first, high)))
            own, end = max(low, first), min(high, last)
            if own < end:  # tokens that are queries and keys
                found += self._square(own, end)
                found += self._to_earlier((end, last), (own, end))
        return found

    def _square(self, first: int, last: int) -> list[Piece]:
        """Return the pieces of the attention of a range of tokens to themselves."""
        found = []
        step = self.window or last - first
        for start in range(first, last, step):
            stop = min(start + step, last)
            found.append(Piece((start, stop), (start, stop), True))
            found += self._to_earlier((start, stop), (max(first, start - step + 1), start))
        return found

    def _to_earlier(self, queries: Range, keys: Range) -> list[Piece]:
        """Return the pieces of the attention of some queries to keys that all come before them; a range may be empty.

        With a window the first queries see all keys, and each query after them one key less than the one before::

            keys      0 1 2 3 4 5      window 7
            query 6   # # # # # #      (6, 7) x (0, 6) all pairs
                  7     m # # # #      (7, 9) x (1, 3) mirrored
                  8       m # # #      (7, 9) x (3, 6) all pairs
        """
        (first, last), (low, high) = queries, keys
        if first >= last or low >= high:
            return []
        if not self.window:
            return [Piece(queries, keys, False)]
        start = max(first, low + self.window - 1)  # from here on each query sees one key less than the query before it
        stop = min(last, high + self.window - 1)  # from here on the window hides all of these keys
        found = [Piece((first, min(last, start)), keys, False)] if first < start else []
        if start < stop:
            seen_from, count = start - self.window + 1, stop - start
            found.append(Piece((start, stop), (seen_from, seen_from + count), False, mirrored=True))
            if seen_from + count < high:
                found.append(Piece((start, stop), (seen_from + count, high), False))
        return found


#: Each sequence is one document: a query sees all keys up to its own position.
CAUSAL = AttentionMask(computed=None)
