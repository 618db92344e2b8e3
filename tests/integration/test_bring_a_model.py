"""The commands on the page about bringing and taking models run as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.programs import run_as_shown
from tests.integration.test_readme import bash_blocks, losses_in


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path) -> None:
    printed = run_as_shown("".join(bash_blocks("docs/how-to/bring-or-take-a-model.md")), tmp_path, timeout=290)
    assert [iteration for iteration, _ in losses_in(printed)] == [1, 2]
    assert (tmp_path / "llama-trained/model.safetensors").is_file()
    first, last = (tmp_path / name / "model.safetensors" for name in ("my-llama", "llama-again"))
    assert abs(first.stat().st_size - last.stat().st_size) < 4096
