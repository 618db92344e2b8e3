#!/usr/bin/env python3
"""Run a command and print the peak resident memory of every Python process it starts, and its time.

    python tools/peak_memory.py -- python pretrain_gpt.py FLAGS
    python tools/peak_memory.py --least 200 -- torchrun --nproc-per-node 2 pretrain_gpt.py FLAGS

Reads the kernel's own high-water marks (Linux), so a short peak is not missed. A launcher's process is
listed too; ``--match`` keeps only processes with a word in their command line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

PROC = Path("/proc")
INTERVAL = 0.05  # seconds between looks; only what grows in a process's last moment can be missed


def children(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for task in (PROC / str(pid) / "task").glob("*"):
        try:
            found += [one for child in (task / "children").read_text().split() for one in children(int(child))]
        except (OSError, ValueError):
            continue  # it has just ended
    return found


def high_water(pid: int) -> int:
    """Bytes; 0 for a process that has ended."""
    try:
        lines = (PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def command_line(pid: int) -> str:
    try:
        return (PROC / str(pid) / "cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def watch(command: list[str], match: str) -> tuple[int, float, list[int]]:
    """Run the command; its exit status, seconds, and the peaks in bytes of its matching processes, largest first."""
    started, peaks, matching = time.monotonic(), dict[int, int](), dict[int, bool]()
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            for pid in children(process.pid):
                peaks[pid] = max(peaks.get(pid, 0), high_water(pid))
                line = command_line(pid)
                if line:  # a process changes its command line once, when the program replaces the fork
                    matching[pid] = match in line and "torch.distributed.run" not in line
            time.sleep(INTERVAL)
    seconds = time.monotonic() - started
    return process.returncode, seconds, sorted((peaks[pid] for pid in peaks if matching.get(pid)), reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="pretrain_gpt.py", help="word of the command line (default: %(default)s)")
    parser.add_argument("--least", type=float, default=0.0, metavar="MIB", help="leave out smaller processes")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("command", nargs="+", metavar="-- COMMAND")
    arguments = parser.parse_args()
    code, seconds, peaks = watch(arguments.command, arguments.match)
    peaks = [peak for peak in peaks if peak >= arguments.least * 2**20]
    print(f"{seconds:.0f} s; peak resident memory of each process: "
          f"{', '.join(f'{peak / 2**20:,.0f} MiB' for peak in peaks) or 'none seen'}", flush=True)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"seconds": round(seconds, 1), "peaks": peaks}))
    sys.exit(code)


if __name__ == "__main__":
    main()
