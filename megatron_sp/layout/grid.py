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
    """The position of every rank on the five axes, and the ranks of every group."""

    def __init__(self, parallel: Parallel):
        self.sizes = {"pp": parallel.pp, "dp": parallel.dp, "ring": parallel.ring, "ulysses": parallel.ulysses,
                      "tp": parallel.tp}
        self.world_size = math.prod(self.sizes.values())
        assert self.world_size == parallel.world_size, (self.sizes, parallel.world_size)

    def axes(self, name: str) -> tuple[str, ...]:
        """Return the axes that a view joins, from outer to inner; an axis is returned as the only one."""
        return VIEWS.get(name, (name,))

    def size(self, name: str) -> int:
        return math.prod(self.sizes[axis] for axis in self.axes(name))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of a global rank on each axis."""
        place = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, self.sizes[axis])
        return place

    def rank_at(self, place: dict[str, int]) -> int:
        """Return the global rank with these positions on the axes."""
        rank = 0
        for axis in AXES:
            rank = rank * self.sizes[axis] + place[axis]
        return rank

    def rank_in(self, name: str, rank: int) -> int:
        """Return the position of a global rank along an axis or view, from 0."""
        place, index = self.coordinates(rank), 0
        for axis in self.axes(name):
            index = index * self.sizes[axis] + place[axis]
        return index

    def ranks(self, name: str, rank: int) -> list[int]:
        """Return the ranks, in order, that have the positions of ``rank`` on all axes outside an axis or view."""
        place, axes = self.coordinates(rank), self.axes(name)
        positions = itertools.product(*(range(self.sizes[axis]) for axis in axes))
        return [self.rank_at(place | dict(zip(axes, position))) for position in positions]

    def pipeline_ends(self, rank: int) -> list[int]:
        """Return the first and the last rank of the pipeline that ``rank`` belongs to."""
        pipeline = self.ranks("pp", rank)
        return [pipeline[0], pipeline[-1]]

    def partition(self, name: str) -> list[list[int]]:
        """Return all groups along an axis or view; every rank is in exactly one of them."""
        groups = {tuple(self.ranks(name, rank)) for rank in range(self.world_size)}
        return [list(group) for group in sorted(groups)]
