"""Log line and metrics.jsonl."""

from __future__ import annotations

import contextlib
import math
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_sp.train.checkpoints.state import TrainState
from megatron_sp.train.report.metrics_file import read_metrics
from megatron_sp.train.report.recorder import Recorder
from megatron_sp.train.report.step_report import Interval, StepReport, log_line
from megatron_sp.train.report.timers import Timers
from megatron_sp.train.report.trackers import open_tensorboard, open_wandb
from tests.helpers.configs import tiny_run

CPU = torch.device("cpu")
STEP = StepReport(iteration=8, consumed_samples=64, consumed_tokens=4096, first_sample=56, global_batch_size=8,
                  lm_loss=4.123456, grad_norm=1.2344, learning_rate=1e-4, step_time=0.0123, num_valid=512,
                  loss_scale=1.0)


def interval_of(*steps: StepReport) -> Interval:
    interval = Interval()
    for step in steps:
        interval.add(step)
    return interval


def test_the_line_people_grep() -> None:
    assert log_line(STEP, interval_of(STEP), 100) == (
        " iteration        8/     100 | consumed samples:           64 | elapsed time per iteration (ms): 12.3 | "
        "learning rate: 1.000000E-04 | global batch size:     8 | lm loss: 4.123456E+00 | loss scale: 1.0 | "
        "grad norm: 1.234 | number of skipped iterations:   0 | number of nan iterations:   0 |")


def test_throughput_is_shown_when_asked() -> None:
    speed = {"tokens_per_s": 1234.5, "tflops_per_device": 12.34}
    line = log_line(STEP, interval_of(STEP), 100, speed=speed)
    assert "| throughput per GPU (TFLOP/s/GPU): 12.3 | tokens per second: 1234 | learning rate" in line
    line = log_line(STEP, interval_of(STEP), 100, speed=speed | {"mfu": 0.4127, "hfu": 0.55})
    assert "| tokens per second: 1234 | MFU: 41.3% | HFU: 55.0% | learning rate" in line


def test_speed_is_the_same_for_any_split_of_the_sequence(tmp_path: Path) -> None:
    """Tokens/s of the run; TFLOP/s of a device: sequence-parallel ranks are in the denominator once."""
    model = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --device-peak-tflops 1e-6"
    found = []
    for world, layout in ((1, ""), (2, "--ulysses-size 2"), (2, "--tensor-model-parallel-size 2"), (2, "")):
        run = tiny_run(f"{model} {layout} --recompute-granularity full".split(), world)
        found.append(Recorder(run, CPU, Timers(), TrainState(), is_writer=False).speed(4, 0.5))
    # per sequence of 64, forward: 2 x 64 x (4 x 8 x 8 + 2 x 8 x 32 + 97 x 8) + the causal half of 4 x 8 x 64^2
    layers, output, attention = 2 * 64 * (4 * 8 * 8 + 2 * 8 * 32), 2 * 64 * 97 * 8, 2 * 8 * 64**2
    flops = 3 * (layers + output + attention)
    assert found[0]["tokens_per_s"] == 512
    assert found[0]["tflops_per_device"] == pytest.approx(8 * flops / 1e12)
    assert found[0]["mfu"] == pytest.approx(8 * flops / 1e6)
    last = 2 * 64 * 8 * 32  # recomputation of a layer leaves out its last product, whose result backward does not need
    assert found[0]["hfu"] == pytest.approx(8 * (flops + layers - last + attention) / 1e6)
    recorder = Recorder(run, CPU, Timers(), TrainState(), is_writer=False)
    inside = recorder.speed(4, 0.5, attention_share=0.25)  # documents whose squared lengths sum to a quarter
    assert inside["mfu"] == pytest.approx(8 * (3 * (layers + output + attention / 4)) / 1e6 / 2)
    for other in found[1:]:
        assert other["tokens_per_s"] == 512 and other["mfu"] == pytest.approx(found[0]["mfu"] / 2)


def test_named_validation_sets_are_logged_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = recorder_in(tmp_path)
    recorder.evaluation({"valid": 2.5, "valid/code": 2.0, "valid/books": 3.0}, 4, 32, 2048)
    recorder.close()
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (row["valid_loss"], row["valid_loss/code"], row["valid_loss/books"]) == (2.5, 2.0, 3.0)
    assert row["valid_ppl/code"] == pytest.approx(math.exp(2))
    assert "validation code loss at iteration 4 | lm loss value: 2.000000E+00" in capsys.readouterr().out


