"""What a resume says when the command line and the checkpoint differ."""

from __future__ import annotations

from dataclasses import fields

import pytest

from megatron_sp.checkpoint import compare
from megatron_sp.config.cli.options import flag_names
from megatron_sp.config.schema import Run
from megatron_sp.config.serialize import to_dict
from megatron_sp.errors import CheckpointError
from megatron_sp.train.checkpoints.resume import SOURCES, choose_schedule
from megatron_sp.train.schedule import Schedule
from tests.helpers.configs import STYLES, tiny_run


def run_of(flags: str) -> Run:
    return tiny_run([*STYLES["llama"].split(), *flags.split()])


def state_of(run: Run) -> dict:
    return {"schedule": Schedule.of(run).to_dict(), "config": to_dict(run)}


def test_every_part_of_the_schedule_has_words_and_flags() -> None:
    assert SOURCES.keys() == {field.name for field in fields(Schedule)}
    assert {key for _, keys in SOURCES.values() for key in keys} <= flag_names().keys()


def test_another_schedule_names_the_flags_that_were_typed() -> None:
    mine = run_of("--lr 2e-3 --lr-decay-iters 20 --lr-warmup-iters 2")
    saved = state_of(run_of("--lr 1e-3 --train-iters 10 --lr-warmup-fraction 0.5"))
    with pytest.raises(CheckpointError) as raised:
        choose_schedule(Schedule.of(mine), saved, mine)
    text = str(raised.value)
    for words in ("the peak learning rate is 0.002 here (--lr 0.002) and 0.001 in the checkpoint (--lr 0.001)",
                  "the samples of warm-up are 8 here (--lr-warmup-iters 2, no --lr-warmup-fraction,",
                  "the samples of warm-up and decay are 80 here (--lr-decay-iters 20, --train-iters 8) and 40 in the "
                  "checkpoint (no --lr-decay-iters, --train-iters 10)",
                  "--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"):
        assert words in text, text
    assert "peak_" not in text and "decay_samples" not in text


def test_flags_decide_between_two_schedules() -> None:
    saved = state_of(run_of("--lr 1e-3"))
    for flag, lr in (("--override-opt_param-scheduler", 2e-3), ("--use-checkpoint-opt_param-scheduler", 1e-3)):
        mine = run_of(f"--lr 2e-3 {flag}")
        assert choose_schedule(Schedule.of(mine), saved, mine).peak == lr


@pytest.mark.parametrize("flags, words", [
    ("--dataloader-type cyclic", "--dataloader-type is cyclic, was single in the checkpoint; the order of the data"),
    ("--eod-mask-loss", "--eod-mask-loss is on, was off"), ("--adam-beta1 0.8", "--adam-beta1 is 0.8, was 0.9"),
    ("--adam-beta2 0.9", "--adam-beta2 is 0.9, was 0.999"), ("--adam-eps 1e-6", "--adam-eps is 1e-06, was 1e-08"),
    ("--clip-grad 2", "--clip-grad is 2.0, was 1.0"), ("--optimizer sgd --sgd-momentum 0.5", "--sgd-momentum is 0.5"),
    ("--seq-length 32", "--seq-length is 32, was 64 in the checkpoint; the run continues to count samples")])
def test_a_resume_warns_of_what_changes_the_training(flags: str, words: str) -> None:
    saved = to_dict(run_of("--optimizer sgd" if "sgd" in flags else ""))
    lines = compare.differences_in_words(saved, run_of(flags))
    assert any(words in line for line in lines), lines
    assert compare.differences_in_words(saved, run_of("--optimizer sgd" if "sgd" in flags else "")) == []
