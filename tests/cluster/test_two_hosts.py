"""Two hosts made of network namespaces: they train together over a network, and a host that vanishes is named.

Each host has an address of its own and no loopback in common with the other, so that ranks can only meet over the
network, as on a cluster. Files are shared, like a cluster's file system.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.programs import ROOT, run_program

ADDRESSES = ("10.213.77.1", "10.213.77.2")
PORT = "29517"
FLAGS = """--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --position-embedding-type rope
           --attention-dropout 0 --hidden-dropout 0 --seq-length 64 --global-batch-size 2 --lr 1e-3 --eval-iters 0
           --lr-decay-style constant --log-interval 1 --mock-data --tokenizer-type NullTokenizer
           --vocab-size 64""".split()


def why_not() -> str:
    """Return why no network namespace can be made here, or "" when one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "not installed: ip (Debian package iproute2)"
    made = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return "" if made.returncode == 0 else "this machine does not allow network namespaces"


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def test_a_single_process_needs_no_network(tmp_path: Path) -> None:
    """No interface is up, not even loopback. It saves in the background too."""
    done = run_program("unshare", "--net", sys.executable, "pretrain_gpt.py", *FLAGS, "--train-iters", "2", "--save",
                       tmp_path / "out", "--async-save", "--save-interval", "1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "saved" in done.stdout and "iteration        2/       2" in done.stdout


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    """Make two network namespaces that a virtual cable joins; yield their names."""
    names = [f"megatron{os.getpid()}-{number}" for number in range(2)]
    with ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
        _ip("link", "add", "wire", "netns", names[0], "type", "veth", "peer", "name", "wire", "netns", names[1])
        for name, address in zip(names, ADDRESSES):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "wire")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "wire", "up")
        yield names


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def start(hosts: list[str], directory: Path, *flags: str) -> list[subprocess.Popen[str]]:
    """Start one rank on each host."""
    started = []
    for rank, host in enumerate(hosts):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                     "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": "wire",
                     "OMP_NUM_THREADS": "1"}
        command = ["ip", "netns", "exec", host, sys.executable, str(ROOT / "pretrain_gpt.py"), *FLAGS,
                   "--save", str(directory), "--load", str(directory), *flags]
        started.append(subprocess.Popen(command, cwd=ROOT, env={**os.environ, **variables}, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    return started


def finish(ranks: list[subprocess.Popen[str]], timeout: float = 120) -> list[tuple[int, str]]:
    """Return exit code and output of each rank."""
    try:
        outputs = [rank.communicate(timeout=timeout)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs)]


def losses(directory: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {row["iteration"]: row["lm_loss"] for row in rows if "lm_loss" in row}


def test_two_hosts_train_as_one_process_and_a_lost_host_is_named(hosts: list[str], tmp_path: Path) -> None:
    split, alone = tmp_path / "split", tmp_path / "alone"
    flags = ["--train-iters", "100000", "--save-interval", "4", "--ulysses-size", "2", "--zero-stage", "3",
             "--distributed-timeout-minutes", "0.15"]
    ranks = start(hosts, split, *flags)
    try:
        deadline = time.monotonic() + 100
        while not (split / "metrics.jsonl").exists() or max(losses(split), default=0) < 9:
            assert time.monotonic() < deadline and ranks[0].poll() is None, finish(ranks, 1)
            time.sleep(0.2)
        _ip("-n", hosts[1], "link", "set", "wire", "down")  # nobody tells the peer that this host is gone
        pulled = time.monotonic()
        (code, output), _ = finish(ranks)
        assert time.monotonic() - pulled < 60
    finally:
        _ip("-n", hosts[1], "link", "set", "wire", "up")
        for rank in ranks:
            rank.kill()
    assert code == 1, output
    assert "Traceback" not in output, output
    assert "rank 1" in output and "--distributed-timeout-minutes" in output, output

    reached = int((split / "latest_checkpointed_iteration.txt").read_text())
    last = str(reached + 3)
    for code, output in finish(start(hosts, split, *flags, "--train-iters", last)):
        assert code == 0, output
    done = run_program(sys.executable, ROOT / "pretrain_gpt.py", *FLAGS, "--save", alone, "--save-interval", "100000",
                       "--train-iters", last)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(split) == pytest.approx(losses(alone), rel=1e-5)
