"""The training loop's decisions on losses that are not finite, fp16 overflows, evaluation, signals and the end.

All ranks must decide alike.
"""

from __future__ import annotations

import gc
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_sp.checkpoint.files import complete_iterations
from megatron_sp.checkpoint.state_file import read_state
from megatron_sp.data.batch import Microbatch
from megatron_sp.data.token_files.token_writer import IndexedDatasetBuilder
from megatron_sp.train import garbage
from megatron_sp.train.chunk_recurrence import Part
from megatron_sp.train.forward_backward import Engine
from megatron_sp.train.operation_runner import OperationRunner
from megatron_sp.train.report.metrics_file import read_metrics
from tests.helpers.configs import STYLES
from tests.helpers.spawn import run_ranks
from tests.helpers.training import full_tensors, steps, train, train_and_tell

LLAMA = STYLES["llama"].replace("--num-query-groups", "--num-key-value-heads")


def spoil_loss(rank: int | None, calls: range, factor: float) -> None:
    """Multiply the loss by a factor in these calls (counted from 0) on one rank or all."""
    original, count = OperationRunner._call, [0]

    def spoiled(self: OperationRunner, batch: Microbatch, part: Part,
                received: torch.Tensor | None = None) -> torch.Tensor:
        count[0] += 1
        loss = original(self, batch, part, received)
        return loss * factor if rank in (None, dist.get_rank()) and count[0] - 1 in calls else loss

    OperationRunner._call = spoiled  # type: ignore[method-assign]


def train_with_spoiled_loss(flags: str, rank: int | None, calls: range, factor: float) -> str:
    spoil_loss(rank, calls, factor)
    return train(flags)


def output_with_spoiled_loss(flags: str, rank: int | None, calls: range, factor: float) -> str:
    """Return what the run prints, and then the error that ends it."""
    spoil_loss(rank, calls, factor)
    return "".join(train_and_tell(flags))


@pytest.mark.parametrize("layout", ["--ulysses-size 2", "--tensor-model-parallel-size 2"])
def test_a_nan_on_one_rank_stops_all_in_the_same_step(tmp_path: Path, layout: str) -> None:
    flags = f"{LLAMA} {layout} --save {tmp_path} --save-interval 1"
    # A step has 4 microbatches, so call 9 (from 0) is the second microbatch of step 3.
    errors = run_ranks(train_with_spoiled_loss, 2, flags, 1, range(9, 10), float("nan"))
    assert errors[0] == errors[1]
    for words in ("TrainingError", "iteration 3", "not finite on rank 1 (microbatch 2)", "--no-check-for-nan"):
        assert words in errors[0]
    assert complete_iterations(tmp_path) == [1, 2]


def test_without_the_check_a_bad_step_is_left_out(tmp_path: Path) -> None:
    flags = f"{LLAMA} --ulysses-size 2 --no-check-for-nan-in-loss-and-grad --save {tmp_path} --save-interval 1"
    output, _ = run_ranks(output_with_spoiled_loss, 2, flags, 1, range(9, 10), float("nan"))
    (warning,) = [line for line in output.splitlines() if "not finite on" in line]
    assert "WARNING: iteration 3: loss nan" in warning and "not finite on rank 1 (microbatch 2)" in warning
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["nan"] for row in rows] == [False, False, True] + [False] * 5
    assert rows[2]["lm_loss"] is None
    before, after = (full_tensors(tmp_path / f"iter_000000{step}") for step in (2, 3))
    assert all(torch.equal(before[name], after[name]) for name in before)
    counters = read_state(tmp_path / "iter_0000008")["train"]
    assert (counters["consumed_samples"], counters["scheduler_samples"], counters["nan_iterations"]) == (32, 28, 1)


def train_with_tracker(flags: str, readable: bool) -> list[int]:
    """Return the exit codes that the run gave to Weights & Biases after a wrong loss or an error while reading data."""
    import sys
    from types import ModuleType, SimpleNamespace

    from megatron_sp.errors import DataError
    from megatron_sp.train import setup

    def no_readers(*_: object) -> Any:
        raise DataError("damaged")

    codes: list[int] = []
    wandb = ModuleType("wandb")
    wandb.init = lambda **_: SimpleNamespace(  # type: ignore[attr-defined]
        id="one",
        log=lambda row, step: None, finish=lambda exit_code: codes.append(exit_code))
    sys.modules["wandb"] = wandb
    if readable:
        assert "iteration 5" in train_with_spoiled_loss(flags, 1, range(9, 10), float("nan"))
    else:
        setup.build_readers = no_readers  # type: ignore[assignment]
        assert train(flags) == "DataError: damaged"
    return codes


