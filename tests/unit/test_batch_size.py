"""Global batch size, ramp-up, and iterations of a number of samples, compared with values computed by hand."""

from __future__ import annotations

import pytest

from megatron_sp.train.batch_size import BatchSize

#: From 4 by 4 to 16 over 120 samples: 3 steps of 40 samples.
RAMP = BatchSize(full=16, unit=2, ramp=(4, 4, 120))


@pytest.mark.parametrize("consumed, size", [
    (0, 4), (39, 4), (40, 8), (79, 8), (80, 12), (119, 12), (120, 16), (121, 16), (10_000, 16)])
def test_ramp_up(consumed: int, size: int) -> None:
    assert RAMP.at(consumed) == size


def test_ramp_up_does_not_round_in_floating_point() -> None:
    # 7 steps over 49 samples: int(c / (49 / 7)) must be exact at every multiple of 7
    ramp = BatchSize(full=8, unit=1, ramp=(1, 1, 49))
    assert [ramp.at(7 * step) for step in range(8)] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_constant() -> None:
    assert BatchSize(full=8, unit=4).at(10**12) == 8


def test_rounded_down_to_whole_microbatches() -> None:
    assert BatchSize(full=14, unit=4).at(0) == 12
    assert BatchSize(full=14, unit=4, ramp=(6, 4, 100)).at(0) == 4


def test_iterations_drop_a_partial_last_batch() -> None:
    assert BatchSize(full=8, unit=4).iterations(0, 100) == 12
    assert BatchSize(full=8, unit=4).iterations(96, 100) == 0
    assert BatchSize(full=8, unit=4).iterations(80, 100) == 2


def test_iterations_count_the_ramp() -> None:
    # 10 x 4 = 40, 5 x 8 = 80, 4 x 12 = 128 (12 at 116 as well), then 16 each
    assert RAMP.iterations(0, 128 + 3 * 16 + 15) == 10 + 5 + 4 + 3
    assert RAMP.iterations(40, 80) == 5
    assert RAMP.iterations(0, 43) == 10      # the next batch of 8 does not fit
    assert RAMP.samples(10 + 5 + 4 + 3) == 128 + 3 * 16


def test_iterations_and_samples_agree_at_every_point_of_a_ramp() -> None:
    consumed = 0
    for iteration in range(40):
        assert RAMP.samples(iteration) == consumed
        assert RAMP.iterations(0, consumed) == iteration
        consumed += RAMP.at(consumed)
