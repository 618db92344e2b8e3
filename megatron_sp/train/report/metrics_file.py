"""metrics.jsonl: one JSON object per line, flushed at once, continued on resume. Imports no torch."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, TextIO

from megatron_sp.errors import ConfigError

NAME = "metrics.jsonl"


class MetricsFile:
    """Appends rows to ``directory/metrics.jsonl``.

    A run that resumes at iteration N keeps the rows up to N: later ones, and a last line cut short,
    belong to steps that are made again. A run that starts afresh leaves an older file aside as
    ``metrics.1.jsonl``, ``metrics.2.jsonl`` ...
    """

    def __init__(self, directory: str | Path, start_iteration: int):
        self.path = Path(directory) / NAME
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                if start_iteration:
                    _keep_rows_until(self.path, start_iteration)
                else:
                    os.replace(self.path, _free_name(self.path))
            self._file: TextIO = self.path.open("a")
        except OSError as error:
            raise ConfigError(f"{self.path.absolute()} cannot be written ({error.strerror}); give --save a directory "
                              "with write permission, or start in one") from None

    def write(self, row: dict[str, Any]) -> None:
        """Append one row; numbers that are not finite become null."""
        self._file.write(json.dumps({key: _finite(value) for key, value in row.items()}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, without a last line cut short."""
    rows = []
    for line in Path(path).read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("iteration"), int):
            rows.append(row)
    return rows


def _keep_rows_until(path: Path, iteration: int) -> None:
    kept = [json.dumps(row) + "\n" for row in read_metrics(path) if row["iteration"] <= iteration]
    aside = path.with_suffix(".building")
    aside.write_text("".join(kept))
    os.replace(aside, path)


def _free_name(path: Path) -> Path:
    number = 1
    while (name := path.with_suffix(f".{number}.jsonl")).exists():
        number += 1
    return name


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
