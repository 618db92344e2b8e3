"""The documents name what exists: links, headings, files, programs, flags; commands say whether a test runs them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/**/*.md")])
names = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))

FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*[a-z0-9]")
LINK = re.compile(r"\]\(([^)\s]*)\)")
QUOTED_PATH = re.compile(r"`(?!runs/|SAVE/)([\w./-]+/[\w.-]+\.(?:py|sh|md|png|txt|toml|json))`")  # runs write those
PROGRAM = re.compile(r"\b(?:tools|examples|benchmarks|tests|docs/make)/[\w/]+\.(?:py|sh)\b")

#: Flags of programs that are not ours: torchrun, Slurm, pip, Megatron (in the README's comparison).
FOREIGN_FLAGS = set("""--standalone --nproc-per-node --nnodes --node-rank --rdzv-backend --rdzv-endpoint --rdzv-id
    --local-addr --shutdown-timeout --signals-to-handle --max-restarts --master-port --master-addr --local-ranks-filter
    --tee --redirects --log-dir --nodes --signal --ntasks --ntasks-per-node --gpus-per-node --gpus-per-task --pid
    --kill-on-bad-exit --array --chdir --hostfile --ckpt-convert-format --container-image --prefix
    --allow-incomplete-ranks""".split())


def flags_in(text: str) -> set[str]:
    """Return the flags that a text names, with hyphens for underscores."""
    return {flag.replace("_", "-") for flag in FLAG.findall(text)}


def anchors_of(document: Path) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@names
def test_links_lead_to_a_file_and_a_heading(document: Path) -> None:
    for link in LINK.findall(document.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        target, _, anchor = link.partition("#")
        page = document.parent / target if target else document
        assert page.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in anchors_of(page), f"{link}: no such heading"


@names
def test_named_files_exist(document: Path) -> None:
    """A path in backticks is one of the repository, or of its package, as in `train/trainer.py`."""
    text = document.read_text(encoding="utf-8")
    for name in {*QUOTED_PATH.findall(text), *PROGRAM.findall(text)}:
        places = [ROOT / name, ROOT / "megatron_sp" / name, document.parent / name]
        assert any(place.exists() for place in places), f"{name} does not exist"


@names
def test_named_flags_exist(document: Path) -> None:
    """A flag in code is one of pretrain_gpt.py, of a tool, a benchmark or a test, or a known one of another program."""
    programs = [*ROOT.glob("tools/*.py"), *ROOT.glob("docs/make/*.py"), *ROOT.glob("benchmarks/**/*.py"),
                ROOT / "tests/conftest.py", ROOT / "docs/reference/flags.md", ROOT / "docs/reference/megatron-flags.md"]
    known = {flag for path in programs for flag in flags_in(path.read_text(encoding="utf-8"))} | FOREIGN_FLAGS
    code = re.findall(r"```.*?^```|`[^`\n]+`", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert {flag for text in code for flag in flags_in(text)} <= known | {"--help"}


@names
def test_shown_commands_say_whether_a_test_runs_them(document: Path) -> None:
    """A test runs ``bash`` blocks (see test_readme.py); ``sh`` marks a fragment; a block without a mark is output."""
    text = document.read_text(encoding="utf-8")
    for mark, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if re.search(r"^(\$ |python |bash |torchrun |srun |\.venv/bin/|pip |git )", block, re.MULTILINE):
            assert mark in ("bash", "sh", "console"), f"mark this block as bash or sh:\n{block}"


def test_the_table_of_rooms_is_true() -> None:
    """Each file named in a row of ARCHITECTURE.md is in that row's room, and each room of the package has a row."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = [row.split("|") for row in text.splitlines() if row.startswith("| `")]
    rooms = {cells[1].strip(" `/"): re.findall(r"`(\w+\.py)`", cells[3]) for cells in rows}
    package = ROOT / "megatron_sp"
    missing = [f"{room}/{name}" for room, names in rooms.items() for name in names
               if not (package / room / name).exists()]
    assert not missing
    assert {path.name for path in package.iterdir() if (path / "__init__.py").exists()} <= set(rooms)
    assert all(f"{path.name}`" in text for path in package.glob("*.py") if path.name != "__init__.py")


def test_the_index_names_every_page() -> None:
    index = ROOT / "docs/README.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in LINK.findall(index.read_text("utf-8"))}
    pages = {page.resolve() for page in ROOT.glob("docs/**/*.md")} - {index.resolve()}
    assert not pages - linked, "pages that docs/README.md does not name"


def test_pages_with_figures_of_speed_or_memory_say_that_no_gpu_has_run_them() -> None:
    figure = re.compile(r"\d (GiB|tokens/s|TFLOP/s)")
    pages = [path for path in sorted((ROOT / "docs").rglob("*.md")) if figure.search(path.read_text())]
    silent = [path.name for path in pages if "no gpu has run" not in " ".join(path.read_text().lower().split())]
    assert pages and not silent