def test_the_line_averages_over_the_interval_and_leaves_out_skipped_steps() -> None:
    skipped = replace(STEP, lm_loss=math.inf, skipped=True, step_time=0.0323)
    line = log_line(STEP, interval_of(replace(STEP, lm_loss=2.0), skipped, replace(STEP, lm_loss=3.0)), 100)
    assert "lm loss: 2.500000E+00" in line
    assert "number of skipped iterations:   1" in line
    assert "(ms): 19.0" in line


def test_a_skipped_step_shows_its_finite_loss() -> None:
    """While a dynamic loss scale is still too high, gradients overflow and steps are skipped. The losses are finite."""
    skipped = replace(STEP, skipped=True, grad_norm=math.inf)
    line = log_line(STEP, interval_of(skipped, replace(skipped, lm_loss=4.5)), 100)
    assert "lm loss: 4.311728E+00" in line and "number of skipped iterations:   2" in line
    assert "lm loss: NAN" in log_line(STEP, interval_of(replace(STEP, lm_loss=math.nan, nan=True)), 100)


def test_a_step_without_labels_is_counted_and_has_no_loss(tmp_path: Path) -> None:
    empty = replace(STEP, lm_loss=math.nan, num_valid=0)
    line = log_line(STEP, interval_of(empty, STEP), 100)
    assert "lm loss: 4.123456E+00" in line and line.endswith("| number of iterations without labels:   1 |")
    assert "without labels" not in log_line(STEP, interval_of(STEP), 100)
    recorder = recorder_in(tmp_path)
    recorder.step(empty, 8)
    recorder.evaluation({"valid": math.nan}, 8, 64, 4096)
    recorder.close()
    step, evaluation = read_metrics(tmp_path / "metrics.jsonl")
    assert step["lm_loss"] is None and step["valid_tokens"] == 0 and step["mean_lm_loss"] is None
    assert evaluation["valid_loss"] is None and evaluation["valid_ppl"] is None


def test_statistics_of_the_optimizer_stay_out_of_the_line() -> None:
    step = replace(STEP, extra={"params_norm": 2.0, "optimizer/weight_l2": 3.0})
    line = log_line(step, interval_of(step), 100)
    assert "params norm: 2.000" in line and "optimizer" not in line


def recorder_in(directory: Path, flags: str = "", start: int = 0) -> Recorder:
    run = tiny_run(f"--num-layers 1 --hidden-size 8 --num-attention-heads 1 --save {directory} --save-interval 9 "
                   f"--log-interval 2 {flags}".split())
    return Recorder(run, CPU, Timers(run.logging.timing_log_level, CPU), TrainState(start, 8 * start), is_writer=True)


def test_metrics_hold_the_steps_own_values_in_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = recorder_in(tmp_path)
    for iteration in (1, 2, 3, 4):
        recorder.step(replace(STEP, iteration=iteration, lm_loss=1 / iteration), 4)
    recorder.evaluation({"valid": 2.0, "test": 3.0}, 4, 32, 2048)
    recorder.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [1, 2, 4, 4]      # the first step and every second
    del rows[0]
    assert rows[1]["lm_loss"] == 1 / 4
    assert (rows[1]["mean_over_steps"], rows[1]["mean_lm_loss"]) == (2, pytest.approx((1 / 3 + 1 / 4) / 2))
    assert rows[1]["mean_step_time_ms"] == pytest.approx(12.3) and rows[1]["mean_tokens_per_s"] == 512 / 0.0123
    assert {"iteration", "consumed_samples", "consumed_tokens", "lm_loss", "grad_norm", "learning_rate",
            "global_batch_size", "step_time_ms", "tokens_per_s", "loss_scale", "skipped",
            "peak_memory_bytes"} <= rows[0].keys()
    assert rows[0]["tokens_per_s"] == 512 / 0.0123
    assert rows[2]["valid_loss"] == 2.0 and rows[2]["test_loss"] == 3.0
    assert rows[2]["valid_ppl"] == pytest.approx(math.exp(2))
    out = capsys.readouterr().out
    assert len(re.findall(r"iteration +\d+/ +4 \|", out)) == 3
    assert f"lm loss: {rows[1]['mean_lm_loss']:.6E}" in out
    assert "validation loss at iteration 4 | lm loss value: 2.000000E+00" in out


