"""What tools write: complete or absent; one sentence for a full disk or a missing matplotlib."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_sp.errors import DataError
from megatron_sp.output_files import complete_file
from megatron_sp.pictures import load_pyplot, save_picture
from tests.helpers.small_disk import FULL, small_disk
from tests.integration.programs import ROOT, run_program
from tools import evaluate, gather_corpus, plot_memory, plot_run, plot_schedule, train_tokenizer


def write_lot(path: Path) -> None:
    with complete_file(path, "--output") as file:
        for _ in range(100):
            file.write(b"x" * 4096)


def draw_schedule(path: Path) -> None:
    plot_schedule.plot(plot_schedule.simulate([[("F", 0, 0), ("B", 0, 0)]], 1), "title", path)


def draw_run(path: Path) -> None:
    run = plot_run.RunMetrics("a", [{"iteration": 1, "consumed_tokens": 8, "lm_loss": 2.0}])
    plot_run.draw([run], path)


def draw_evaluation(path: Path) -> None:
    row = {"tokens_before": [1, 1], "loss": 2.0, "length": 2}
    evaluate.draw({"documents": 1, "long_documents": 1, "seq_length": 1, "loss": 2.0, "by_position": [row],
                   "by_position_of_long_documents": [row], "by_document": [row]}, path, "title")


def gather(path: Path) -> None:
    root = Path(json.__file__).parent
    gather_corpus.write_corpus(path, root, sorted(root.glob("*.py")))


def train(path: Path) -> None:
    train_tokenizer.train(train_tokenizer.Counter(train_tokenizer.words_of("some text to learn from")), path, 290)


def draw_memory(path: Path) -> None:
    plot_memory.draw(2, 80, path)


WRITERS = [write_lot, draw_schedule, draw_run, draw_evaluation, gather, train, draw_memory]


@pytest.mark.parametrize("write", WRITERS)
def test_a_full_disk_is_one_sentence_and_leaves_nothing(write: Callable[[Path], None], tmp_path: Path) -> None:
    if "draw" in write.__name__:
        load_pyplot()  # before the disk is full: matplotlib writes a cache of fonts
    with small_disk(tmp_path / "disk", kib=4) as disk:
        with pytest.raises(DataError, match=rf"x\.out cannot be written: {FULL}"):
            write(disk / "x.out")
        assert not os.listdir(disk)


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("old")
    with pytest.raises(KeyboardInterrupt), complete_file(tmp_path / "x") as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["x"] and (tmp_path / "x").read_text() == "old"


@pytest.mark.parametrize("words", [
    ("plot_run.py", "RUN", "--output", "x.png"), ("plot_memory.py", "--output", "x.png"),
    ("plot_schedule.py", "--pp", "2", "--microbatches", "4", "--output", "x.png"),
    ("plot_attention.py", "--attention-pattern", "fixed", "--seq-length", "2048", "--output", "x.png")])
def test_without_matplotlib_one_sentence(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('blocked in this test')\n")
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "consumed_tokens": 8, "lm_loss": 2.0}\n')
    given = [str(tmp_path) if word == "RUN" else word for word in words]
    done = run_program(sys.executable, ROOT / "tools" / given[0], *given[1:], cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2 and "pip install matplotlib" in done.stderr
    assert "Traceback" not in done.stderr and done.stderr.strip().count("\n") == 0
    assert not (tmp_path / "x.png").exists()


def test_devices_that_the_plan_cannot_draw_are_refused(tmp_path: Path) -> None:
    done = run_program(sys.executable, ROOT / "tools" / "plot_memory.py", "--gpus", 64, "--limit", 0)
    assert done.returncode == 2 and "--gpus 64 must be" in done.stderr and "--limit 0 must be" in done.stderr


def test_equal_figures_are_equal_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        figure, axes = load_pyplot().subplots()
        axes.plot([1, 2])
        save_picture(figure, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
