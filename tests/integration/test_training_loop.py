"""pretrain_gpt.py as users start it: plain and under torchrun; signals, kills, ends, trackers."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_sp.checkpoint.files import complete_iterations
from megatron_sp.checkpoint.state_file import read_state
from megatron_sp.train.report.metrics_file import read_metrics
from tests.helpers.configs import STYLES, TRAINING
from tests.integration.programs import TORCHRUN

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(ROOT / "pretrain_gpt.py")
LLAMA = STYLES["llama"].replace("--num-query-groups", "--num-key-value-heads").split()
FLAGS = [*TRAINING, *LLAMA, "--log-interval", "1"]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return kept | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def start(directory: Path, flags: str, launcher: list[str] | None = None) -> subprocess.Popen[str]:
    base = " ".join(FLAGS)
    if "--train-samples" in flags:
        base = base.replace("--train-iters 8 ", "")
    command = [*(launcher or [sys.executable]), PROGRAM, *base.split(), *flags.split()]
    return subprocess.Popen(command, cwd=directory, env=environment(), text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT)


def run(directory: Path, flags: str, launcher: list[str] | None = None) -> tuple[int, str]:
    """Run a training to its end and return its exit code and output."""
    process = start(directory, flags, launcher)
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def wait_for(path: Path, iteration: int) -> None:
    """Wait until the metrics file has a row of this iteration or a later one."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.exists() and any(row["iteration"] >= iteration for row in read_metrics(path)):
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} never reached iteration {iteration}")


def test_a_plain_run_leaves_everything_in_its_place(tmp_path: Path) -> None:
    code, output = run(tmp_path, "--save out --save-interval 3 --eval-iters 1 --eval-interval 4 --log-throughput "
                                 "--log-progress --log-params-norm --log-num-zeros-in-grad --timing-log-level 1")
    assert code == 0, output
    lines = re.findall(r"iteration +\d+/ +8 \| consumed samples: .* \| throughput per GPU \(TFLOP/s/GPU\): ", output)
    assert len(lines) == 8
    assert output.count("configuration:") == 1 and "model.ffn_hidden_size" in output
    assert json.loads((tmp_path / "out" / "config.json").read_text())["train"]["train_iters"] == 8
    assert complete_iterations(tmp_path / "out") == [3, 6, 8]      # the last step is saved once
    assert output.count("saved out/iter_0000008") == 1
    assert "test loss at iteration 8" in output and "validation loss at iteration 4" in output
    assert "forward-backward:" in output
    assert len((tmp_path / "out" / "progress.txt").read_text().splitlines()) == 4
    rows = [row for row in read_metrics(tmp_path / "out" / "metrics.jsonl") if "lm_loss" in row]
    assert all(row["params_norm"] > 0 and row["num_zeros"] >= 0 for row in rows)
    assert [row["first_sample"] for row in rows] == [0, 4, 8, 12, 16, 20, 24, 28]


def test_without_save_nothing_is_written_and_the_log_says_so(tmp_path: Path) -> None:
    code, output = run(tmp_path, "--train-iters 1")
    assert code == 0 and output.count("no --save: neither metrics.jsonl nor config.json nor a checkpoint") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_flag_is_reported_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    process = subprocess.run([sys.executable, PROGRAM, *FLAGS, "--trian-iters", "3"], cwd=tmp_path, text=True,
                             env=environment() | {"PYTHONPATH": str(tmp_path)}, capture_output=True)
    assert process.returncode == 2
    assert "--trian-iters" in process.stderr and "--train-iters" in process.stderr
    assert "Traceback" not in process.stderr and "torch was imported" not in process.stderr
    process = subprocess.run([sys.executable, PROGRAM, *FLAGS, "--tensorboard-dir", "tb"], cwd=tmp_path, text=True,
                             env=environment() | {"PYTHONPATH": str(tmp_path)}, capture_output=True)
    installed = importlib.util.find_spec("tensorboard") is not None
    assert ("torch was imported" in process.stderr) if installed else ("pip install tensorboard" in process.stderr)


@pytest.mark.parametrize("number, flag", [
    (signal.SIGTERM, "--exit-signal SIGUSR2"), pytest.param(signal.SIGUSR1, "", marks=pytest.mark.slow),
    pytest.param(signal.SIGINT, "--exit-signal SIGINT", marks=pytest.mark.slow)])
def test_a_signal_saves_and_exits_with_0_and_resuming_repeats_nothing(tmp_path: Path, number: signal.Signals,
                                                                      flag: str) -> None:
    flags = f"--train-iters 100000 --lr-decay-style constant --save out --load out --save-interval 100000 {flag}"
    process = start(tmp_path, flags)
    wait_for(tmp_path / "out" / "metrics.jsonl", 3)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    (stopped,) = complete_iterations(tmp_path / "out")
    assert f"exiting at iteration {stopped}: asked to by {number.name}" in output
    code, output = run(tmp_path, f"{flags} --exit-interval {stopped + 1}")
    assert code == 0 and f"resumed from out at iteration {stopped}" in output
    rows = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == list(range(1, stopped + 2))
    assert [row["first_sample"] for row in rows] == list(range(0, 4 * stopped + 4, 4))


def test_a_signal_during_set_up_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    process = start(tmp_path, "--save out --save-interval 100")
    assert process.stdout is not None
    while "configuration:" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "exiting at iteration 0: asked to by SIGTERM" in output, output
    assert complete_iterations(tmp_path / "out") == []


