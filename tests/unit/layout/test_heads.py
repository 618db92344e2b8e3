"""Head ownership for any head counts."""

import itertools

import pytest

from megatron_sp.layout.heads import HeadSplit, split_evenly

COUNTS = [(8, 8), (8, 2), (8, 1), (6, 6), (6, 3), (6, 2), (12, 4), (30, 10)]


def cases() -> list[tuple[int, int, int, int]]:
    degrees = itertools.product((1, 2, 3), (1, 2, 3, 4))
    return [(n, g, tp, ulysses) for (n, g), (tp, ulysses) in itertools.product(COUNTS, degrees)
            if n % tp == 0 and n // tp >= ulysses]


def test_sizes_differ_by_at_most_one() -> None:
    assert split_evenly(7, 3) == [(0, 3), (3, 5), (5, 7)]


@pytest.mark.parametrize("n,g,tp,ulysses", cases())
def test_each_query_head_once_with_its_own_kv_head(n: int, g: int, tp: int, ulysses: int) -> None:
    seen = []
    for tp_rank in range(tp):
        heads = HeadSplit.of(n, g, tp=tp, tp_rank=tp_rank, ulysses=ulysses)
        for rank in range(ulysses):
            first, last = heads.ulysses_query[rank]
            kv_first = heads.kv[0] + heads.ulysses_kv[rank][0]
            for head, local_kv in zip(range(first, last), heads.kv_indices(rank), strict=True):
                seen.append(heads.query[0] + head)
                assert kv_first + local_kv == seen[-1] * g // n
                assert local_kv < heads.ulysses_kv[rank][1] - heads.ulysses_kv[rank][0]
    assert seen == list(range(n))


def test_kv_weights_are_replicated_only_when_tp_does_not_divide_them() -> None:
    assert not HeadSplit.of(8, 2, tp=2).kv_is_replicated_over_tp
    assert HeadSplit.of(8, 2, tp=4).kv_is_replicated_over_tp
    assert HeadSplit.of(6, 3, tp=2).kv_is_replicated_over_tp
