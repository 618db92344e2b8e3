"""Segments keep what later chunks see, and few chunks at a time."""

import pytest

from megatron_sp.layout.masks.segments import Segments


@pytest.mark.parametrize("count, reach", [(16, 1), (17, 1), (40, 2), (977, 1), (30, 0), (100, 7), (12, 1)])
def test_every_chunk_finds_the_keys_that_it_sees(count: int, reach: int) -> None:
    segments = Segments.of(count, reach)
    kept: set[int] = set()
    most = 0
    for number in range(count - 1):
        assert set(range(max(0, number - reach), number)) <= kept
        kept -= set(segments.freed_by(number))
        kept.add(number)
        most = max(most, len(kept))
    for start in reversed(segments.starts):
        stop = min(start + segments.size, count)
        if start != segments.starts[-1]:
            for number in range(start, stop - 1):
                assert set(range(max(0, number - reach), number)) <= kept
                kept.add(number)
            most = max(most, len(kept))
        for number in reversed(range(start, stop)):
            assert set(range(max(0, number - reach), number)) <= kept
            kept.discard(number)
    assert not kept and most <= segments.most_kept + reach + 1
    assert len(segments.starts) == 1 or 2 * segments.most_kept <= count


def test_short_sequences_and_global_layers_keep_all() -> None:
    assert Segments.of(8, 1).size == 8 and Segments.of(1000, None).most_kept == 999
    assert Segments.of(977, 1).most_kept < 70 and Segments.of(1, None).most_kept == 0
