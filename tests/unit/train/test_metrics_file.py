"""metrics.jsonl: what happens to an older file, damaged lines, full disks."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest

from megatron_sp.train.checkpoints.state import TrainState
from megatron_sp.train.report import recorder
from megatron_sp.train.report.metrics_file import MetricsFile, read_metrics
from tests.helpers.configs import STYLES, tiny_run


def test_resume_keeps_the_rows_up_to_its_iteration(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}\n{"iteration": 2}\n{"iteration": 2, "valid_loss": 1}\n{"iteration": 3}\n{"iter')
    metrics = MetricsFile.resume(tmp_path, 2)
    assert metrics.notes == []
    metrics.write({"iteration": 3, "lm_loss": math.nan})
    metrics.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"iteration": 1}, {"iteration": 2}, {"iteration": 2, "valid_loss": 1}, {"iteration": 3, "lm_loss": None}]


def test_a_fresh_run_sets_older_metrics_aside(tmp_path: Path) -> None:
    for number in range(3):
        metrics = MetricsFile.start_new(tmp_path)
        metrics.write({"iteration": number})
        metrics.close()
    assert {path.name: read_metrics(path)[0]["iteration"] for path in tmp_path.iterdir()} == {
        "metrics.1.jsonl": 0, "metrics.2.jsonl": 1, "metrics.jsonl": 2}


def test_an_evaluation_appends_and_removes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}\n{"iteration": 9}\n')
    metrics = MetricsFile.append_to(tmp_path)
    metrics.write({"iteration": 1, "valid_loss": 2.0})
    metrics.close()
    assert [row["iteration"] for row in read_metrics(path)] == [1, 9, 1]


@pytest.mark.parametrize("flags, expected", [
    ("--save {a} --load {a}", "resume"),
    ("--save {b} --load {a}", "start_new"),        # a metrics file in b belongs to another run
    ("--save {a}/../a --load {a}", "resume"),      # another spelling of the same directory
    ("--save {a} --load {a} --skip-train --eval-iters 1", "append_to"),
    ("--load {a}", "none")])
def test_only_a_run_that_goes_on_in_its_directory_continues_its_file(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, expected: str) -> None:
    (tmp_path / "a").mkdir()
    done = ["none"]
    for name in ("start_new", "resume", "append_to"):
        monkeypatch.setattr(MetricsFile, name, lambda *_, name=name: done.append(name))
    text = flags.format(a=tmp_path / "a", b=tmp_path / "b") + " --save-interval 9" * ("--save" in flags)
    recorder._open_metrics(tiny_run([*STYLES["llama"].split(), *text.split()]), TrainState(iteration=5))
    assert done[-1] == expected


def test_a_damaged_file_is_kept_and_its_readable_rows_go_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    damaged = b'{"iteration": 1}\n\xff\xfe\x00garbage\n[1]\n{"iteration": 2}\n{"iteration": 3}\n{"iter'
    path.write_bytes(damaged)
    assert [row["iteration"] for row in read_metrics(path)] == [1, 2, 3]
    metrics = MetricsFile.resume(tmp_path, 2)
    metrics.write({"iteration": 3})
    metrics.close()
    (note,) = metrics.notes
    assert note.startswith(f"WARNING: {path} has 2 unreadable lines") and "metrics.1.jsonl" in note
    assert (tmp_path / "metrics.1.jsonl").read_bytes() == damaged
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_an_empty_file_is_not_worth_keeping(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    MetricsFile.start_new(tmp_path).close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_rows_after_a_full_disk_are_readable(tmp_path: Path) -> None:
    """A row that was cut short ends where the next row begins."""
    class Disk(io.BytesIO):
        room = 1 << 20

        def write(self, data: bytes) -> int:  # type: ignore[override]
            written = super().write(data[:self.room])
            self.room -= written
            return written

    metrics, disk = MetricsFile(tmp_path), Disk()
    metrics._file = disk
    metrics.write({"iteration": 1})
    disk.room = 5
    for _ in range(2):      # the disk takes 5 bytes of the first row and none of the second
        with pytest.raises(OSError, match="No space left"):
            metrics.write({"iteration": 2})
    disk.room = 1 << 20
    for iteration in (3, 4):
        metrics.write({"iteration": iteration})
    (tmp_path / "copy").write_bytes(disk.getvalue())
    assert [row["iteration"] for row in read_metrics(tmp_path / "copy")] == [1, 3, 4]
