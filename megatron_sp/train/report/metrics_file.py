"""Write metrics.jsonl: one JSON object per line. A resumed run continues the file. Imports no torch."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from megatron_sp.errors import ConfigError

NAME = "metrics.jsonl"


class MetricsFile:
    """Append rows to ``directory/metrics.jsonl``. Open it with ``start_new``, ``resume`` or ``append_to``.

    Attributes:
        notes: sentences for the log about a file that existed before.
    """

    def __init__(self, directory: str | Path):
        self.path = Path(directory) / NAME
        self.notes: list[str] = []
        self._file: BinaryIO | None = None
        self._row_is_cut = False

    @classmethod
    def start_new(cls, directory: str | Path) -> MetricsFile:
        """Start a new file. An existing one gets the first free name of ``metrics.1.jsonl``, ``metrics.2.jsonl`` ...

        Raises:
            ConfigError: the directory cannot be written.
        """
        metrics = cls(directory)
        with _naming_file_in_errors(metrics.path):
            metrics.path.parent.mkdir(parents=True, exist_ok=True)
            if metrics.path.exists() and metrics.path.stat().st_size:
                metrics.notes.append(f"{metrics.path} of an earlier run is kept as {_set_aside(metrics.path)}")
            return metrics._open()

    @classmethod
    def resume(cls, directory: str | Path, iteration: int) -> MetricsFile:
        """Continue the file of the run that is resumed at ``iteration``.

        Rows after this iteration and an incomplete last line are removed, because the resumed run repeats their steps.
        When other lines cannot be read, a copy of the whole file is kept under another name.

        Raises:
            ConfigError: the directory cannot be written.
        """
        metrics = cls(directory)
        with _naming_file_in_errors(metrics.path):
            metrics.path.parent.mkdir(parents=True, exist_ok=True)
            if metrics.path.exists():
                rows, num_unreadable = _read_rows(metrics.path)
                if num_unreadable:
                    metrics.notes.append(
                        f"WARNING: {metrics.path} has {num_unreadable} unreadable line{'s' * (num_unreadable > 1)}; it "
                        f"is kept as {_set_aside(metrics.path)}, and the readable rows are kept in {metrics.path}")
                aside = metrics.path.with_suffix(".building")
                aside.write_text("".join(json.dumps(row) + "\n" for row in rows if row["iteration"] <= iteration))
                os.replace(aside, metrics.path)
            return metrics._open()

    @classmethod
    def append_to(cls, directory: str | Path) -> MetricsFile:
        """Append to the file and remove nothing; for a run that only evaluates.

        Raises:
            ConfigError: the directory cannot be written.
        """
        metrics = cls(directory)
        with _naming_file_in_errors(metrics.path):
            metrics.path.parent.mkdir(parents=True, exist_ok=True)
            return metrics._open()

    def _open(self) -> MetricsFile:
        if self.path.exists() and self.path.stat().st_size:
            with self.path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                self._row_is_cut = file.read(1) != b"\n"
        # Unbuffered, so that a row is in the file when ``write`` returns, and closing cannot fail on a full disk.
        self._file = self.path.open("ab", buffering=0)
        return self

    def write(self, row: dict[str, Any]) -> None:
        """Append one row; numbers that are not finite become null.

        Raises:
            OSError: the row could not be written, or not in full. Later rows may be written all the same.
        """
        assert self._file is not None
        line = json.dumps({key: _finite(value) for key, value in row.items()}, allow_nan=False) + "\n"
        data = ("\n" * self._row_is_cut + line).encode()
        written = self._file.write(data)
        if written < len(data):
            self._row_is_cut = self._row_is_cut or written > 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._row_is_cut = False

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file; lines that cannot be read are left out.

    Raises:
        OSError: the file cannot be read.
    """
    return _read_rows(Path(path))[0]


def _read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the rows, and the number of lines that cannot be read, without an incomplete last line."""
    rows, unreadable = [], 0
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line.decode())
        except ValueError:
            unreadable += bool(line) and number < len(lines)     # the last line ends in no line break
            continue
        if isinstance(row, dict) and isinstance(row.get("iteration"), int):
            rows.append(row)
        else:
            unreadable += 1
    return rows, unreadable


@contextmanager
def _naming_file_in_errors(path: Path) -> Iterator[None]:
    """Turn an operating system's error within the block into a ConfigError that names the file and a cure."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path.absolute()} cannot be written ({error.strerror}); give --save a directory with write "
                          "permission and free space") from None


def _set_aside(path: Path) -> Path:
    """Rename a file to the first free name ``metrics.N.jsonl``, and return the name."""
    number = 1
    while (name := path.with_suffix(f".{number}.jsonl")).exists():
        number += 1
    os.replace(path, name)
    return name


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
