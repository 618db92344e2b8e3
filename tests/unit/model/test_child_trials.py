"""Kernels that crash, hang or print are tried in child processes, and their faults are told in words."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_sp.model import child_trials
from megatron_sp.model.child_trials import Outcome, try_in_children
from tests.helpers.stand_in_trials import TRIAL

ROOT = Path(__file__).resolve().parents[3]


def test_a_kernel_that_fails_harms_neither_the_run_nor_the_next_kernel() -> None:
    names = ["first", "prints", "missing", "crashes", "second", "raises", "exits", "wrong", "last"]
    outcomes = try_in_children(TRIAL, names, {}, limit=60)
    assert list(outcomes) == names
    passed = {name: outcomes[name].found["process"] for name in names if outcomes[name].passed}
    assert list(passed) == ["first", "prints", "second", "last"]
    assert passed["first"] == passed["prints"], "one process tries kernels as long as they pass"
    assert len({passed["first"], passed["second"], passed["last"], os.getpid()}) == 4
    assert outcomes["missing"] == Outcome(False, missing=True, found=outcomes["missing"].found)
    assert outcomes["crashes"].why == (
        "crashes the process that tries it (SIGSEGV). The last line that it printed: "
        '"CUDA error: an illegal memory access was encountered"')
    assert outcomes["raises"].why == "raises RuntimeError: no kernel image is available"
    assert outcomes["exits"].why == "ends the process that tries it, with exit code 7"
    assert outcomes["wrong"].why == "gives wrong results"


def test_a_kernel_that_hangs_is_given_up() -> None:
    began = time.monotonic()
    outcomes = try_in_children(TRIAL, ["hangs"], {}, limit=1)
    assert outcomes["hangs"].why == "does not finish its trial within 1 seconds" and time.monotonic() - began < 30


def test_all_trials_together_have_a_limit() -> None:
    """The other ranks wait in a collective, which ends the run when it takes too long."""
    began = time.monotonic()
    outcomes = try_in_children(TRIAL, ["first", "hangs", "last"], {}, limit=60, total=3)
    assert list(outcomes) == ["first", "hangs", "last"] and time.monotonic() - began < 30
    assert outcomes["last"].why == "is not tried, because the trials before it took 3 seconds"
    assert "does not finish" in outcomes["hangs"].why


def test_without_a_place_for_what_they_print_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*how: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(child_trials.tempfile, "TemporaryFile", full)
    assert "No space left on device" in try_in_children(TRIAL, ["first"], {})["first"].why


def test_without_a_process_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    outcomes = try_in_children(TRIAL, ["first", "second"], {})
    assert all("no process could be started" in outcome.why for outcome in outcomes.values()) and len(outcomes) == 2


def test_a_trial_ends_with_its_run(tmp_path: Path) -> None:
    """A run may be killed while a kernel is tried."""
    pid_file = tmp_path / "pid"
    run = subprocess.Popen([sys.executable, "-m", "tests.helpers.stand_in_trials", str(pid_file)], cwd=ROOT)
    try:
        deadline = time.monotonic() + 60
        while not (pid_file.exists() and pid_file.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        run.kill()
        run.wait()
    child = Path("/proc") / pid_file.read_text()
    while child.exists() and "Z" not in (child / "stat").read_text().rpartition(")")[2].split()[:1]:
        assert time.monotonic() < deadline, "the trial outlives its run"
        time.sleep(0.02)
