"""Batch sizes, rates and weight decay of whole runs, compared with values computed by hand, also over a resume."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_sp.data.token_files.token_writer import IndexedDatasetBuilder
from megatron_sp.train.report.metrics_file import read_metrics
from megatron_sp.train.schedule import Schedule
from megatron_sp.train.setup import layout_in_words
from tests.helpers import training
from tests.helpers.configs import STYLES, tiny_run
from tests.helpers.spawn import run_ranks
from tests.helpers.training import full_tensors, steps, train

TINY = ("--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --position-embedding-type rope "
        "--save-interval 100")
SAME = ("iteration", "lm_loss", "grad_norm", "learning_rate", "global_batch_size", "first_sample", "consumed_tokens")


def train_without(flags: str, without: str) -> str:
    """Train as ``train`` does, but without some of its default flags."""
    training.TRAINING = " ".join(training.TRAINING).replace(without, "").split()
    return training.train(flags)


def straight_and_halves(directory: Path, flags: str, stop: int, world: int = 1, without: str = "") -> list[dict]:
    """Train once without a stop, and once stopped and resumed. Compare metrics and weights, and return the metrics."""
    for save_flags in (f"--save {directory}/straight", f"--save {directory}/halves --exit-interval {stop}",
                       f"--save {directory}/halves --load {directory}/halves"):
        assert run_ranks(train_without, world, f"{TINY} {flags} {save_flags}", without) == [""] * world
    assert steps(directory / "halves", *SAME) == steps(directory / "straight", *SAME)
    last = (directory / "straight" / "latest_checkpointed_iteration.txt").read_text().strip()
    left, right = (full_tensors(directory / name / f"iter_{int(last):07d}") for name in ("straight", "halves"))
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
    return [row for row in read_metrics(directory / "straight" / "metrics.jsonl") if "lm_loss" in row]


def test_steps_of_the_batch_size_over_a_resume(tmp_path: Path) -> None:
    """Samples have 32 tokens. Steps have 2 samples, 4 from 192 tokens (6 samples) on, 6 from 512 (16 samples) on."""
    rows = straight_and_halves(
        tmp_path, "--train-iters 8 --step-batch-size-schedule 0:2 0.192K:4 512:6 --lr-warmup-iters 4 --min-lr 1e-4 "
                  "--ulysses-size 2", stop=4, world=2, without="--global-batch-size 4 ")
    assert [row["global_batch_size"] for row in rows] == [2, 2, 2, 4, 4, 4, 6, 6]
    assert [row["first_sample"] for row in rows] == [0, 2, 4, 6, 10, 14, 18, 24]
    # The 4 iterations of warm-up read 10 samples, the 8 iterations of the run read 30.
    expected = [1e-3 * samples / 10 for samples in (0, 2, 4, 6, 10)]
    expected += [1e-4 + 9e-4 * (30 - samples) / 20 for samples in (14, 18, 24)]
    assert [row["learning_rate"] for row in rows] == pytest.approx(expected)


def test_decreased_batches_train_and_evaluate(tmp_path: Path) -> None:
    """2 ranks read microbatches of 2, so a batch must be a multiple of 4. All batches, also of evaluations, get 4."""
    flags = (f"{TINY} --global-batch-size 6 --micro-batch-size 2 --decrease-batch-size-if-needed --eval-iters 1 "
             f"--eval-interval 4 --save {tmp_path}")
    assert run_ranks(train, 2, flags) == ["", ""]
    assert steps(tmp_path, "global_batch_size", "learning_rate") == [
        (4, pytest.approx(1e-3 * (32 - 4 * step) / 32)) for step in range(8)]
    assert "valid_loss" in read_metrics(tmp_path / "metrics.jsonl")[-1]


@pytest.mark.parametrize("style, height", [
    ("linear", lambda r: 1 - r), ("exponential", lambda r: 2 * 0.5**r - 1), ("minus_sqrt", lambda r: 1 - math.sqrt(r)),
    ("cosine", lambda r: 0.5 * (1 + math.cos(math.pi * r)))])
def test_wsd_over_a_resume_in_its_final_decay(tmp_path: Path, style: str, height: Callable[[float], float]) -> None:
    rows = straight_and_halves(tmp_path, f"--lr-decay-style WSD --lr-wsd-decay-iters 4 --lr-wsd-decay-style {style} "
                                         "--min-lr 1e-4 --lr-warmup-iters 2 --global-batch-size 2", stop=6)
    expected = [0, 5e-4, 1e-3, 1e-3, 1e-3, *(1e-4 + 9e-4 * height(r) for r in (0.25, 0.5, 0.75))]
    assert [row["learning_rate"] for row in rows] == pytest.approx(expected)


def test_warm_up_in_samples_hands_over_to_a_decay_in_tokens(tmp_path: Path) -> None:
    """The rate rises over 6 samples (192 tokens), falls to the minimum at 14 samples (448 tokens), and stays there."""
    flags = (f"{TINY} --train-samples 20 --global-batch-size 2 --lr-warmup-samples 6 --lr-decay-tokens 448 "
             f"--min-lr 2e-4 --save {tmp_path}")
    assert run_ranks(train_without, 1, flags, "--train-iters 8 ") == [""]
    rates = [row[0] for row in steps(tmp_path, "learning_rate")]
    warm = [1e-3 * samples / 6 for samples in (0, 2, 4, 6)]
    down = [2e-4 + 8e-4 * (448 - 32 * samples) / (448 - 192) for samples in (8, 10, 12, 14)]
    assert rates == pytest.approx([*warm, *down, 2e-4, 2e-4])


def decays(flags: str) -> list[tuple[float, float]]:
    """Return samples and weight decay of each step of a run on this rank."""
    seen: list[tuple[float, float]] = []
    original = Schedule.apply

    def apply(self: Schedule, optimizer: torch.optim.Optimizer, samples: float) -> float:
        lr = original(self, optimizer, samples)
        (decayed,) = {group["weight_decay"] for group in optimizer.param_groups if group["decay"]}
        assert all(group["weight_decay"] == 0 for group in optimizer.param_groups if not group["decay"])
        seen.append((samples, decayed))
        return lr

    Schedule.apply = apply  # type: ignore[method-assign, assignment]
    assert train(flags) == ""
    return seen


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_the_first_step_after_a_resume_has_its_weight_decay(tmp_path: Path, style: str) -> None:
    flags = (f"{TINY} --global-batch-size 2 --start-weight-decay 0.1 --end-weight-decay 0.5 --weight-decay-incr-style "
             f"{style} --save {tmp_path}")
    (first,) = run_ranks(decays, 1, f"{flags} --exit-interval 3")
    (second,) = run_ranks(decays, 1, f"{flags} --load {tmp_path}")
    ratios = [samples / 16 for samples in range(0, 16, 2)]
    if style == "cosine":
        ratios = [0.5 * (1 - math.cos(math.pi * ratio)) for ratio in ratios]
    assert len(first) == 3
    assert [value for _, value in first + second] == pytest.approx([0.1 + 0.4 * ratio for ratio in ratios])


def test_several_validation_sets(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    for name, top in (("train", 90), ("code", 90), ("books", 5)):
        with IndexedDatasetBuilder(tmp_path / name, np.uint16) as builder:
            for _ in range(20):
                builder.add_document(random.integers(0, top, size=60))
            builder.finalize()
    flags = (f"{TINY} --global-batch-size 2 --eval-iters 2 --eval-interval 4 --train-data-path {tmp_path}/train "
             f"--valid-data-path code={tmp_path}/code books=0.5 {tmp_path}/books 0.5 {tmp_path}/code "
             f"--save {tmp_path}/save")
    assert run_ranks(train_without, 2, flags, "--mock-data ") == ["", ""]
    rows = [row for row in read_metrics(tmp_path / "save" / "metrics.jsonl") if "valid_loss" in row]
    assert [row["iteration"] for row in rows] == [4, 8]
    for row in rows:
        losses = [row["valid_loss/code"], row["valid_loss/books"]]
        assert row["valid_loss"] == pytest.approx(sum(losses) / 2) and losses[0] != losses[1]
        assert row["valid_ppl/code"] == pytest.approx(math.exp(losses[0]))


def test_what_the_start_says_of_data_parallelism() -> None:
    flags = [*STYLES["gpt2"].split(), "--tensor-model-parallel-size", "2", "--ulysses-size", "2"]
    assert layout_in_words(tiny_run(flags, 8)) == (
        "data parallel 2 = 8 / (tensor 2 x ulysses 2), ZeRO stage 0; global batch 4 = micro-batch 1 x data parallel 2 "
        "x 2 microbatches")
    assert layout_in_words(tiny_run(STYLES["gpt2"].split(), 1)).startswith("data parallel 1, ZeRO stage 0")


@pytest.mark.parametrize("flags, rate", [
    ("--lr-decay-style cosine", lambda s: 1e-4 + 4.5e-4 * (math.cos(math.pi * (s - 4) / 12) + 1)),
    ("--lr-decay-style inverse-square-root", lambda s: 1e-3 * math.sqrt(4 / s)),
    ("--lr-decay-style constant", lambda s: 1e-3),
    ("--lr-decay-style linear --lr-decay-tokens 384", lambda s: max(1e-4, 1e-4 + 9e-4 * (12 - s) / 8)),
    ("--lr-decay-style linear --train-tokens 448", lambda s: 1e-4 + 9e-4 * (16 - s) / 12)])
def test_decay_over_a_resume(tmp_path: Path, flags: str, rate: Callable[[float], float]) -> None:
    """2 samples of 32 tokens a step: a warm-up of 128 tokens is 4 samples, 8 iterations are 16, 448 tokens are 14."""
    rows = straight_and_halves(tmp_path, f"{flags} --min-lr 1e-4 --lr-warmup-tokens 128 --global-batch-size 2", stop=5)
    samples = range(6, 14 if "--train-tokens" in flags else 16, 2)
    assert [row["learning_rate"] for row in rows] == pytest.approx([0, 5e-4, 1e-3, *map(rate, samples)])
