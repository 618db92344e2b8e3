"""tools/plot_run.py: the picture, the summary, and what it says about wrong input."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.integration.programs import run_tool

KEYS = ("lm_loss", "learning_rate", "grad_norm", "tokens_per_s")


def record(iteration: int, **values: float) -> dict[str, Any]:
    return {"iteration": iteration, "consumed_samples": 2 * iteration, "consumed_tokens": 128 * iteration, **values}


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in records))
    return path


def steps(first: int, last: int, loss: float) -> list[dict[str, Any]]:
    return [record(i, lm_loss=loss / i, learning_rate=1e-3, grad_norm=1.0, tokens_per_s=100.0 * i)
            for i in range(first, last + 1)]


def test_picture_and_summary_of_two_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    evaluated = record(10, **{"valid_loss": 1.25, "valid_loss/code": 2.5})
    write(tmp_path / "one/metrics.jsonl", [*steps(1, 10, 8.0), evaluated])
    write(tmp_path / "two/metrics.jsonl", steps(1, 3, 6.0))
    done = run_tool("plot_run.py", tmp_path / "one", f"second={tmp_path}/two/metrics.jsonl", "--output",
                    tmp_path / "made/p.png", "--reference", "unigram entropy=5.5")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "made/p.png").read_bytes().startswith(b"\x89PNG")
    for text in ("one: 10 iterations, 1,280 tokens", "first 8.000   last 0.800", "validation loss  first 1.250",
                 "validation loss  first 2.500   last 2.500   code",
                 "unigram entropy  5.500", "median 600", "second: 3 iterations"):
        assert text in done.stdout


def test_a_comparison_names_the_largest_difference(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write(tmp_path / "one/metrics.jsonl", steps(1, 4, 8.0))
    write(tmp_path / "two/metrics.jsonl", steps(2, 5, 8.2))
    write(tmp_path / "late/metrics.jsonl", steps(7, 9, 8.0))
    picture = tmp_path / "d.png"
    done = run_tool("plot_run.py", "--compare", tmp_path / "one", tmp_path / "two", "--output", picture)
    assert done.returncode == 0, done.stderr
    assert "two: over 3 iterations the loss differs from one by at most 0.1 (iteration 2)" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    for runs, message in (([tmp_path / "one"], "needs two runs"),
                          ([tmp_path / "one", tmp_path / "late"], "no loss of the same iteration")):
        done = run_tool("plot_run.py", "--compare", *runs, "--output", picture)
        assert done.returncode == 2 and message in done.stderr


def test_rows_of_one_iteration_are_one_record(tmp_path: Path) -> None:
    from tools.plot_run import read_run

    path = write(tmp_path / "metrics.jsonl", [*steps(1, 3, 6.0), {"iteration": 3, "valid_loss": 1.5},
                                              {"iteration": 5, "consumed_samples": 10, "valid_loss": 1.0}])
    with open(path, "a") as file:
        file.write('{"iteration": 6, "lm_lo')  # being written
    run = read_run(f"a run={path}")
    assert run.name == "a run" and [entry["iteration"] for entry in run.records] == [1, 2, 3, 5]
    assert run.series("lm_loss") == [(128, 6.0), (256, 3.0), (384, 2.0)]
    assert run.series("valid_loss") == [(384, 1.5), (640, 1.0)]


def test_values_that_are_not_numbers_are_left_out(tmp_path: Path) -> None:
    from tools.plot_run import read_run

    path = write(tmp_path / "metrics.jsonl", [record(1, lm_loss=math.nan), record(2, lm_loss=1.0)])
    assert read_run(str(path)).series("lm_loss", "iteration") == [(2, 1.0)]


@pytest.mark.parametrize("content, message", [
    (None, "cannot be read"), ("", "holds no metrics"), ("hello\nworld\n", "holds no metrics")])
def test_wrong_input_is_one_sentence(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "metrics.jsonl"
    if content is not None:
        path.write_text(content)
    done = run_tool("plot_run.py", path, "--output", tmp_path / "p.png")
    assert done.returncode == 2
    assert message in done.stderr and str(path) in done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "p.png").exists()


def test_wrong_reference_names_the_form(tmp_path: Path) -> None:
    done = run_tool("plot_run.py", tmp_path, "--output", tmp_path / "p.png", "--reference", "5.5")
    assert done.returncode == 2 and "NAME=LOSS" in done.stderr
