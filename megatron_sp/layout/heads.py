"""Which head is where: query and key/value heads over tp and Ulysses ranks.

Pure arithmetic. Query head i takes key/value head ``i * g // n``; no alignment of groups with
ranks is assumed, so any head counts work: heads that do not divide are split unevenly, and a
key/value head needed by several ranks is sent to each of them (its gradients are summed).
"""

from __future__ import annotations

from dataclasses import dataclass

Range = tuple[int, int]


def split_evenly(count: int, parts: int) -> list[Range]:
    """Cut ``count`` things into ``parts`` runs whose sizes differ by at most one, larger ones first."""
    size, extra = divmod(count, parts)
    bounds = [part * size + min(part, extra) for part in range(parts + 1)]
    return list(zip(bounds, bounds[1:]))


def kv_range(query: Range, num_query: int, num_kv: int) -> Range:
    """Key/value heads that a run of query heads needs."""
    start, stop = query
    if start == stop:
        return 0, 0
    return start * num_kv // num_query, (stop - 1) * num_kv // num_query + 1


@dataclass(frozen=True)
class HeadSplit:
    """The heads of one tp rank and their split over the Ulysses ranks.

    ``query`` and ``kv`` are the global heads this tp rank computes; ``ulysses_query[p]`` and
    ``ulysses_kv[p]`` are the heads that Ulysses rank p attends with, counted within them.
    """

    num_query: int
    num_kv: int
    query: Range
    kv: Range
    ulysses_query: tuple[Range, ...]
    ulysses_kv: tuple[Range, ...]

    @classmethod
    def of(cls, num_query: int, num_kv: int, *, tp: int = 1, tp_rank: int = 0, ulysses: int = 1) -> HeadSplit:
        """The split for one tp rank; tp must divide the query heads."""
        assert num_query % tp == 0 and num_query % num_kv == 0
        share = num_query // tp
        return cls.over((tp_rank * share, (tp_rank + 1) * share), num_query, num_kv, ulysses)

    @classmethod
    def over(cls, query: Range, num_query: int, num_kv: int, ulysses: int) -> HeadSplit:
        """The split of a run of query heads, with the key/value heads they need."""
        kv = kv_range(query, num_query, num_kv)
        pieces = split_evenly(query[1] - query[0], ulysses)
        needs = [kv_range((query[0] + a, query[0] + b), num_query, num_kv) for a, b in pieces]
        local = [(a - kv[0], b - kv[0]) if a < b else (0, 0) for a, b in needs]
        return cls(num_query, num_kv, query, kv, tuple(pieces), tuple(local))

    def in_groups(self, count: int) -> list[HeadSplit]:
        """This rank's heads cut into runs, each split over the Ulysses ranks by itself."""
        first = self.query[0]
        return [HeadSplit.over((first + start, first + stop), self.num_query, self.num_kv, len(self.ulysses_query))
                for start, stop in split_evenly(self.query[1] - first, count)]

    @property
    def kv_is_replicated_over_tp(self) -> bool:
        """Whether tp does not divide the key/value heads, so that their weights are kept whole."""
        share = self.query[1] - self.query[0]
        return self.num_kv % (self.num_query // share) != 0

    def groups(self, ulysses_rank: int) -> tuple[int, ...]:
        """For each query head of a Ulysses rank, the index of its key/value head on that rank."""
        first, last = self.ulysses_query[ulysses_rank]
        offset = self.kv[0] + self.ulysses_kv[ulysses_rank][0]
        return tuple((self.query[0] + head) * self.num_kv // self.num_query - offset for head in range(first, last))

    @property
    def heads_sent(self) -> int:
        """Query, key and value heads that a rank sends of each of its tokens, itself included."""
        return sum(stop - start for start, stop in self.ulysses_query) + 2 * sum(
            stop - start for start, stop in self.ulysses_kv)

    def free_groups(self, wanted: int) -> int:
        """The most groups up to ``wanted`` that give each rank a head and send no key/value head twice for it."""
        def is_free(count: int) -> bool:
            parts = self.in_groups(count)
            return sum(part.heads_sent for part in parts) == self.heads_sent and all(
                start < stop for part in parts for start, stop in part.ulysses_query)

        return max(count for count in range(1, wanted + 1) if count == 1 or is_free(count))
