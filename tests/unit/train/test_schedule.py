"""Learning rate and weight decay, compared with values computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatron_sp.config.load import load_run
from megatron_sp.train.schedule import Schedule

MODEL = ("--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 32 --micro-batch-size 1 "
         "--global-batch-size 4 --mock-data --tokenizer-type NullTokenizer --vocab-size 9").split()

#: 100 iterations of 4 samples, warm-up over 10 of them, from 1 down to 0.1.
BASE = Schedule(style="linear", peak=1.0, minimum=0.1, warmup_start=0.0, warmup_samples=40.0, decay_samples=400.0,
                final_style="exponential", final_samples=0.0, weight_decay_style="constant", weight_decay_start=0.01,
                weight_decay_end=0.01, weight_decay_samples=400.0)


def schedule_of(flags: str) -> Schedule:
    run, _ = load_run([*MODEL, *flags.split()], 1)
    return Schedule.of(run)


def test_warm_up_is_linear_from_its_start_and_includes_its_end() -> None:
    assert BASE.lr(0) == 0.0
    assert BASE.lr(4) == 0.1
    assert BASE.lr(40) == 1.0
    assert replace(BASE, warmup_start=0.5).lr(20) == 0.75


@pytest.mark.parametrize("style, expected", [
    ("linear", {40: 1.0, 130: 0.775, 220: 0.55, 400: 0.1, 401: 0.1, 10_000: 0.1}),
    ("cosine", {40: 1.0, 130: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)), 220: 0.55, 400: 0.1, 401: 0.1}),
    ("constant", {4: 0.1, 40: 1.0, 41: 1.0, 400: 1.0, 10_000: 1.0}),
    # peak * sqrt(40 / n), never below the minimum
    ("inverse-square-root", {40: 1.0, 160: 0.5, 250: 0.4, 400: math.sqrt(0.1), 401: 0.1}),
])
def test_decay_styles(style: str, expected: dict[int, float]) -> None:
    schedule = replace(BASE, style=style)
    assert {samples: schedule.lr(samples) for samples in expected} == pytest.approx(expected, rel=1e-12)


def test_inverse_square_root_respects_the_minimum_and_needs_no_warm_up() -> None:
    schedule = replace(BASE, style="inverse-square-root", warmup_samples=0.0, minimum=0.2)
    assert schedule.lr(0) == 1.0
    assert schedule.lr(4) == 0.5
    assert schedule.lr(100) == 0.2


@pytest.mark.parametrize("final_style, middle", [
    ("linear", 0.5), ("cosine", 0.5), ("exponential", 2 * 0.5**0.5 - 1), ("minus_sqrt", 1 - math.sqrt(0.5))])
def test_wsd_is_flat_and_falls_at_the_end(final_style: str, middle: float) -> None:
    schedule = replace(BASE, style="WSD", final_style=final_style, final_samples=100.0)
    assert schedule.lr(20) == 0.5
    assert [schedule.lr(41), schedule.lr(200), schedule.lr(300)] == [1.0, 1.0, 1.0]
    assert schedule.lr(350) == pytest.approx(0.1 + 0.9 * middle, rel=1e-12)
    assert schedule.lr(400) == pytest.approx(0.1, abs=1e-12)
    assert schedule.lr(500) == 0.1


@pytest.mark.parametrize("style, at_100", [
    ("linear", 0.1 + 0.2 * 0.25), ("cosine", 0.1 + 0.2 * 0.5 * (math.cos(math.pi * 0.75) + 1)), ("constant", 0.3)])
def test_weight_decay_moves_from_start_to_end_over_the_run(style: str, at_100: float) -> None:
    schedule = replace(BASE, weight_decay_style=style, weight_decay_start=0.1, weight_decay_end=0.3)
    assert schedule.weight_decay(100) == pytest.approx(at_100, rel=1e-12)
    assert schedule.weight_decay(400) == pytest.approx(0.3, rel=1e-12)
    assert schedule.weight_decay(401) == 0.3


@pytest.mark.parametrize("flags, warmup, decay", [
    # iterations count as global batches of 4 samples
    ("--train-iters 100 --lr 1 --lr-warmup-iters 10", 40, 400),
    ("--train-iters 100 --lr 1 --lr-decay-iters 50 --lr-warmup-fraction 0.1", 20, 200),
    ("--train-samples 400 --lr 1 --lr-warmup-samples 12", 12, 400),
    ("--train-samples 400 --lr 1 --lr-decay-samples 1000 --lr-warmup-fraction 0.01", 10, 1000),
    # tokens count as 1/32 of a sample
    ("--train-samples 400 --lr 1 --lr-decay-tokens 3200 --lr-warmup-tokens 640", 20, 100),
    ("--train-iters 100 --lr 1 --lr-decay-tokens 3216 --lr-warmup-iters 10", 40, 100.5),
    ("--train-iters 100 --lr 1", 0, 400),
])
def test_units(flags: str, warmup: float, decay: float) -> None:
    schedule = schedule_of(flags)
    assert (schedule.warmup_samples, schedule.decay_samples) == (warmup, decay)


def test_wsd_units() -> None:
    assert schedule_of("--train-iters 100 --lr 1 --lr-decay-style WSD --lr-wsd-decay-iters 5").final_samples == 20
    assert schedule_of("--train-samples 400 --lr 1 --lr-decay-style WSD --lr-wsd-decay-samples 5").final_samples == 5


def test_the_weight_decay_horizon_is_the_run_not_the_decay() -> None:
    schedule = schedule_of("--train-iters 100 --lr 1 --lr-decay-iters 50 --weight-decay 0.1 --start-weight-decay 0 "
                           "--end-weight-decay 0.2 --weight-decay-incr-style linear")
    assert schedule.weight_decay(200) == pytest.approx(0.1)


def test_apply_leaves_groups_without_decay_alone() -> None:
    class Groups:
        param_groups = [{"decay": True}, {"decay": False}]

    assert BASE.apply(Groups(), 40) == 1.0
    assert Groups.param_groups == [{"decay": True, "lr": 1.0, "weight_decay": 0.01},
                                   {"decay": False, "lr": 1.0, "weight_decay": 0.0}]


def test_only_differences_with_an_effect_count() -> None:
    assert BASE.differences(BASE) == []
    assert BASE.differences(replace(BASE, final_samples=9.0, weight_decay_samples=1.0)) == []
    assert BASE.differences(replace(BASE, decay_samples=9.0, peak=2.0)) == ["peak", "decay_samples"]
    constant = replace(BASE, style="constant")
    assert constant.differences(replace(constant, decay_samples=9.0, minimum=0.0)) == []


def test_it_survives_json() -> None:
    assert Schedule.from_dict(BASE.to_dict()) == BASE
