"""The commands that README and tutorial show run: blocks marked ``bash`` as they stand; ``sh`` marks fragments."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.integration.programs import ROOT, run_as_shown, run_program


def bash_blocks(document: str) -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def losses_in(printed: str) -> list[tuple[int, float]]:
    """Return iteration and loss of each log line."""
    found = re.findall(r"^\[.*iteration +(\d+)/.*lm loss: (\S+)", printed, re.MULTILINE)
    return [(int(iteration), float(loss)) for iteration, loss in found]


@pytest.fixture
def with_corpus(tmp_path: Path) -> Path:
    """A directory with a small ``corpus.jsonl``."""
    sources = sorted(Path(json.__file__).parent.parent.joinpath("asyncio").glob("*.py"))
    lines = [json.dumps({"text": path.read_text(encoding="utf-8")}) + "\n" for path in sources]
    (tmp_path / "corpus.jsonl").write_text("".join(lines), encoding="utf-8")
    return tmp_path


def test_layouts_of_the_readme_agree(tmp_path: Path) -> None:
    steps = losses_in(run_as_shown(bash_blocks("README.md")[0], tmp_path, timeout=290))
    assert [iteration for iteration, _ in steps] == [1, 2, 3, 4] * 5
    losses = [[loss for _, loss in steps[start:start + 4]] for start in range(0, 20, 4)]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-5)


def test_own_text_as_the_readme_shows_it(with_corpus: Path) -> None:
    layouts, own_text = bash_blocks("README.md")
    variables = re.findall(r'^[A-Z]+="[^"]*"$', layouts, re.MULTILINE)
    printed = run_as_shown("\n".join([*variables, own_text]), with_corpus, timeout=290)
    steps = losses_in(printed)
    assert [iteration for iteration, _ in steps] == [1, 2, 3, 4], "two steps, and two after the resume"
    assert steps[-1][1] < steps[0][1]
    assert (with_corpus / "losses.png").stat().st_size > 0


@pytest.mark.slow
def test_the_tutorial_on_own_data_runs(with_corpus: Path) -> None:
    printed = run_as_shown("".join(bash_blocks("docs/tutorial/2-own-data.md")), with_corpus, timeout=290)
    assert losses_in(printed)[-1][0] == 6
    assert json.loads((with_corpus / "eval.json").read_text())


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
