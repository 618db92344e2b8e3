"""examples/slurm_pretrain.sh on a real Slurm cluster of two nodes: it trains, saves before its time is up, resumes."""

from __future__ import annotations

import json
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.slurm_cluster import SlurmCluster, slurm_cluster, why_not
from tests.integration.programs import ROOT, run_program

SCRIPT = ROOT / "examples" / "slurm_pretrain.sh"
#: What the script's SETTINGS file says here: a model for two CPU ranks instead of an 8B model for sixteen GPUs.
SETTINGS = """
MODEL=(--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --position-embedding-type rope
       --attention-dropout 0 --hidden-dropout 0)
TRAINING=(--seq-length 64 --global-batch-size 2 --lr 1e-3 --lr-decay-style constant --eval-iters 0 --log-interval 1)
PARALLEL=(--zero-stage 1)
DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size 64)
SAVE_INTERVAL=100000
"""

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with tempfile.TemporaryDirectory(prefix="slurm") as directory, slurm_cluster(Path(directory)) as made:
        yield made


def losses(directory: Path) -> dict[int, float]:
    """Return the loss of each iteration in ``metrics.jsonl``."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {row["iteration"]: row["lm_loss"] for row in rows if "lm_loss" in row}


def logs(directory: Path, last: int = 3000) -> str:
    """Return the last characters of what the batch script and each rank printed, for the message of a failed test."""
    return "".join(f"== {path.name}\n{path.read_text()[-last:]}\n" for path in
                   [*directory.glob("*.out"), *sorted(directory.glob("logs/*.log"))])


def resumed_at(directory: Path) -> list[int]:
    """Return the iterations at which the log of rank 0 says that the job resumed."""
    return [int(found) for path in sorted(directory.glob("logs/*-rank0.log"))
            for found in re.findall(r"resumed from .* at iteration (\d+)", path.read_text())]


def submit(cluster: SlurmCluster, directory: Path, *flags: str) -> int:
    """Submit the script on two nodes of one rank each."""
    return cluster.submit("--nodes=2", "--ntasks-per-node=1", f"--chdir={ROOT}", f"--output={directory}/batch-%j.out",
                          SCRIPT, *flags, **variables(directory))


def variables(directory: Path) -> dict[str, Any]:
    """Write the settings into the directory; return the environment variables that the script reads."""
    (directory / "settings.sh").write_text(SETTINGS)
    return {"OUTPUT_DIR": str(directory), "PYTHON": sys.executable, "SETTINGS": str(directory / "settings.sh")}


def test_two_nodes_train_as_one_process(cluster: SlurmCluster, tmp_path: Path) -> None:
    split, alone = tmp_path / "split", tmp_path / "alone"
    split.mkdir()
    alone.mkdir()
    job = submit(cluster, split, "--train-iters", "4", "--ulysses-size", "2")
    assert cluster.wait_for(job, "COMPLETED", "FAILED", "NODE_FAIL", timeout=200) == "COMPLETED", logs(split)
    printed = run_program("bash", SCRIPT, "--train-iters", "4", DRY_RUN="1", NODES="1", NPROC="1",
                          **variables(alone)).stdout
    done = run_program(*shlex.split(printed.splitlines()[0]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(split) == pytest.approx(losses(alone), rel=1e-5)
    assert sorted(path.name for path in split.glob("logs/*")) == [f"{job}-rank{rank}.log" for rank in range(2)]


@pytest.mark.timeout(600)
def test_a_job_whose_time_is_up_saves_is_requeued_and_resumes(cluster: SlurmCluster, tmp_path: Path) -> None:
    total = 100_000
    job = submit(cluster, tmp_path, "--train-iters", str(total), "--ulysses-size", "2")
    cluster.wait_for(job, "RUNNING", timeout=60)
    _wait_for_iteration(tmp_path, 5)
    cluster.run("scancel", "--batch", "--signal=USR1", str(job))    # what --signal=B:USR1@600 makes Slurm send
    cluster.wait_for(job, "PENDING", timeout=60)
    # Slurm starts a requeued job two minutes later, so that its nodes can be cleaned up. This test waits only
    # if the nodes are still busy: then Slurm sets the later time again.
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    _wait(tmp_path, lambda: bool(resumed_at(tmp_path)), seconds=240)
    saved = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    _wait_for_iteration(tmp_path, saved + 3)
    cluster.run("scancel", "--signal=KILL", "--full", str(job))
    cluster.wait_for(job, "CANCELLED", "FAILED", "COMPLETED", timeout=60)
    assert 5 <= saved < total, logs(tmp_path)
    found = sorted(losses(tmp_path))
    assert found[:saved + 3] == list(range(1, saved + 4)), "an iteration is missing or was logged twice"
    assert resumed_at(tmp_path) == [saved]


def _wait_for_iteration(directory: Path, iteration: int) -> None:
    _wait(directory, lambda: (directory / "metrics.jsonl").exists() and max(losses(directory), default=0) >= iteration)


def _wait(directory: Path, condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, logs(directory)
        time.sleep(0.5)