def test_an_error_leaves_profile_and_logs_behind(tmp_path: Path) -> None:
    flags = (f"{LLAMA} --save {tmp_path} --save-interval 100 --log-interval 100 --wandb-project p --profile "
             "--profile-step-start 2 --profile-step-end 10")
    assert run_ranks(train_with_tracker, 2, flags, True) == [[1], []]     # each rank has 2 microbatches a step
    (trace,) = (tmp_path / "profile").iterdir()
    assert trace.name == "rank0_steps_3-5.json.gz"
    first, row = read_metrics(tmp_path / "metrics.jsonl")
    assert first["iteration"] == 1 and row["iteration"] == 5 and row["nan"] and row["lm_loss"] is None
    assert run_ranks(train_with_tracker, 1, flags, False) == [[1]]


def train_with_stand_ins(flags: str) -> tuple[str, dict[str, list[int]], list[int]]:
    """Train; return TensorBoard's points (name: steps) and the iterations after which full garbage collections ran."""
    from megatron_sp.train.report import recorder as observe
    from megatron_sp.train.trainer import Trainer

    points: dict[str, list[int]] = {}
    collected: list[int] = []
    trainers: list[Trainer] = []

    class Writer:
        def add(self, values: dict[str, float], iteration: int, consumed_samples: int) -> None:
            for name in values:
                points.setdefault(name, []).append(iteration)

        def close(self) -> None:
            pass

    class Collector(ModuleType):
        disable = enable = staticmethod(gc.disable)
        isenabled = staticmethod(gc.isenabled)

        def collect(self, generation: int = 2) -> None:
            if generation == 2:     # a full collection; evaluations collect only the youngest generation
                collected.append(trainers[0].state.iteration)

    fit = Trainer.fit

    def remembered(trainer: Trainer) -> None:
        trainers.append(trainer)
        fit(trainer)

    observe.open_tensorboard = lambda *_: Writer()  # type: ignore[assignment]
    garbage.gc = Collector("gc")
    Trainer.fit = remembered  # type: ignore
    return train(flags), points, collected


def test_times_and_speed_reach_tensorboard_and_garbage_is_collected_when_due(tmp_path: Path) -> None:
    flags = (f"{LLAMA} --train-iters 5 --manual-gc --manual-gc-interval 2 --save {tmp_path} --save-interval 99 "
             "--timing-log-level 1 --log-timers-to-tensorboard --log-throughput")
    ((error, points, collected),) = run_ranks(train_with_stand_ins, 1, flags)
    assert error == ""
    for name in ("batch-time", "forward-backward-time", "optimizer-time", "throughput", "tokens-per-s"):
        assert points[name] == [1, 2, 3, 4, 5]
    assert collected == [0, 2, 4]


def test_fp16_finds_its_scale_and_the_schedule_waits(tmp_path: Path) -> None:
    """The run is also stopped and resumed while the scale is still too high."""
    flags = (f"{LLAMA} --fp16 --ulysses-size 2 --train-iters 20 --lr-decay-style constant --lr-warmup-iters 10 "
             "--save-interval 100")
    straight, halves = tmp_path / "straight", tmp_path / "halves"
    assert run_ranks(train, 2, f"{flags} --save {straight}") == ["", ""]
    assert run_ranks(train, 2, f"{flags} --save {halves} --exit-interval 3") == ["", ""]
    assert run_ranks(train, 2, f"{flags} --save {halves} --load {halves}") == ["", ""]
    rows = read_metrics(straight / "metrics.jsonl")
    skipped = [row["skipped"] for row in rows]
    first = skipped.index(False)
    assert 3 < first < 12 and sum(skipped[first:]) <= 1
    assert [row["loss_scale"] for row in rows[:3]] == [2.0**24, 2.0**24, 2.0**23]      # the first overflow is tolerated
    updates = [row["iteration"] - 1 - sum(skipped[:row["iteration"] - 1]) for row in rows]
    assert [row["learning_rate"] for row in rows] == pytest.approx([min(1e-4 * count, 1e-3) for count in updates])
    assert [row["first_sample"] for row in rows] == list(range(0, 80, 4))
    assert all(4.0 < row["lm_loss"] < 5.0 and 0.1 < row["grad_norm"] < 10 for row in rows if not row["skipped"])
    names = ("iteration", "lm_loss", "grad_norm", "loss_scale", "skipped", "learning_rate", "first_sample")
    assert steps(halves, *names) == steps(straight, *names)


