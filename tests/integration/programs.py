"""Run the repository's programs as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
#: torchrun's words up to its number of ranks. ``--local-addr`` keeps torchrun from looking up this machine's host name,
#: which may be unknown.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
            "--nproc-per-node"]


def run_program(*words: object, timeout: float = 120, cwd: Path = ROOT,
                **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command and return its exit code and its output as text.

    The command gets the variables of this process and those in ``environment``.
    """
    return subprocess.run([str(word) for word in words], cwd=cwd, env={**os.environ, **environment}, text=True,
                          capture_output=True, timeout=timeout, check=False)


def run_as_shown(commands: str, directory: Path, timeout: float) -> str:
    """Run commands as a document or a help text shows them, and return what they print.

    They run in ``directory``, which gets links to the checkout's programs, with this interpreter as ``python``.
    torchrun gets a free port, and an address that needs no look-up of the machine's name.

    Raises:
        AssertionError: a command fails.
    """
    for name in ("pretrain_gpt.py", "tools", "megatron_sp"):
        if not (directory / name).exists():
            (directory / name).symlink_to(ROOT / name)
    script = commands.replace("torchrun ", "torchrun --standalone --local-addr 127.0.0.1 ")
    (directory / "run.sh").write_text("set -euo pipefail\n" + script, encoding="utf-8")
    done = run_program("bash", "run.sh", cwd=directory, timeout=timeout, OMP_NUM_THREADS="1",
                       PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_tool(name: str, *words: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run ``tools/name`` with this interpreter."""
    return run_program(sys.executable, ROOT / "tools" / name, *words, timeout=timeout)
