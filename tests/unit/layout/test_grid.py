"""Rank arithmetic on the five axes."""

import itertools

from megatron_sp.config.schema import Parallel
from megatron_sp.layout.grid import AXES, VIEWS, Grid

PARALLEL = Parallel(pp=2, tp=2, ulysses=3, ring=2, world_size=48)


def test_dp_is_what_is_left() -> None:
    assert PARALLEL.dp == 2
    assert Grid(PARALLEL).world_size == 48


def test_tp_is_innermost_and_pp_outermost() -> None:
    grid = Grid(PARALLEL)
    assert grid.ranks("tp", 0) == [0, 1]
    assert grid.ranks("ulysses", 0) == [0, 2, 4]
    assert grid.ranks("ring", 0) == [0, 6]
    assert grid.ranks("dp", 0) == [0, 12]
    assert grid.ranks("pp", 0) == [0, 24]


def test_coordinates_and_ranks_are_inverse() -> None:
    grid = Grid(PARALLEL)
    spots = itertools.product(*(range(grid.sizes[axis]) for axis in AXES))
    for rank, spot in enumerate(spots):
        place = dict(zip(AXES, spot))
        assert grid.coordinates(rank) == place and grid.rank_at(place) == rank


def test_groups_partition_the_world() -> None:
    grid = Grid(PARALLEL)
    for name in (*AXES, *VIEWS):
        groups = grid.partition(name)
        assert sorted(itertools.chain(*groups)) == list(range(48))
        assert all(len(group) == grid.size(name) for group in groups)
        for group in groups:
            assert [grid.rank_in(name, rank) for rank in group] == list(range(len(group)))


def test_ranks_of_one_sequence_differ_only_in_ring_and_ulysses() -> None:
    grid = Grid(PARALLEL)
    assert grid.ranks("sp", 13) == [13, 15, 17, 19, 21, 23]