def test_fp16_after_bf16_starts_its_own_scale(tmp_path: Path) -> None:
    flags = f"{LLAMA} --save {tmp_path} --save-interval 100 --lr-decay-style constant"
    assert run_ranks(train, 1, f"{flags} --bf16 --train-iters 2") == [""]
    assert run_ranks(train, 1, f"{flags} --fp16 --initial-loss-scale 4096 --load {tmp_path} --train-iters 4") == [""]
    assert steps(tmp_path, "iteration", "loss_scale") == [(1, 1.0), (2, 1.0), (3, 4096.0), (4, 4096.0)]


def test_endless_overflow_stops_with_advice_and_is_saved(tmp_path: Path) -> None:
    flags = (f"{LLAMA} --fp16 --initial-loss-scale 4 --min-loss-scale 1 --hysteresis 1 --train-iters 100 "
             f"--save {tmp_path} --save-interval 100")
    errors = run_ranks(train_with_spoiled_loss, 2, flags, None, range(4, 1000), float("inf"))
    assert errors[0] == errors[1]
    assert "the last 30 steps changed nothing" in errors[0] and "--bf16" in errors[0] and "loss scale 1" in errors[0]
    # Each rank has 2 microbatches a step, so the first wrong call is in step 3.
    assert complete_iterations(tmp_path) == [32]
    assert read_state(tmp_path / "iter_0000032")["train"]["skipped_iterations"] == 30


def test_from_the_default_scale_30_overflows_in_a_row_stop_too(tmp_path: Path) -> None:
    """Only gradients overflow. The run looks up their origin once, when it gives up. A resumed run tries again."""
    flags = f"{LLAMA} --fp16 --ulysses-size 2 --train-iters 100 --save {tmp_path} --save-interval 100"
    outputs = run_ranks(output_with_overflowing_gradients, 2, flags)
    assert "TrainingError: the last 30 steps changed nothing" in outputs[0] and "loss scale 1." in outputs[0]
    assert "The last one is iteration 30" in outputs[0] and "gradients are not on rank 0 (first" in outputs[0]
    assert outputs[0].count("gradients are not on") == 2      # in the log, and in the error
    assert complete_iterations(tmp_path) == [30]
    run_ranks(output_with_overflowing_gradients, 2, f"{flags} --load {tmp_path}")
    assert complete_iterations(tmp_path) == [30, 60]


def output_with_overflowing_gradients(flags: str) -> str:
    """Return the output of a run in which all gradients are infinite at any loss scale, and all losses are finite."""
    from megatron_sp.train import train_step

    original = train_step.require_all_gradients

    def spoiled(model: torch.nn.Module) -> None:
        original(model)
        next(p.grad for p in model.parameters() if p.grad is not None).fill_(float("inf"))

    train_step.require_all_gradients = spoiled  # type: ignore[assignment]
    return "".join(train_and_tell(flags))


def test_a_nan_under_fp16_is_named_at_once(tmp_path: Path) -> None:
    """The loss carries no loss scale, so a loss that is not finite does not mean that the scale is too high."""
    flags = f"{LLAMA} --fp16 --initial-loss-scale 1024 --ulysses-size 2 --save {tmp_path} --save-interval 100"
    output, _ = run_ranks(output_with_spoiled_loss, 2, flags, 1, range(9, 10), float("nan"))
    assert "WARNING: iteration 3: loss nan" in output and "not finite on rank 1 (microbatch 2)" in output
    assert output.count("WARNING") == 1


def test_an_overflow_of_a_static_scale_names_it(tmp_path: Path) -> None:
    flags = f"{LLAMA} --fp16 --loss-scale 1e12 --save {tmp_path} --save-interval 100"
    (output,) = run_ranks(output_with_spoiled_loss, 1, flags, None, range(0), 1.0)
    assert "gradients are not on rank 0" in output and "lower --loss-scale than 1e+12" in output


