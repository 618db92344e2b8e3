"""Trials of kernels that crash, hang, print or raise, for tests of the processes that run them. Imports no torch."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from megatron_sp.model.child_trials import Outcome, try_in_children

TRIAL = "tests.helpers.stand_in_trials:stand_in"


def stand_in(name: str, *, pid_file: str = "") -> Outcome:
    """Do what the name says."""
    if pid_file:
        Path(pid_file).write_text(str(os.getpid()))
    if name == "raises":
        raise RuntimeError("no kernel image is available.\nand much more")
    if name == "crashes":
        print("CUDA error: an illegal memory access was encountered", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "exits":
        os._exit(7)
    if name == "hangs":
        time.sleep(600)
    if name == "prints":
        os.write(1, b'{"passed": false}\n')
        print("compiling kernels", flush=True)
    if name == "wrong":
        return Outcome(False, "gives wrong results")
    return Outcome(name != "missing", missing=name == "missing", found={"process": os.getpid()})


if __name__ == "__main__":
    try_in_children(TRIAL, ["hangs"], {"pid_file": sys.argv[1]})
