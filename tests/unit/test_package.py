"""What ``pip install`` installs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_sp.__main__ import PROGRAMS, main

ROOT = Path(__file__).resolve().parents[2]


def test_every_package_is_installed() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {str(path.parent.relative_to(ROOT)).replace("/", ".") for path in ROOT.glob("megatron_sp/**/*.py")}
    assert set(settings["packages"]) == packages | {"megatron_sp.tools"}
    assert all((ROOT / "tools" / f"{name}.py").exists() for name in PROGRAMS if name != "pretrain")


def test_the_command_runs_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "megatron_sp", "data-statistics", "--help"], cwd=ROOT, text=True,
                          capture_output=True)
    assert done.returncode == 0 and "usage: data_statistics" in done.stdout
    done = subprocess.run([sys.executable, "-m", "megatron_sp", "pretrain", "--nothing"], cwd=ROOT, text=True,
                          capture_output=True)
    assert done.returncode == 2 and "Unknown flag --nothing" in done.stderr


def test_the_command_lists_its_programs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["megatron-sp", "--help"])
    assert main() == 0 and "preprocess_data" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["megatron-sp", "nothing"])
    assert main() == 2 and "usage: megatron-sp PROGRAM" in capsys.readouterr().err