def test_a_run_without_any_update_ends_with_a_warning(tmp_path: Path) -> None:
    flags = f"{LLAMA} --fp16 --train-iters 3 --save {tmp_path} --save-interval 100"
    (output,) = run_ranks(output_with_spoiled_loss, 1, flags, None, range(0), 1.0)
    assert "WARNING: none of the 3 steps of this run changed the weights" in output
    assert "went from 1.67772e+07 to 4.1943e+06" in output and "--initial-loss-scale" in output


def test_evaluation_is_the_same_in_every_layout_and_changes_nothing(tmp_path: Path) -> None:
    """A save right after an evaluation works too, in ZeRO stages that keep weights gathered after a forward."""
    # The learning rate of step 1 is 0, so at iteration 1 all layouts still have the same weights.
    common = f"{LLAMA} --hidden-dropout 0.1 --lr 1e-2 --lr-warmup-iters 2 --save-interval 2 --train-iters 4"
    found: dict[tuple[str, str], Path] = {}
    first_losses: list[float] = []
    for world, layout in ((1, ""), (2, "--ulysses-size 2 --zero-stage 3"), (2, "--zero-stage 2"),
                          (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
                          (2, "--pipeline-model-parallel-size 2")):
        for evaluating in ("--eval-iters 0", "--eval-iters 2 --eval-interval 1"):
            directory = tmp_path / f"{layout}{evaluating}".replace(" ", "")
            assert run_ranks(train, world, f"{common} {layout} {evaluating} --save {directory}") == [""] * world
            found[layout, evaluating[:14]] = directory
        quiet, busy = found[layout, "--eval-iters 0"], found[layout, "--eval-iters 2"]
        assert steps(quiet, "lm_loss", "grad_norm") == steps(busy, "lm_loss", "grad_norm")
        for name in ("iter_0000002", "iter_0000004"):       # an evaluation comes right before the first save
            left, right = full_tensors(quiet / name), full_tensors(busy / name)
            assert left.keys() == right.keys()
            assert all(torch.equal(left[key], right[key]) for key in left)
        rows = [row for row in read_metrics(busy / "metrics.jsonl") if "valid_loss" in row]
        assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
        assert "test_loss" in rows[-1] and "test_loss" not in rows[0]
        assert len({row["valid_loss"] for row in rows}) == 4
        first_losses.append(rows[0]["valid_loss"])
    assert first_losses == pytest.approx([first_losses[0]] * len(first_losses), rel=1e-6)


def output_with_a_kernel_that_failed() -> str:
    from megatron_sp.model import kernels

    choose = kernels.choose_kernels
    kernels.choose_kernels = lambda *arguments: replace(  # type: ignore[assignment]
        choose(*arguments), warnings=("a kernel is slow",))
    return train_and_tell(f"{LLAMA} --train-iters 1")[0]


def test_the_log_warns_of_kernels_that_cannot_be_used() -> None:
    (output,) = run_ranks(output_with_a_kernel_that_failed, 1)
    assert output.count("WARNING: a kernel is slow") == 1


def test_data_without_any_label_has_no_loss_and_changes_no_weight(tmp_path: Path) -> None:
    """Train on documents of only end-of-document tokens, with the flag that masks the labels after such tokens."""
    random = np.random.default_rng(1)
    for name, make in (("text", lambda: random.integers(0, 90, size=60)), ("empty", lambda: np.full(60, 96))):
        with IndexedDatasetBuilder(tmp_path / name, np.uint16) as builder:
            for _ in range(40):
                builder.add_document(make())
            builder.finalize()
    flags = (f"{LLAMA} --eod-mask-loss --train-iters 2 --eval-iters 2 --eval-interval 1 --save-interval 1 "
             f"--ulysses-size 2 --train-data-path {tmp_path}/{{}} "
             f"--valid-data-path bad={tmp_path}/empty good={tmp_path}/text --test-data-path {tmp_path}/empty "
             f"--save {tmp_path}/save_{{}}")
    for kind in ("text", "empty"):
        output, _ = run_ranks(output_on_data, 2, flags.format(kind, kind))
        assert output.count("WARNING: no token of the valid/bad set's 2 batches has a label") == 1
        assert "test loss at iteration 2 | lm loss value: NAN" in output
        rows = read_metrics(tmp_path / f"save_{kind}" / "metrics.jsonl")
        for row in (row for row in rows if "valid_loss" in row):
            assert row["valid_loss/bad"] is None and row["valid_loss"] == row["valid_loss/good"] > 4
        assert rows[-1]["test_loss"] is None and rows[-1]["test_ppl"] is None
    trained = [row for row in rows if "lm_loss" in row]
    assert [(row["lm_loss"], row["valid_tokens"], row["skipped"], row["nan"]) for row in trained] == [
        (None, 0, False, False)] * 2
    assert output.count("has a label, because --eod-mask-loss masks all of them") == 1
    assert "number of iterations without labels:   1 |" in output
    assert "WARNING: none of the 2 steps of this run changed the weights, because no token" in output
    before, after = (full_tensors(tmp_path / "save_empty" / f"iter_000000{step}") for step in (1, 2))
    assert all(torch.equal(before[name], after[name]) for name in before)
    counters = read_state(tmp_path / "save_empty" / "iter_0000002")["train"]
    assert (counters["unlabelled_iterations"], counters["scheduler_samples"], counters["consumed_samples"]) == (2, 0, 8)


def output_on_data(flags: str) -> str:
    """Return what a run on real data files prints."""
    from tests.helpers import training

    training.TRAINING = [word for word in training.TRAINING if word != "--mock-data"]
    output, error = train_and_tell(flags)
    assert error == "", error
    return output


def kill_when_evaluating(flags: str, rank: int) -> str:
    """Send this process SIGTERM in the second evaluation batch of one rank."""
    import contextlib
    import io
    import time

    from megatron_sp.config.load import load_run
    from megatron_sp.runtime import Environment
    from megatron_sp.train.setup import pretrain
    from megatron_sp.train.signals import StopSignals
    from tests.helpers.configs import TRAINING

    original, count = Engine.evaluate, [0]

    def evaluate(self: Engine, microbatches: Any) -> Any:
        count[0] += 1
        if count[0] == 2 and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, microbatches)

    Engine.evaluate = evaluate  # type: ignore[method-assign]
    run, _ = load_run([*TRAINING, *flags.split()], dist.get_world_size())
    me, output = dist.get_rank(), io.StringIO()
    with contextlib.redirect_stdout(output):
        pretrain(run, Environment(me, dist.get_world_size(), me), StopSignals((signal.SIGTERM,)),
                 started=time.monotonic())
    return output.getvalue()


