"""Running the repository's programs as a person would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
#: The number of ranks follows. ``--local-addr``, because torchrun looks the host name up, which may not resolve.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
            "--nproc-per-node"]


def run_program(*words: object, timeout: float = 120, cwd: Path = ROOT,
                **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command line with captured text output; ``environment`` is added to the variables."""
    return subprocess.run([str(word) for word in words], cwd=cwd, env={**os.environ, **environment}, text=True,
                          capture_output=True, timeout=timeout, check=False)


def run_tool(name: str, *words: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run ``tools/name`` with this interpreter."""
    return run_program(sys.executable, ROOT / "tools" / name, *words, timeout=timeout)
