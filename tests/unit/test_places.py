"""Places that cannot be written, and numbers no library takes: one sentence, not a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_sp.config.cli.flags import parse
from megatron_sp.errors import ConfigError
from megatron_sp.train.report.metrics_file import MetricsFile


def test_metrics_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="metrics.jsonl cannot be written .*; give --save"):
        MetricsFile.start_new(tmp_path / "file")


@pytest.mark.parametrize("flag, value, limit", [("--seed", "4294967296", "at most 4294967295"),
                                                ("--distributed-timeout-minutes", "1e30", "at most 525600")])
def test_numbers_that_no_library_takes(flag: str, value: str, limit: str) -> None:
    assert any(flag in problem and limit in problem for problem in parse([flag, value]).problems)