def test_a_signal_to_one_rank_under_torchrun_stops_all(tmp_path: Path) -> None:
    flags = "--train-iters 100000 --lr-decay-style constant --ulysses-size 2 --save out --save-interval 100000"
    process = start(tmp_path, flags, [*TORCHRUN, "2"])
    wait_for(tmp_path / "out" / "metrics.jsonl", 2)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [int(pid) for pid in children if "pretrain_gpt.py" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(workers) == 2
    os.kill(workers[-1], signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert len(complete_iterations(tmp_path / "out")) == 1
    assert output.count("exiting at iteration") == 1


def test_a_kill_during_a_save_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    """SIGKILL at several moments while saving every step; each restart goes on from a complete checkpoint."""
    flags = "--train-iters 100000 --lr-decay-style constant --save out --load out --save-interval 1"
    metrics, known = tmp_path / "out" / "metrics.jsonl", 0
    for attempt in range(2):
        process = start(tmp_path, flags)
        wait_for(metrics, known + 2)
        time.sleep(0.02 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()
        found = complete_iterations(tmp_path / "out")
        tracked = int((tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text())
        assert tracked in found and tracked >= known
        known = tracked
    code, output = run(tmp_path, f"{flags} --exit-interval {known + 1}")
    assert code == 0 and f"resumed from out at iteration {known}" in output
    rows = read_metrics(metrics)
    assert [row["iteration"] for row in rows] == list(range(1, known + 2))
    assert not list((tmp_path / "out").glob("*.building"))
    assert read_state(tmp_path / "out" / f"iter_{known + 1:07d}")["train"]["consumed_samples"] == 4 * (known + 1)


def test_nothing_to_load(tmp_path: Path) -> None:
    code, output = run(tmp_path, "--load nowhere --train-iters 1")
    assert code == 0 and "WARNING: --load nowhere holds no checkpoint" in output
    code, output = run(tmp_path, "--load nowhere --train-iters 1 --exit-on-missing-checkpoint")
    assert code == 2 and "--exit-on-missing-checkpoint" in output and "Traceback" not in output


def test_evaluation_only(tmp_path: Path) -> None:
    """``--skip-train`` evaluates an older checkpoint and leaves the training's rows and configuration unchanged."""
    assert run(tmp_path, "--save out --save-interval 4 --eval-iters 2 --eval-interval 4")[0] == 0
    log, configuration = tmp_path / "out" / "metrics.jsonl", tmp_path / "out" / "config.json"
    before, settings = log.read_text(), configuration.read_text()
    (expected,) = [row for row in read_metrics(log) if row["iteration"] == 4 and "valid_loss" in row]
    code, output = run(tmp_path, "--load out --save out --save-interval 4 --ckpt-step 4 --eval-iters 2 --skip-train")
    assert code == 0, output
    assert log.read_text().startswith(before) and configuration.read_text() == settings
    *_, row = read_metrics(log)
    assert (row["iteration"], row["valid_loss"]) == (4, expected["valid_loss"]) and "test_loss" in row
    assert complete_iterations(tmp_path / "out") == [4, 8]


def test_a_refused_resume_names_flags_and_leaves_the_configuration(tmp_path: Path) -> None:
    assert run(tmp_path, "--train-iters 2 --save out --save-interval 2")[0] == 0
    before = (tmp_path / "out" / "config.json").read_text()
    code, output = run(tmp_path, "--train-iters 3 --save out --load out --save-interval 2")
    assert code == 2 and (tmp_path / "out" / "config.json").read_text() == before
    assert "warm-up and decay are 12 here (--train-iters 3) and 8 in the checkpoint (--train-iters 2)" in output


@pytest.mark.slow
def test_ramp_up_over_a_resume(tmp_path: Path) -> None:
    """The batch grows from 4 over 8 and 12 to 16 within 24 samples; the learning rate follows the samples."""
    flags = ("--train-samples 80 --global-batch-size 16 --rampup-batch-size 4 4 24 --lr-warmup-samples 8 "
             "--save-interval 100")
    assert run(tmp_path, f"{flags} --save straight")[0] == 0
    assert run(tmp_path, f"{flags} --save halves --exit-interval 3")[0] == 0
    assert run(tmp_path, f"{flags} --save halves --load halves")[0] == 0
    rows = {name: read_metrics(tmp_path / name / "metrics.jsonl") for name in ("straight", "halves")}
    # batches that begin at sample 0 or 4 have 4 samples, at 8: 8, at 16: 12, at 28 and later: 16
    assert [row["global_batch_size"] for row in rows["straight"]] == [4, 4, 8, 12, 16, 16, 16]
    assert [row["first_sample"] for row in rows["straight"]] == [0, 4, 8, 16, 28, 44, 60]
    linear = [1e-3 * (80 - samples) / 72 for samples in (8, 16, 28, 44, 60)]
    assert [row["learning_rate"] for row in rows["straight"]] == pytest.approx([0, 5e-4, *linear])
    same = ("iteration", "lm_loss", "grad_norm", "learning_rate", "global_batch_size", "consumed_samples")
    picked = {name: [[row[key] for key in same] for row in rows[name]] for name in rows}
    assert picked["halves"] == picked["straight"]
