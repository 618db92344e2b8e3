"""Every token has exactly one owner, in the order the exchanges rely on."""

import itertools

import numpy as np
import pytest

from megatron_sp.layout.tokens import SequenceLayout

DEGREES = [(ring, ulysses) for ring, ulysses in itertools.product((1, 2, 4), (1, 2, 3))]


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ring,ulysses", DEGREES)
def test_every_token_has_one_owner(kind: str, ring: int, ulysses: int) -> None:
    layout = SequenceLayout(96, ring, ulysses, kind)
    owned = np.concatenate([layout.positions(rank) for rank in range(layout.sp)])
    assert sorted(owned) == list(range(96))
    assert all(len(layout.positions(rank)) == layout.local_length for rank in range(layout.sp))


def test_contiguous_ranks_follow_each_other() -> None:
    layout = SequenceLayout(96, ulysses=4)
    assert [layout.ranges(rank) for rank in range(4)] == [((0, 24),), ((24, 48),), ((48, 72),), ((72, 96),)]


def test_zigzag_pairs_an_early_with_a_late_chunk() -> None:
    layout = SequenceLayout(96, ring=2, kind="zigzag")
    assert layout.ranges(0) == ((0, 24), (72, 96))
    assert layout.ranges(1) == ((24, 48), (48, 72))


def test_zigzag_balances_causal_work() -> None:
    layout = SequenceLayout(96, ring=4, kind="zigzag")
    work = [int((layout.positions(rank) + 1).sum()) for rank in range(4)]
    assert len(set(work)) == 1


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ring,ulysses", DEGREES)
def test_ulysses_pieces_concatenate_to_the_ring_member(kind: str, ring: int, ulysses: int) -> None:
    layout = SequenceLayout(96, ring, ulysses, kind)
    for ring_rank in range(ring):
        pieces = [layout.positions(ring_rank * ulysses + piece) for piece in range(ulysses)]
        whole = [np.arange(start, stop) for start, stop in layout.ring_ranges(ring_rank)]
        assert np.array_equal(np.concatenate(pieces), np.concatenate(whole))


@pytest.mark.parametrize("ulysses", [1, 2, 3])
def test_every_chunk_is_shared_by_all_ranks(ulysses: int) -> None:
    layout = SequenceLayout(96, ulysses=ulysses, chunk=24)
    own = [layout.positions(rank).reshape(4, -1) for rank in range(ulysses)]  # [chunk, tokens]
    for chunk in range(4):
        assert np.array_equal(np.concatenate([rank[chunk] for rank in own]), np.arange(24 * chunk, 24 * chunk + 24))
    assert len(layout.ranges(0)) == (1 if ulysses == 1 else 4)
