"""The documents name what exists: links, headings, files and programs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/**/*.md")])
names = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))

LINK = re.compile(r"\]\(([^)\s]*)\)")
QUOTED_PATH = re.compile(r"`(?!runs/|SAVE/)([\w./-]+/[\w.-]+\.(?:py|sh|md|png|txt|toml|json))`")  # runs write those
PROGRAM = re.compile(r"\b(?:tools|examples|benchmarks|tests|docs/make)/[\w/]+\.(?:py|sh)\b")


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


def test_the_index_names_every_page() -> None:
    index = ROOT / "docs/README.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in LINK.findall(index.read_text("utf-8"))}
    pages = {page.resolve() for page in ROOT.glob("docs/**/*.md")} - {index.resolve()}
    assert not pages - linked, "pages that docs/README.md does not name"
