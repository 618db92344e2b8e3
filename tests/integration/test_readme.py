"""What the documents show is run: the README's recipes; and version and requirements agree."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.integration.programs import ROOT, run_program


def test_recipes_run_and_agree(tmp_path: Path) -> None:
    [recipes] = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "pretrain_gpt.py").symlink_to(ROOT / "pretrain_gpt.py")
    (tmp_path / "run.sh").write_text("set -euo pipefail\n" + recipes.replace("torchrun ", "torchrun --standalone "))
    done = run_program("bash", "run.sh", cwd=tmp_path, timeout=280, OMP_NUM_THREADS="1",
                       PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [[json.loads(line)["lm_loss"] for line in path.read_text().splitlines()]
            for path in sorted(tmp_path.glob("metrics*.jsonl"))]
    assert len(runs) == recipes.count("pretrain_gpt.py") and all(len(losses) == 4 for losses in runs)
    for losses in runs[1:]:
        assert losses == pytest.approx(runs[0], rel=1e-5)


def test_version_and_requirements_agree() -> None:
    pinned = dict(re.findall(r"^([\w-]+)==(\S+?)(?:;|$)", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    ranges = dict(re.findall(r'^    "([\w-]+)>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    assert set(ranges) <= set(pinned)
    for name, least in ranges.items():
        assert tuple(map(int, pinned[name].split(".")[:2])) >= tuple(map(int, least.split(".")[:2])), name
