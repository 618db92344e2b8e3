"""docs/make/launch_corpus_page.py: the page that tells what becomes of each command line of a collection."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs.make.launch_corpus_page import OTHER, PAGE, main, read_corpus
from megatron_sp.errors import ConfigError

SHAPE = "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 512 --lr 1e-4 --train-iters 10 --bf16"


def write(directory: Path, name: str, flags: str, gpus: int | None) -> None:
    (directory / f"{name}.args").write_text("\n".join(f"{SHAPE} {flags}".split()))
    (directory / f"{name}.json").write_text(json.dumps({"layout": {"gpus": gpus}}))


def test_the_page_counts_plans_and_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "a", "--tensor-model-parallel-size 2 --global-batch-size 12", 16)   # 16 / 2 does not divide 12
    write(tmp_path, "b", "--ds-sequence-parallel-size 4 --zero-stage 3", None)
    write(tmp_path, "c", "--use-z-loss --position-embedding-type alibi --invented 1", 8)
    main([str(tmp_path), "--output", str(tmp_path / "page.md")])
    assert "2 of 3 give a plan" in capsys.readouterr().out
    page = (tmp_path / "page.md").read_text()
    for row in ("2 of 3 command lines give a plan (66.7%)", "| z-loss | 1 |", f"| {OTHER} | 1 |",
                "| 1 | 12 | 0.02 B | 512 | tensor 2, data 6, ZeRO 0 | plan |",
                "| 2 | 4 | 0.02 B | 512 | Ulysses 4, ZeRO 3 | plan |",
                f"| 3 | 8 |  |  |  | refused: ALiBi positions; z-loss; {OTHER} |"):
        assert row in page


def test_the_committed_page_has_a_reason_for_every_refusal() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert "| plan |" in page and OTHER not in page


@pytest.mark.parametrize("flags", ["", "--lr 1"])
def test_a_directory_without_command_lines_is_refused(flags: str, tmp_path: Path) -> None:
    if flags:
        write(tmp_path, "a", flags, 1)
        (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ConfigError, match="see --help"):
        read_corpus(tmp_path)
