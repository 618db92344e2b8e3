"""Rank arithmetic: where each global rank lies on the five axes, and which ranks form a group.

Axes from outer to inner: ``pp, dp, ring, ulysses, tp``. The innermost axis communicates most, so its ranks are
neighbours. Views join axes: ``sp`` = ring x ulysses (ranks that share a sequence), ``fsdp`` = dp x ring x ulysses
(ranks that hold the same part of the model), ``world`` = all. Needs no processes and no torch.
"""

from __future__ import annotations

import itertools
import math

from megatron_sp.config.schema import Parallel

AXES = ("pp", "dp", "ring", "ulysses", "tp")
VIEWS = {"sp": ("ring", "ulysses"), "fsdp": ("dp", "ring", "ulysses"), "world": AXES}


class Grid:
    """Rank arithmetic on the five axes; needs no processes."""

    def __init__(self, parallel: Parallel):
        self.sizes = {"pp": parallel.pp, "dp": parallel.dp, "ring": parallel.ring, "ulysses": parallel.ulysses,
                      "tp": parallel.tp}
        self.world_size = math.prod(self.sizes.values())
        assert self.world_size == parallel.world_size, (self.sizes, parallel.world_size)

    def axes(self, name: str) -> tuple[str, ...]:
        """The axes behind an axis or a view, outer to inner."""
        return VIEWS.get(name, (name,))

    def size(self, name: str) -> int:
        return math.prod(self.sizes[axis] for axis in self.axes(name))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of a global rank on each axis."""
        place = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, self.sizes[axis])
        return place

    def rank_at(self, place: dict[str, int]) -> int:
        """Global rank at a position on each axis."""
        rank = 0
        for axis in AXES:
            rank = rank * self.sizes[axis] + place[axis]
        return rank

    def rank_in(self, name: str, rank: int) -> int:
        """Position of a global rank within an axis or view."""
        place, index = self.coordinates(rank), 0
        for axis in self.axes(name):
            index = index * self.sizes[axis] + place[axis]
        return index

    def ranks(self, name: str, rank: int) -> list[int]:
        """Global ranks that differ from ``rank`` only along an axis or view, in order."""
        place, axes = self.coordinates(rank), self.axes(name)
        spots = itertools.product(*(range(self.sizes[axis]) for axis in axes))
        return [self.rank_at(place | dict(zip(axes, spot))) for spot in spots]

    def ends(self, rank: int) -> list[int]:
        """The ranks at both ends of this rank's pipeline."""
        column = self.ranks("pp", rank)
        return [column[0], column[-1]]

    def partition(self, name: str) -> list[list[int]]:
        """All groups of an axis or view; together they hold every rank once."""
        groups = {tuple(self.ranks(name, rank)) for rank in range(self.world_size)}
        return [list(group) for group in sorted(groups)]
