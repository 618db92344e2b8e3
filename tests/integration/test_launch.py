"""Programs under torchrun: restarts, a rank that fails before the others have met it, and the death of torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from tests.integration.programs import TORCHRUN

ROOT = Path(__file__).resolve().parents[2]
HEAD = ("import os, sys, time\nfrom pathlib import Path\nfrom megatron_sp.config.schema import Parallel\n"
        "from megatron_sp.errors import DataError\nfrom megatron_sp.runtime import *\n"
        "def main(argv):\n    environment = launch_environment()\n")


def launch(directory: Path, body: str, *options: str) -> subprocess.Popen[str]:
    """Two ranks of a program whose ``main`` has this body."""
    (directory / "program.py").write_text(HEAD + body + "run_program(main)\n")
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen([*TORCHRUN, "2", *options, "program.py"], cwd=directory, env=os.environ | variables,
                            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_a_restart_meets_again(tmp_path: Path) -> None:
    body = ("    import torch\n    start(Parallel(distributed_backend='gloo'), environment)\n"
            "    total = torch.ones(1)\n    torch.distributed.all_reduce(total)\n"
            "    if environment.attempt == 0 and environment.rank == 1:\n        os._exit(1)\n"
            "    torch.distributed.barrier()\n"
            "    print(f'attempt {environment.attempt} {total.item()}\\n', end='')\n    stop()\n")
    process = launch(tmp_path, body, "--max-restarts", "1")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and output.count("attempt 1 2.0") == 2, output


def test_a_rank_that_fails_first_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    body = ("    import signal\n    signal.signal(signal.SIGTERM, lambda *_: None)   # as StopSignals\n"
            "    if environment.rank == 0:\n        time.sleep(3)\n        raise DataError('file x is missing')\n"
            "    start(Parallel(distributed_backend='gloo'), environment)\n")
    begin = time.monotonic()
    process = launch(tmp_path, body)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "DataError: file x is missing" in output
    assert time.monotonic() - begin < 25, "torchrun kills what ignores SIGTERM after 30 s"


def test_ranks_die_with_torchrun(tmp_path: Path) -> None:
    body = ("    Path(f'pid{environment.rank}').write_text(str(os.getpid()))\n    time.sleep(60)\n")
    process = launch(tmp_path, body)
    files = [tmp_path / f"pid{rank}" for rank in range(2)]
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files) and time.monotonic() < deadline:
        time.sleep(0.05)
    ranks = [Path("/proc", file.read_text(), "cmdline") for file in files]
    assert all(b"program.py" in rank.read_bytes() for rank in ranks)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 5
    while any(rank.exists() and rank.read_bytes() for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(rank.exists() and rank.read_bytes() for rank in ranks), "a rank lives on"