def test_a_signal_to_one_rank_during_evaluation_saves_and_ends_all(tmp_path: Path) -> None:
    flags = f"{LLAMA} --eval-iters 1000 --eval-interval 3 --save {tmp_path} --save-interval 100"
    output, silent = run_ranks(kill_when_evaluating, 2, flags, 1)
    assert silent == ""
    assert complete_iterations(tmp_path) == [3]
    # the last step is logged when the run ends
    assert [row["iteration"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 3]
    assert "exiting at iteration 3: asked to by a signal to another rank" in output
    assert "validation loss" not in output


def train_with_unequal_memory(flags: str) -> str:
    from megatron_sp.train.report import recorder as observe

    observe.peak_memory = lambda device: 1000 + dist.get_rank()
    return train(flags)


def test_memory_is_the_largest_ranks_and_the_last_save_is_timed(tmp_path: Path) -> None:
    flags = f"{LLAMA} --save {tmp_path} --save-interval 4 --log-interval 3 --timing-log-level 1"
    assert run_ranks(train_with_unequal_memory, 2, flags) == ["", ""]
    *logged, end = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["iteration"], row["peak_memory_bytes"]) for row in logged] == [(step, 1001) for step in (1, 3, 6, 8)]
    assert [{"save", "datasets"} & row["times_ms"].keys() for row in logged] == [{"datasets"}, set(), {"save"}, set()]
    assert end["iteration"] == 8 and end["times_at_end_ms"].keys() == {"save"}


@pytest.mark.parametrize("flags, last", [
    ("--train-iters 8 --exit-interval 3 --save-interval 100", 3),
    ("--train-iters 8 --save-interval 100", 8),
    ("--train-iters 8 --train-tokens 1300 --save-interval 100", 6),      # 256 tokens a step
    ("--train-iters 8 --exit-duration-in-mins 0.00001 --save-interval 100", 1),
])
def test_ends(tmp_path: Path, flags: str, last: int) -> None:
    assert run_ranks(train, 2, f"{LLAMA} {flags} --save {tmp_path}") == ["", ""]
    assert complete_iterations(tmp_path) == [last]
    assert steps(tmp_path, "iteration")[-1] == (last,)
