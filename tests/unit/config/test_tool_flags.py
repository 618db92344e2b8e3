"""Wrong values given to the tools: one sentence and exit code 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[3] / "tools"


@pytest.mark.parametrize("words, said", [
    ("plot_schedule.py --pp 0 --microbatches 4", "--pp 0 must be at least 1"),
    ("generate_text.py --load x --prompt a --seed 99999999999999999999", "--seed 99999999999999999999 must be"),
    ("plot_run.py METRICS --output x.png --smooth -4", "--smooth -4 must be at least 0"),
    ("verify_layout.py --world-size=0", "--world-size 0: give the number"),
    ("verify_layout.py", ""),
])
def test_wrong_values(words: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "consumed_samples": null}\n')
    program, *flags = words.replace("METRICS", str(tmp_path)).split()
    done = subprocess.run([sys.executable, str(TOOLS / program), *flags], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_a_row_without_counts_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "consumed_samples": null, "lm_loss": 2.0}\n')
    done = subprocess.run([sys.executable, str(TOOLS / "plot_run.py"), str(tmp_path), "--output",
                           str(tmp_path / "x.png")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
