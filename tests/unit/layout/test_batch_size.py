"""Global batch size, ramp-up, and iterations of a number of samples, compared with values computed by hand."""

from __future__ import annotations

import pytest

from megatron_sp.config.load import load_run
from megatron_sp.layout.batch_size import BatchSize

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


# --- --step-batch-size-schedule --------------------------------------------------------------------

def stepped(flags: str, world: int = 1) -> BatchSize:
    base = ("--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 32 --micro-batch-size 1 --lr 1 "
            "--mock-data --tokenizer-type NullTokenizer --vocab-size 9")
    return BatchSize.of(load_run([*base.split(), *flags.split()], world)[0])


def test_steps_come_at_their_numbers_of_tokens() -> None:
    # 320 tokens are 10 samples; 1K tokens are 31.25 samples: the first batch that starts after them
    steps = stepped("--train-iters 9 --step-batch-size-schedule 0:2 320:4 1K:6")
    assert steps.size_steps() == [(0, 2), (10, 4), (32, 6)]
    assert [steps.at(consumed) for consumed in (0, 9, 10, 31, 32, 10**9)] == [2, 2, 4, 4, 6, 6]
    # 5 x 2 = 10, 6 x 4 = 24 (4 at 30 as well), then 6 each
    assert steps.iterations(0, 34 + 2 * 6 + 5) == 5 + 6 + 2
    assert steps.samples(5 + 6 + 2) == 34 + 12
    assert steps.samples(3, consumed_samples=30) == 4 + 6 + 6
    assert steps.last == 6


def test_a_schedule_of_steps_may_fall() -> None:
    steps = BatchSize(full=2, unit=2, steps=((0, 8), (16, 2)))
    assert [steps.at(consumed) for consumed in (0, 8, 16, 18)] == [8, 8, 2, 2]
    assert steps.iterations(0, 20) == 4 and steps.samples(4) == 20


def test_a_step_that_no_batch_starts_in_is_passed_over() -> None:
    steps = BatchSize(full=8, unit=1, steps=((0, 8), (9, 2), (11, 8)))
    assert [steps.samples(count) for count in range(4)] == [0, 8, 16, 24]      # 16 is past the step of 2
    assert steps.iterations(0, 24) == 3


def test_iterations_and_samples_agree_at_every_point_of_a_schedule() -> None:
    steps = BatchSize(full=6, unit=1, steps=((0, 2), (10, 4), (32, 6)))
    consumed = 0
    for iteration in range(30):
        assert steps.samples(iteration) == consumed
        assert steps.iterations(0, consumed) == iteration
        assert steps.samples(30 - iteration, consumed_samples=consumed) == steps.samples(30) - consumed
        consumed += steps.at(consumed)


def test_decreased_sizes_count_everywhere() -> None:
    flags = "--train-iters 10 --decrease-batch-size-if-needed --micro-batch-size 4"
    assert stepped(f"{flags} --global-batch-size 14").samples(10) == 120
    steps = stepped(f"{flags} --step-batch-size-schedule 0:6 640:14")
    assert steps.size_steps() == [(0, 4), (20, 12)] and steps.last == 12
    ramp = stepped("--train-samples 200 --decrease-batch-size-if-needed --micro-batch-size 4 --global-batch-size 14 "
                   "--rampup-batch-size 6 4 100")
    assert ramp.size_steps() == [(0, 4), (50, 8), (100, 12)]
