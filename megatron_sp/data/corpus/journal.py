"""Remember how far a run of the preprocessor has come, so that another process can continue it.

``PREFIX.unfinished.json`` is replaced as a whole every half minute. It holds what the output depends on, where reading
continues, the sizes of the working files at that place, and the totals so far. What was written to the working files
after that is cut off when the run is continued.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_sp.errors import DataError
from megatron_sp.output_files import cannot_write, complete_file

SECONDS_BETWEEN_NOTES = 30.0
ASIDE = "unfinished"  # last part of the names of the working files


class Journal:
    """The progress file of one output.

    Args:
        prefix: ``--output-prefix``.
    """

    def __init__(self, prefix: str):
        self.prefix = prefix
        self.path = f"{prefix}.{ASIDE}.json"

    def read(self) -> dict[str, Any] | None:
        """Return what was noted last, or None if there is nothing to continue.

        Raises:
            DataError: the file is damaged.
        """
        try:
            content = json.loads(Path(self.path).read_text(encoding="utf-8"))
            return {name: content[name] for name in ("settings", "next", "sizes", "finished", "summary")}
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self.path} cannot be read ({error}), so the unfinished run cannot be continued. Remove "
                            f"{self.prefix}*.{ASIDE}* and start again.") from None

    def write(self, content: dict[str, Any]) -> None:
        """Replace the file.

        Raises:
            DataError: the disk is full, or reports another error.
        """
        with complete_file(self.path) as file:
            file.write(json.dumps(content).encode())

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.remove(self.path)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from writing the same output for the duration of the ``with`` block.

        Raises:
            DataError: another process is writing it.
        """
        path = f"{self.prefix}.{ASIDE}.lock"
        try:
            os.makedirs(os.path.dirname(self.prefix) or ".", exist_ok=True)
            file = open(path, "w")  # noqa: SIM115 (closed below)
        except OSError as error:
            raise cannot_write(path, error, "--output-prefix") from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_ours = os.fstat(file.fileno()).st_ino == os.stat(path).st_ino
            except (BlockingIOError, FileNotFoundError):
                is_ours = False  # another process has the lock, or has just removed the file that was opened here
            except OSError:
                is_ours = True  # a file system without locks
            if not is_ours:
                raise DataError(f"--output-prefix {self.prefix}: another process is writing this output; wait for it, "
                                "or give another prefix.")
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    os.remove(path)