def test_the_last_step_is_logged_once(tmp_path: Path) -> None:
    """Whether the trainer knows that it is the last, or a signal comes after it was counted."""
    for place, known in ((tmp_path / "known", True), (tmp_path / "unknown", False)):
        recorder = recorder_in(place, "--log-interval 100")
        for iteration in (1, 2, 3):
            recorder.step(replace(STEP, iteration=iteration), 100, is_last=known and iteration == 3)
        assert len(read_metrics(place / "metrics.jsonl")) == 1 + known
        recorder.flush(3, 24, 100)
        recorder.close()
        rows = read_metrics(place / "metrics.jsonl")
        assert [(row["iteration"], row["mean_over_steps"]) for row in rows] == [(1, 1), (3, 2)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="writes to a device that is always full")
def test_a_full_disk_costs_the_log_and_not_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("metrics.jsonl", "progress.txt"):
        (tmp_path / name).symlink_to("/dev/full")
    recorder = recorder_in(tmp_path, "--log-progress")
    for iteration in (1, 2, 3, 4):
        recorder.step(replace(STEP, iteration=iteration), 4)
        recorder.progress("saved")
    recorder.close()
    out = capsys.readouterr().out
    for name in ("metrics.jsonl", "progress.txt"):
        (warning,) = [line for line in out.splitlines() if f"WARNING: {tmp_path / name} cannot be written" in line]
        assert "No space left on device" in warning and "Training goes on" in warning
    with open("/dev/full", "w", buffering=1) as full:      # a log file on the full disk
        monkeypatch.setattr(sys, "stdout", full)
        recorder.say("nobody reads this")
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()


def test_a_rank_that_does_not_write_leaves_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny_run(f"--num-layers 1 --hidden-size 8 --num-attention-heads 1 --save {tmp_path} --save-interval 9 "
                   "--log-interval 1".split())
    recorder = Recorder(run, CPU, Timers(), TrainState(), is_writer=False)
    recorder.step(STEP, 8)
    recorder.evaluation({"valid": 1.0}, 8, 64, 4096)
    recorder.close()
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""




def test_trackers_get_every_metric_also_when_evaluation_and_logging_meet(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points: dict[tuple[str, int], float] = {}
    logged: list[tuple[int, dict[str, float]]] = []

    class Writer:
        def __init__(self, directory: str, **_: object):
            self.close = lambda: None

        def add_scalar(self, name: str, value: float, step: int) -> None:
            points[name, step] = value

    class Wandb(ModuleType):
        id = "x"

        def init(self, **settings: object) -> Wandb:
            assert settings["project"] == "p" and settings["name"] == "n"
            return self

        def log(self, row: dict[str, float], step: int) -> None:
            logged.append((step, row))

        def finish(self, exit_code: int) -> None:
            logged.append((-1, {"exit_code": exit_code}))

    tensorboard = ModuleType("torch.utils.tensorboard")
    tensorboard.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    monkeypatch.setitem(sys.modules, "wandb", Wandb("wandb"))
    recorder = recorder_in(tmp_path, "--tensorboard-dir tb --log-validation-ppl-to-tensorboard --wandb-project p "
                                     "--wandb-exp-name n --log-memory-to-tensorboard --log-timers-to-tensorboard "
                                     "--timing-log-level 1")
    ticks = iter((0, 3, 3, 8, 8, 15, 15, 17))
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    for iteration in (1, 2):
        with recorder.timers("batch"):
            pass
        recorder.step(replace(STEP, iteration=iteration, consumed_samples=8 * iteration), 2)
        with recorder.timers("save", occasional=True):
            pass
    recorder.evaluation({"valid": 2.0}, 2, 16, 1024)
    recorder.flush(2, 16, 2)
    recorder.close()
    assert (points["batch-time", 1], points["batch-time", 2]) == (3, 7)      # each step's own
    assert points["save-time", 2] == 2 and ("save-time", 1) not in points
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row.get("times_ms") for row in rows[:2]] == [{"batch": 3000}, {"batch": 7000, "save": 5000}]
    assert rows[3]["times_at_end_ms"] == {"save": 2000}
    assert points["lm loss", 1] == points["lm loss", 2] == points["lm loss vs samples", 16] == 4.123456
    assert points["lm loss validation vs samples", 16] == points["lm loss validation", 2] == 2.0
    assert points["lm loss validation ppl", 2] == pytest.approx(math.exp(2))
    names = {name for name, _ in points}
    assert {"learning-rate", "grad-norm", "batch-size", "loss-scale", "peak-memory-bytes"} <= names
    assert [step for step, _ in logged] == [1, 2, 2, 2, -1]
    assert logged[1][1]["lm_loss"] == 4.123456 and logged[2][1]["valid_loss"] == 2.0


