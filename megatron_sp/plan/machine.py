"""How much memory this machine lets its processes use."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/")


def node_memory(root: Path = ROOT) -> int:
    """Return the bytes of main memory that the processes of this node may use together; 0 where nothing says.

    Containers and batch systems limit a job by control groups, whose limit is below what the machine has. A group's
    limit holds for all groups inside of it, so the smallest limit from this process's group up to the root applies.

    Args:
        root: where ``proc`` and ``sys`` are mounted.
    """
    limits = list(_group_limits(root))
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            limits.append(1024 * int(line.split()[1]))
    return min(limits, default=0)


def _group_limits(root: Path) -> list[int]:
    """Return the limits of this process's control groups; of version 2, and of version 1's memory controller."""
    found = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        inner = path.strip("/").split("/")
        for depth in range(len(inner) + 1):  # a container may see its own group as the root, whatever the path says
            text = _read(mount.joinpath(*inner[:depth]) / name).strip()
            if text.isdigit():  # "max" in version 2, a number beyond all memory in version 1: no limit
                found.append(int(text))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
