"""A directory with little disk space, for tests of what happens when a disk is full."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def small_disk(directory: Path, kib: int = 64) -> Iterator[Path]:
    """Limit the space of ``directory`` to ``kib`` KiB during the ``with`` statement.

    As root, a tmpfs of that size is mounted there. Otherwise the kernel limits the size of every file that this process
    writes: errors then have another text, but occur at the same places.
    """
    directory.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", str(directory)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not mounted:
        resource.setrlimit(resource.RLIMIT_FSIZE, (kib << 10, before[1]))
    try:
        yield directory
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(directory)], check=True)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


#: The messages of errors under the two ways to limit the space.
FULL = r"(No space left on device|File too large|\d+ requested and \d+ written; the disk may be full)"
