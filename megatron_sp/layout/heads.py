"""Which query and key/value heads each tensor-parallel and each Ulysses rank computes. Pure arithmetic.

Query head i of n uses key/value head ``i * g // n`` of g. Any numbers of heads work. When the ranks do not divide the
query heads, some ranks get one head more than others. When several ranks need the same key/value head, each of them
gets a copy, and the gradients of the copies are summed. Six query heads, two key/value heads, four Ulysses ranks::

    rank               0     1     2     3
    query heads       0 1   2 3    4     5
    key/value heads    0    0 1    1     1
"""

from __future__ import annotations

from dataclasses import dataclass, replace

Range = tuple[int, int]


def split_evenly(count: int, parts: int) -> list[Range]:
    """Return ``parts`` consecutive ranges that cover ``0 .. count``; the first may be larger by 1 than the rest."""
    size, extra = divmod(count, parts)
    bounds = [part * size + min(part, extra) for part in range(parts + 1)]
    return list(zip(bounds, bounds[1:]))


def kv_range(query: Range, num_query: int, num_kv: int) -> Range:
    """Return the range of the key/value heads that a range of query heads uses."""
    start, stop = query
    if start == stop:
        return 0, 0
    return start * num_kv // num_query, (stop - 1) * num_kv // num_query + 1


def are_equal_groups(kv_indices: tuple[int, ...]) -> bool:
    """Return whether query heads that use these key/value heads form equal groups in order, as attention kernels need.

    Examples: ``(0, 0, 1, 1)`` does; ``(0, 1, 1)`` does not.
    """
    num_kv = kv_indices[-1] + 1
    return len(kv_indices) % num_kv == 0 and kv_indices == tuple(
        i * num_kv // len(kv_indices) for i in range(len(kv_indices)))


@dataclass(frozen=True)
class HeadSplit:
    """The heads of one tensor-parallel rank and their split over its Ulysses ranks.

    Attributes:
        num_query, num_kv: heads of the model.
        query, kv: the model's heads that this tensor-parallel rank computes.
        ulysses_query, ulysses_kv: for each Ulysses rank the heads that it attends with, counted from the first head in
            ``query`` or ``kv``.
    """

    num_query: int
    num_kv: int
    query: Range
    kv: Range
    ulysses_query: tuple[Range, ...]
    ulysses_kv: tuple[Range, ...]

    @classmethod
    def of(cls, num_query: int, num_kv: int, *, tp: int = 1, tp_rank: int = 0, ulysses: int = 1) -> HeadSplit:
        """Return the split for one tensor-parallel rank; tp must divide the query heads."""
        assert num_query % tp == 0 and num_query % num_kv == 0
        share = num_query // tp
        return cls.of_query_heads((tp_rank * share, (tp_rank + 1) * share), num_query, num_kv, ulysses)

    @classmethod
    def of_query_heads(cls, query: Range, num_query: int, num_kv: int, ulysses: int) -> HeadSplit:
        """Return the split of a range of query heads and of the key/value heads that they use."""
        kv = kv_range(query, num_query, num_kv)
        pieces = split_evenly(query[1] - query[0], ulysses)
        needs = [kv_range((query[0] + a, query[0] + b), num_query, num_kv) for a, b in pieces]
        local = [(a - kv[0], b - kv[0]) if a < b else (0, 0) for a, b in needs]
        return cls(num_query, num_kv, query, kv, tuple(pieces), tuple(local))

    def in_groups(self, count: int) -> list[HeadSplit]:
        """Cut this rank's heads into ``count`` groups and return the split of each group over the Ulysses ranks."""
        first, ulysses = self.query[0], len(self.ulysses_query)
        return [HeadSplit.of_query_heads((first + start, first + stop), self.num_query, self.num_kv, ulysses)
                for start, stop in split_evenly(self.query[1] - first, count)]

    @property
    def kv_is_replicated_over_tp(self) -> bool:
        """Whether every tensor-parallel rank keeps all key/value weights, because tp does not divide their heads."""
        share = self.query[1] - self.query[0]
        return self.num_kv % (self.num_query // share) != 0

    def kv_indices(self, ulysses_rank: int) -> tuple[int, ...]:
        """Return for each query head of a Ulysses rank which of the rank's key/value heads it uses, counted from 0."""
        first, last = self.ulysses_query[ulysses_rank]
        offset = self.kv[0] + self.ulysses_kv[ulysses_rank][0]
        return tuple((self.query[0] + head) * self.num_kv // self.num_query - offset for head in range(first, last))

    @property
    def heads_sent(self) -> int:
        """How many heads of each token a rank distributes: query, key and value heads, those it keeps included.

        A key/value head that several ranks need counts once for each of them.
        """
        return sum(stop - start for start, stop in self.ulysses_query) + 2 * sum(
            stop - start for start, stop in self.ulysses_kv)

    def in_groups_of_each_rank(self, count: int) -> list[HeadSplit]:
        """Cut each Ulysses rank's query heads into ``count`` groups; group i holds part i of every rank.

        A group's key/value heads are those that its query heads use, so they are among those of the rank. Two Ulysses
        ranks, six query heads, two key/value heads, two groups::

            rank                      0           1
            group 0: query heads     0 1         3 4
            group 1: query heads      2           5
            key/value heads           0           1      in both groups
        """
        parts = [split_evenly(stop - start, count) for start, stop in self.ulysses_query]
        groups = []
        for number in range(count):
            query = tuple((start + mine[number][0], start + mine[number][1])
                          for (start, _), mine in zip(self.ulysses_query, parts))
            kv = [kv_range((self.query[0] + a, self.query[0] + b), self.num_query, self.num_kv) for a, b in query]
            groups.append(replace(self, ulysses_query=query, ulysses_kv=tuple(
                (a - self.kv[0], b - self.kv[0]) if a < b else (0, 0) for a, b in kv)))
        return groups

    @property
    def fewest_query_heads(self) -> int:
        """Return the number of query heads of the Ulysses rank that has the fewest."""
        return min(stop - start for start, stop in self.ulysses_query)

    def can_cut_keys(self, count: int) -> bool:
        """Return whether the ``count`` groups of ``in_groups`` together send no more than one exchange of all heads.

        So each rank must have a query head in each group, and no two groups may need the same key/value head, which
        would then be sent twice.
        """
        parts = self.in_groups(count)
        return sum(part.heads_sent for part in parts) == self.heads_sent and all(
            part.fewest_query_heads > 0 for part in parts)
