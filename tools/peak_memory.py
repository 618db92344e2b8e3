#!/usr/bin/env python3
"""Run a command, then print how long it took and the peak resident memory of each process that it started.

Examples:

    python tools/peak_memory.py -- python pretrain_gpt.py FLAGS
    python tools/peak_memory.py --least 200 -- torchrun --nproc-per-node 2 pretrain_gpt.py FLAGS

The tool shows only processes whose command line contains the text of --match, and never torchrun itself. It needs
Linux: there the kernel records the peak of each process, so the tool does not miss a short one between two readings.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

PROC = Path("/proc")
#: Seconds between two readings of the kernel's record. A higher peak after the last reading of a process is missed.
INTERVAL = 0.05


def process_tree(pid: int) -> list[int]:
    """Return the ids of a process and of all its descendants."""
    found = [pid]
    for task in (PROC / str(pid) / "task").glob("*"):
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue  # the thread has just ended
        found += [descendant for child in children for descendant in process_tree(int(child))]
    return found


def peak_resident(pid: int) -> int:
    """Return the peak resident memory of a process in bytes; 0 for a process that has ended."""
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
    """Run a command to its end and record the peak memory of its processes.

    Returns:
        The exit status, the seconds, and the peak resident bytes of each process whose command line contains ``match``,
        largest first.
    """
    started, peaks, matching = time.monotonic(), dict[int, int](), dict[int, bool]()
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            for pid in process_tree(process.pid):
                peaks[pid] = max(peaks.get(pid, 0), peak_resident(pid))
                line = command_line(pid)
                if line:  # read again: a forked child has its parent's command line until it starts its own program
                    matching[pid] = match in line and "torch.distributed.run" not in line
            time.sleep(INTERVAL)
    seconds = time.monotonic() - started
    return process.returncode, seconds, sorted((peaks[pid] for pid in peaks if matching.get(pid)), reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="peak_memory.py [--match WORD] [--least MIB] [--json FILE] -- COMMAND")
    group = parser.add_argument_group("what to run and to measure")
    group.add_argument("command", nargs="+", metavar="COMMAND", help="program to run and its arguments, after --")
    group.add_argument("--match", default="pretrain_gpt.py", metavar="WORD",
                       help="measure processes whose command line contains this word (default: %(default)s)")
    group.add_argument("--least", type=float, default=0.0, metavar="MIB",
                       help="leave out processes with a lower peak (default: %(default)g)")
    group = parser.add_argument_group("output")
    group.add_argument("--json", type=Path, metavar="FILE", help="also write the seconds and the peaks (bytes) here")
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
