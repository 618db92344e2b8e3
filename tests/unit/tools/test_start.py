"""Tools find the package of their checkout, and change no search path where pip has installed them."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOLS = [path for path in sorted((ROOT / "tools").glob("*.py")) if "sys.path" in path.read_text()]


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.stem)
def test_an_installed_tool_leaves_the_search_path(tool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it did, ``import config`` in any library would find ``site-packages/megatron_sp/config``."""
    folder = tmp_path / "site-packages" / "megatron_sp" / "tools"
    folder.mkdir(parents=True)
    installed = shutil.copy(tool, folder)
    monkeypatch.setattr(sys, "path", before := list(sys.path))
    runpy.run_path(str(installed), run_name="imported")
    assert sys.path == before and str(folder.parent) not in sys.path
    runpy.run_path(str(tool), run_name="imported")
    assert sys.path[0] == str(ROOT)


def test_scripts_start_where_python_leaves_out_their_directory(tmp_path: Path) -> None:
    """``python -P``, ``python -I`` and PYTHONSAFEPATH do so. One process tries all scripts, to be quick."""
    program = ("import runpy, sys\nbefore = list(sys.path)\nfor script in sys.argv[1:]:\n"
               "    sys.path[:] = before\n"
               "    for name in [name for name in sys.modules if name.partition('.')[0] in ('megatron_sp', 'tools')]:\n"
               "        del sys.modules[name]\n"
               "    runpy.run_path(script, run_name='imported')\n")
    scripts = [str(path) for path in (ROOT / "pretrain_gpt.py", *sorted((ROOT / "tools").glob("*.py")))]
    done = subprocess.run([sys.executable, "-I", "-c", program, *scripts], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