@pytest.mark.parametrize("flags, iteration, first_shown_again", [
    ("", 0, (None, None)), ("", 5, (6, 41)), ("--skip-train --eval-iters 1", 5, (None, None))])
def test_tensorboard_hides_the_points_of_steps_that_are_made_again(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, iteration: int,
        first_shown_again: tuple[int | None, int | None]) -> None:
    """Points are hidden in all curves of a directory, so those by samples need a directory of their own."""
    hidden_from: dict[str, int | None] = {}
    points: list[tuple[str, str, int]] = []

    class Writer:
        def __init__(self, directory: str, *, max_queue: int, purge_step: int | None):
            assert directory not in hidden_from
            self.directory, hidden_from[directory] = directory, purge_step

        def add_scalar(self, name: str, value: float, step: int) -> None:
            points.append((self.directory, name, step))

    tensorboard = ModuleType("torch.utils.tensorboard")
    tensorboard.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    run = tiny_run("--num-layers 1 --hidden-size 8 --num-attention-heads 1 --tensorboard-dir".split()
                   + [str(tmp_path), *flags.split()])
    opened = open_tensorboard(run, TrainState(iteration, 8 * iteration))
    assert opened is not None
    opened.add({"lm loss": 2.0}, 9, 72)
    assert hidden_from == dict(zip((str(tmp_path), str(tmp_path / "samples")), first_shown_again))
    assert points == [(str(tmp_path), "lm loss", 9), (str(tmp_path / "samples"), "lm loss vs samples", 72)]


@pytest.mark.parametrize("flags, more", [
    ("", set()), ("--timing-log-level 1", set()), ("--log-world-size-to-tensorboard", {"world-size"}),
    ("--log-throughput", {"throughput", "tokens-per-s"}),
    ("--timing-log-level 1 --log-timers-to-tensorboard", {"batch-time"})])
def test_tensorboard_gets_throughput_and_times_when_asked(tmp_path: Path, flags: str, more: set[str]) -> None:
    points: dict[str, float] = {}

    class Writer:
        def add(self, values: dict[str, float], iteration: int, consumed_samples: int) -> None:
            points.update(values)

    recorder = recorder_in(tmp_path, flags)
    recorder.tensorboard = Writer()  # type: ignore[assignment]
    with recorder.timers("batch"):
        pass
    recorder.step(STEP, 8)
    assert points.keys() == {
        "lm loss", "learning-rate", "grad-norm", "batch-size", "iteration-time", "loss-scale", "skipped", "nan",
        "consumed-tokens", *more}
    if "throughput" in more:
        assert points["tokens-per-s"] == 512 / 0.0123
        assert points["throughput"] == recorder.speed(8, 0.0123)["tflops_per_device"] > 0
    points.clear()
    recorder.step(replace(STEP, lm_loss=math.nan, num_valid=0), 8)
    assert "lm loss" not in points and "learning-rate" in points


def test_a_resumed_run_continues_on_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for wandb that gives each new run another id."""
    asked: list[str | None] = []

    def init(*, id: str | None, resume: str, **_: Any) -> SimpleNamespace:
        assert resume == "allow"
        asked.append(id)
        return SimpleNamespace(id=id or f"run{len(asked)}")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    run = tiny_run(f"--num-layers 1 --hidden-size 8 --num-attention-heads 1 --save {tmp_path}/save --save-interval 9 "
                   f"--wandb-project p --wandb-save-dir {tmp_path}/files".split())
    for iteration in (0, 4, 8, 0, 4):
        open_wandb(run, TrainState(iteration))
    open_wandb(replace(run, checkpoint=replace(run.checkpoint, save="")), TrainState(4))
    assert asked == [None, "run1", "run1", None, "run4", None]
