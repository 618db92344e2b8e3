"""Try kernels of other packages in a child process, so that a kernel that crashes or hangs cannot harm the run.

A kernel that reads memory of others leaves its process with a GPU that it can no longer use, or ends the process. A
child pays for that instead of the run::

    run      start child --------- read --- read --- read: the child is gone - start child ------- read
    child 1     import, try A -> passed  try B -> passed  try C: crashes
    child 2                                                                     import, try D -> passed

A child tries one kernel after another and reports each result at once. After the first one that does not pass, its
process is not trusted any more: the run ends it, and a new child tries the rest. This module does not import torch, so
that a child that needs no torch starts in a moment.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, Any

#: Seconds that one trial may take. FlashAttention 4 compiles its kernels in its trial; the first trial of a child also
#: waits for the import of torch.
LIMIT = 240.0
#: Seconds that all trials of a run may take together. The other ranks wait for the slowest one in a collective, which
#: ends a run after ``--distributed-timeout-minutes``, 10 by default.
TOTAL = 480.0
#: What a child runs. Its module path must be that of the run before it can import this module.
PROGRAM = ("import json, sys; task = json.loads(sys.stdin.readline()); sys.path[:] = task['path']; "
           "from megatron_sp.model.child_trials import run_trials; run_trials(task)")
#: Characters of what a child printed that a message repeats.
LONGEST_QUOTE = 200


@dataclass(frozen=True)
class Outcome:
    """What came out of the trial of one kernel.

    Args:
        passed: the kernel may be used.
        why: why the kernel did not pass, as the end of a sentence that begins with its name: "gives wrong results".
        missing: its package is not installed, which is no fault.
        found: what the trial measured, as JSON allows.
    """

    passed: bool
    why: str = ""
    missing: bool = False
    found: dict[str, Any] = field(default_factory=dict)


def try_in_children(trial: str, names: Sequence[str], given: Mapping[str, Any], limit: float = LIMIT,
                    total: float = TOTAL) -> dict[str, Outcome]:
    """Run a trial of each kernel in child processes and return the outcomes by name.

    Args:
        trial: "module:function"; the function is called as ``function(name, **given)`` and returns an ``Outcome``.
        names: names of the kernels, in the order of their trials.
        given: further arguments, made of JSON values.
        limit, total: seconds that one trial may take, and all of them together.
    """
    outcomes: dict[str, Outcome] = {}
    end = time.monotonic() + total
    while left := [name for name in names if name not in outcomes]:
        if time.monotonic() >= end:
            late = Outcome(False, f"is not tried, because the trials before it took {total:g} seconds")
            return outcomes | dict.fromkeys(left, late)
        try:
            outcomes |= _try_in_one_child(trial, left, given, limit, end)
        except OSError as error:
            why = f"cannot be tried, because no process could be started: {error}"
            return outcomes | dict.fromkeys(left, Outcome(False, why))
    return outcomes


def _try_in_one_child(trial: str, names: Sequence[str], given: Mapping[str, Any], limit: float,
                      end: float) -> dict[str, Outcome]:
    """Return the outcomes up to the first kernel that did not pass, at least one.

    Args:
        end: when all trials must have ended, in ``time.monotonic()``.
    """
    task = {"path": sys.path, "trial": trial, "names": list(names), "given": dict(given)}
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryFile("w+b") as said:
        child = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                 stderr=said)
        assert child.stdin is not None and child.stdout is not None
        try:
            # the child has ended already; its missing result will be reported
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(json.dumps(task).encode() + b"\n")
                child.stdin.flush()  # stdin stays open, because its end would tell the child that the run has ended
            for name in names:
                outcomes[name] = _read_outcome(child, said, min(limit, max(0.0, end - time.monotonic())))
                if not (outcomes[name].passed or outcomes[name].missing):
                    break
        finally:
            _end(child)
    return outcomes


def _read_outcome(child: subprocess.Popen[bytes], said: IO[bytes], limit: float) -> Outcome:
    line, deadline = b"", time.monotonic() + limit
    assert child.stdout is not None
    waiting = select.poll()
    waiting.register(child.stdout, select.POLLIN)
    while not line.endswith(b"\n"):
        if not waiting.poll(1000 * max(0.0, deadline - time.monotonic())):
            return Outcome(False, f"does not finish its trial within {limit:.0f} seconds" + _quote(said))
        byte = os.read(child.stdout.fileno(), 1)  # a buffered read would hide the remaining bytes from ``poll``
        if not byte:
            return Outcome(False, _end_in_words(child) + _quote(said))
        line += byte
    return Outcome(**json.loads(line))


def _end_in_words(child: subprocess.Popen[bytes]) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=10)
    code = child.returncode or 0
    if code >= 0:
        return f"ends the process that tries it, with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"crashes the process that tries it ({name})"


def _quote(said: IO[bytes]) -> str:
    """Return the last line that a child printed, as the end of a sentence; "" if it printed nothing."""
    said.seek(0)
    lines = said.read().decode(errors="replace").strip().splitlines()
    return f'. The last line that it printed: "{lines[-1].strip()[:LONGEST_QUOTE]}"' if lines else ""


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs may hold even a killed process
        child.wait(timeout=10)
    for stream in (child.stdin, child.stdout):
        with contextlib.suppress(OSError):
            if stream is not None:
                stream.close()


# ---------------------------------------------------------------- in the child

def run_trials(task: Mapping[str, Any]) -> None:
    """Run the trials of a task and write one line for each. It ends the process.

    What packages print to standard output goes to standard error, so that it is not taken for a result.
    """
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=_end_with_the_run, daemon=True).start()
    module, _, name = task["trial"].partition(":")
    for kernel in task["names"]:
        try:
            outcome = getattr(importlib.import_module(module), name)(kernel, **task["given"])
        except BaseException as error:  # noqa: BLE001 (whatever another package raises, its kernel did not pass)
            outcome = Outcome(False, error_in_words(error))
        results.write(json.dumps(asdict(outcome)) + "\n")
        results.flush()
    sys.stderr.flush()
    os._exit(0)  # without the exit functions of packages, which may hang where a kernel has failed


def error_in_words(error: BaseException) -> str:
    """Return an error as the end of a sentence that begins with the name of a kernel."""
    first = str(error).strip().partition("\n")[0].rstrip(".")[:LONGEST_QUOTE]
    return f"raises {type(error).__name__}" + (f": {first}" if first else "")


def _end_with_the_run() -> None:
    """End this process when the run's end of the pipe closes, so that no child outlives a run that was killed."""
    sys.stdin.buffer.read()
    os._exit(1)
