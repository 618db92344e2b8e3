"""A short form of ``python -m tests.faults.kill_saves``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.kill_saves import torment


@pytest.mark.parametrize("flags", ["--async-save --keep-last 2", pytest.param("", marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_of_a_save_loses_no_finished_step(tmp_path: Path, flags: str) -> None:
    report = torment(tmp_path, 3, flags, seed=1)
    assert report.kills == 3 and report.runs >= 1
