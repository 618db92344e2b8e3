"""The commands that README and tutorial show run: blocks marked ``bash`` as they stand; ``sh`` marks fragments."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.integration.programs import ROOT, run_as_shown, run_program


def run_blocks(document: str, directory: Path, timeout: float) -> str:
    """Run all ``bash`` blocks of a document as one script, beside a small ``corpus.jsonl``; return what they print."""
    sources = sorted(Path(json.__file__).parent.parent.joinpath("asyncio").glob("*.py"))
    (directory / "corpus.jsonl").write_text(
        "".join(json.dumps({"text": path.read_text(encoding="utf-8")}) + "\n" for path in sources), encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return run_as_shown("".join(blocks), directory, timeout)


def test_recipes_run_and_layouts_agree(tmp_path: Path) -> None:
    printed = run_blocks("README.md", tmp_path, timeout=290)
    steps = re.findall(r"^\[.*iteration +(\d+)/.*lm loss: (\S+)", printed, re.MULTILINE)
    layouts, own_data = steps[:20], steps[20:]
    assert [int(iteration) for iteration, _ in steps] == [1, 2, 3, 4] * 6, "five layouts; two and two steps on own data"
    losses = [[float(loss) for _, loss in layouts[start:start + 4]] for start in range(0, 20, 4)]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-5)
    assert float(own_data[-1][1]) < float(own_data[0][1])
    assert (tmp_path / "losses.png").stat().st_size > 0


@pytest.mark.slow
def test_the_tutorial_on_own_data_runs(tmp_path: Path) -> None:
    printed = run_blocks("docs/tutorial/2-own-data.md", tmp_path, timeout=290)
    assert "iteration        6/" in printed
    assert json.loads((tmp_path / "eval.json").read_text())


def test_shown_output_is_what_the_command_prints() -> None:
    text = (ROOT / "docs/background/parallelism.md").read_text(encoding="utf-8")
    [(command, shown)] = re.findall(r"^```console\n\$ python (.*?)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert run_program(sys.executable, *command.split()).stdout == shown


def test_version_and_requirements_agree() -> None:
    pinned = dict(re.findall(r"^([\w-]+)==(\S+?)(?:;|$)", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    ranges = dict(re.findall(r'^    "([\w-]+)>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    assert set(ranges) <= set(pinned)
    for name, least in ranges.items():
        assert tuple(map(int, pinned[name].split(".")[:2])) >= tuple(map(int, least.split(".")[:2])), name
