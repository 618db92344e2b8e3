"""Tools find the package of their checkout, and change no search path where pip has installed them."""

from __future__ import annotations

import runpy
import shutil
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
