"""Trainings whose sequences grow: resumed anywhere, on another layout in each phase, and refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_sp.train.report.metrics_file import read_metrics
from tests.helpers.configs import STYLES
from tests.helpers.spawn import run_ranks
from tests.helpers.training import full_tensors, steps, train, train_and_tell

#: Steps of 4 x 64 = 256 tokens: 3 steps of 16-token sequences, 2 of 32, and 3 of 64.
GROWS = (f"{STYLES['llama']} --seq-length-schedule 0:16 600:32 1.2K:64 --save-interval 100 --lr-warmup-iters 2 "
         "--hidden-dropout 0.1")
SAME = ("iteration", "lm_loss", "grad_norm", "learning_rate", "seq_length", "global_batch_size", "first_sample",
        "consumed_samples", "consumed_tokens")


def straight(directory: Path, flags: str = "") -> Path:
    """Train all phases in one process, and return the directory of the run."""
    assert run_ranks(train, 1, f"{GROWS} --save {directory}/straight {flags}") == [""]
    return directory / "straight"


def assert_close(one: Path, other: Path) -> None:
    """Compare the steps and the last weights of two runs in different layouts."""
    assert steps(one, *SAME[3:]) == steps(other, *SAME[3:])
    for mine, theirs in zip(steps(one, "lm_loss", "grad_norm"), steps(other, "lm_loss", "grad_norm"), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    left, right = (full_tensors(path / "iter_0000008") for path in (one, other))
    for name in left:
        if name.startswith("model"):
            torch.testing.assert_close(left[name], right[name], rtol=1e-3, atol=1e-5)


def test_a_run_that_is_stopped_after_every_step_is_the_same(tmp_path: Path) -> None:
    whole = straight(tmp_path, "--eval-iters 1 --eval-interval 4")
    flags = f"{GROWS} --eval-iters 1 --eval-interval 4 --save {tmp_path}/halves --exit-interval 1"
    assert run_ranks(train, 1, flags) == [""]
    for _ in range(7):
        assert run_ranks(train, 1, f"{flags} --load {tmp_path}/halves") == [""]
    assert steps(tmp_path / "halves", *SAME) == steps(whole, *SAME)
    rows = steps(whole, "seq_length", "global_batch_size", "first_sample", "consumed_samples", "consumed_tokens")
    assert rows == [(16, 16, 0, 4, 256), (16, 16, 16, 8, 512), (16, 16, 32, 12, 768), (32, 8, 24, 16, 1024),
                    (32, 8, 32, 20, 1280), (64, 4, 20, 24, 1536), (64, 4, 24, 28, 1792), (64, 4, 28, 32, 2048)]
    assert sum("valid_loss" in row for row in read_metrics(whole / "metrics.jsonl")) == 2
    left, right = (full_tensors(path / "iter_0000008") for path in (whole, tmp_path / "halves"))
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert (whole / "iter_0000003").is_dir() and (whole / "iter_0000005").is_dir()     # the ends of the phases


def test_each_phase_has_a_layout_of_its_own(tmp_path: Path) -> None:
    """Data parallelism with large microbatches, then Ulysses with ZeRO 3 and chunks, then tensor parallelism."""
    save, said = tmp_path / "phases", []
    layouts = ("--micro-batch-size 8", "--ulysses-size 2 --zero-stage 3 --sequence-chunk-size 16",
               "--tensor-model-parallel-size 2 --sequence-parallel")
    for number, layout in enumerate(layouts, start=1):
        outcomes = run_ranks(train_and_tell, 2, f"{GROWS} --save {save} --load {save} --seq-length-phase {number} "
                                                f"{layout}")
        assert [error for _, error in outcomes] == ["", ""]
        said.append(outcomes[0][0])
    assert_close(save, straight(tmp_path))
    assert f"phase 1 of --seq-length-schedule is finished; continue with the same flags, --load {save} and " \
           "--seq-length-phase 2" in said[0]
    assert "phase 3 of 3: sequences of 64 tokens, 4 in a step, from sample 20 (samples of 64 tokens)" in said[2]


@pytest.mark.parametrize("layout", [
    "--pipeline-model-parallel-size 2 --sequence-chunk-size 32",  # more than a sequence of the first phase
    *(pytest.param(layout, marks=pytest.mark.slow) for layout in (
        "--pipeline-model-parallel-size 2", "--ulysses-size 2 --zero-stage 2 --sequence-chunk-size 32", "--ring-size 2",
        "--micro-batch-size 2"))])
def test_one_layout_trains_all_phases(tmp_path: Path, layout: str) -> None:
    assert run_ranks(train, 2, f"{GROWS} --save {tmp_path}/layout {layout}") == ["", ""]
    assert_close(tmp_path / "layout", straight(tmp_path))


@pytest.mark.slow
def test_one_phase_is_the_training_without_a_schedule(tmp_path: Path) -> None:
    one = GROWS.replace("0:16 600:32 1.2K:64", "0:64")
    plain = GROWS.replace("--seq-length-schedule 0:16 600:32 1.2K:64", "")
    for name, flags in (("one", one), ("plain", plain)):
        assert run_ranks(train, 1, f"{flags} --save {tmp_path}/{name}") == [""]
    same = [name for name in SAME if name != "seq_length"]
    assert steps(tmp_path / "one", *same) == steps(tmp_path / "plain", *same)


@pytest.mark.slow
def test_what_does_not_continue_a_schedule_is_refused(tmp_path: Path) -> None:
    begun, plain = tmp_path / "begun", tmp_path / "plain"
    assert run_ranks(train, 1, f"{GROWS} --save {begun} --exit-interval 2") == [""]
    assert run_ranks(train, 1, f"{GROWS.partition('--seq-length-schedule')[0]} --save {plain} --exit-interval 2 "
                               "--save-interval 2 --lr-warmup-iters 2") == [""]
    changed = GROWS.replace("600:32", "900:32")
    wrong = {
        f"{GROWS} --load {plain}": "without --seq-length-schedule, so it does not say which text",
        f"{plain_of(GROWS)} --load {begun}": "is in a phase of --seq-length-schedule 0:16 600:32 1.2K:64 with",
        f"{GROWS} --load {begun} --seq-length-phase 2": "is in phase 1; say --seq-length-phase 1",
        f"{GROWS} --seq-length-phase 2": "the training starts with phase 1; say --seq-length-phase 1, or give --load",
        f"{changed} --load {begun}": "was to end after 12 samples, and with these flags would end after 16",
        f"{GROWS.replace('0:16', '0:8')} --load {begun}": "sequences of 16 tokens, which --seq-length-schedule 0:8",
        f"{GROWS.replace(':64', ':96')} --seq-length 96 --load {begun}": "was trained with samples of 64 tokens"}
    for flags, problem in wrong.items():
        (said,) = run_ranks(train, 1, flags)
        assert problem in said and said.startswith("CheckpointError"), said
    longer = GROWS.replace("1.2K:64", "2.4K:64")      # a later phase may move
    for flags in (f"{longer} --load {begun} --override-opt-param-scheduler", f"{GROWS} --load {plain} --finetune"):
        assert run_ranks(train, 1, f"{flags} --exit-interval 1") == [""]


def plain_of(flags: str) -> str:
    return flags.replace("--seq-length-schedule 0:16 600:32 1.2K:64", "")
