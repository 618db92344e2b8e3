"""Kill a process just before each of its changes to the file system: before another change in each attempt.

This module runs as a program, with one thread and without large imports, so that it can fork. For attempt N it copies a
directory and forks a child. The child exits without any clean-up just before its Nth call that opens a file or changes
names. The last attempt is the one in which the child reaches its end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatron_sp.checkpoint import files, writing

#: Audit events that CPython raises just before a system call on files.
EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.scandir", "os.utime", "os.chmod"}

#: Exit code of a child that was killed before it had finished.
KILLED = 9


def save(directory: Path, iteration: int, text: str) -> Path:
    """Save a checkpoint whose only tensor file holds ``text``."""
    building = writing.start_building(directory, iteration)
    tensors = building / "__0_0.distcp"
    tensors.write_text(text)
    return writing.finish_building(building, iteration, {tensors.name: files.manifest_entry(tensors)})


def killed_saves(source: Path, work: Path, iteration: int, text: str) -> list[Path]:
    """Return copies of ``source`` in which ``save`` was killed before change 1, 2 ...; in the last one it finished."""
    command = [sys.executable, "-m", "tests.helpers.kills", str(source), str(work), str(iteration), text]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return [work / str(number) for number in range(int(result.stdout))]


def run_until_change(number: int, work: Callable[[], object]) -> int:
    """Call ``work`` in a forked child that ends just before its file system change ``number`` (from 0).

    Call it in a process with one thread, because the child is a fork.

    Returns:
        ``KILLED``, or the child's exit code when it finished before.
    """
    child = os.fork()
    if child == 0:
        left = number

        def count(event: str, _: Any) -> None:
            nonlocal left
            if event in EVENTS:
                if left == 0:
                    os._exit(KILLED)
                left -= 1

        sys.addaudithook(count)
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _main(source: str, work: str, iteration: str, text: str) -> None:
    number, code = 0, KILLED
    while code == KILLED:
        directory = Path(work) / str(number)
        shutil.copytree(source, directory)
        code = run_until_change(number, partial(save, directory, int(iteration), text))
        number += 1
    assert code == 0, f"the save failed in try {number - 1}"
    print(number)


if __name__ == "__main__":
    _main(*sys.argv[1:])
