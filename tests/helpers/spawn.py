"""Start gloo ranks on CPUs for tests, quickly, and kill them when they hang.

``run_ranks(fn, 4, *args)`` starts four processes that form a process group, calls ``fn(*args)`` on each, and returns
the results in rank order. If ranks fail, the parent raises their tracebacks. If ranks hang, it kills them and raises
an error with the stack of each. The processes are forked from a server process that has imported torch once, so eight
ranks start in a quarter of a second. Each call has new processes, because torch keeps the meshes of destroyed process
groups in its caches. The ranks use no port: they meet through a file in a temporary directory.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

#: The type of ``run_ranks``, which tests get as the fixture ``ranks``.
RunRanks = Callable[..., list[Any]]

#: Modules that the server imports before it forks ranks. None of them may start a thread, which a fork would lose.
PRELOAD = ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor",
           "torch.distributed.checkpoint", "megatron_sp.model.build", "megatron_sp.train.trainer",
           "megatron_sp.train.setup", "megatron_sp.data.build", "pytest"]

#: Seconds to wait for errors of other ranks after the first rank has reported an error.
GRACE = 1.0


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60) -> list[Any]:
    """Call ``fn(*args)`` on ``world_size`` new ranks.

    Args:
        fn: function at the top level of a module. When it is called, the default process group exists and the
            launcher's environment variables are set.
        world_size: number of ranks.
        args: arguments of the function; they must be picklable.
        timeout: seconds for the call, after which its processes are killed.

    Returns:
        The results in rank order (anything that pickles).

    Raises:
        AssertionError: a rank failed (with its traceback), died, or did not finish in time.
    """
    with tempfile.TemporaryDirectory(prefix="ranks_") as directory:
        ranks = [_Rank(rank, world_size, Path(directory)) for rank in range(world_size)]
        try:
            message = pickle.dumps((fn, args))  # not torch's pickler, which shares tensors through file descriptors
            for rank in ranks:
                rank.connection.send_bytes(message)
            results, errors, hung = _collect(ranks, time.monotonic() + timeout)
            if not errors and not hung:
                return [results[rank.number] for rank in ranks]
            reports = _reports(errors) + _places(hung, "was waiting" if errors else f"did not finish in {timeout:g} s")
        finally:
            for rank in ranks:
                rank.kill()
    raise AssertionError(f"{getattr(fn, '__name__', fn)} on {world_size} ranks\n" + "\n".join(reports))


def kill_ranks(fn: Callable[..., Any], world_size: int, *args: Any, wait_until: Callable[[], None],
               victims: Sequence[int] = (), timeout: float = 60) -> bool:
    """Call ``fn(*args)`` on new ranks and kill them (SIGKILL) at a moment that the caller chooses.

    Args:
        wait_until: returns at the moment of the kill.
        victims: ranks to kill at that moment; none: all. The others must then end by themselves.
        timeout: seconds that these others may take.

    Returns:
        whether the ranks had finished before they were killed

    Raises:
        AssertionError: a rank whose peer was killed does not end.
    """
    with tempfile.TemporaryDirectory(prefix="ranks_") as directory:
        ranks = [_Rank(rank, world_size, Path(directory)) for rank in range(world_size)]
        try:
            message = pickle.dumps((fn, args))
            for rank in ranks:
                rank.connection.send_bytes(message)
            wait_until()
            finished = all(rank.connection.poll() for rank in ranks)
            dying = [ranks[number] for number in victims] or ranks
            for rank in dying:
                rank.process.kill()
            survivors = [rank for rank in ranks if rank not in dying]
            late = _collect(survivors, time.monotonic() + timeout)[2]
            reports = _places(late, f"did not end within {timeout:g} s after its peer was killed")
        finally:
            for rank in ranks:
                rank.kill()
    assert not reports, "\n".join(reports)
    return finished


class _Rank:
    """A rank as the parent sees it: its process and the connection to it."""

    def __init__(self, number: int, world_size: int, directory: Path):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.number = number
        self.trace = directory / f"where_{number}"
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=_serve, args=(number, world_size, theirs, str(directory / "store"), str(self.trace)), daemon=True)
        self.process.start()
        theirs.close()

    def answer(self) -> tuple[bool, Any]:
        """Receive the rank's answer: whether it succeeded, and its result or its traceback."""
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            self.process.join(1)
            return False, f"the process died with exit code {self.process.exitcode}"

    def kill(self) -> None:
        """Kill this rank's process, after a moment in which one that has answered can exit by itself."""
        self.connection.close()
        self.process.join(0.01)
        self.process.kill()
        self.process.join()


def _collect(ranks: list[_Rank], deadline: float) -> tuple[dict[int, Any], dict[int, str], list[_Rank]]:
    """Wait for all ranks; return the results and the errors by rank, and the ranks that did not answer."""
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    waiting = {rank.connection: rank for rank in ranks}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for connection in wait(list(waiting), timeout=left):
            rank = waiting.pop(connection)  # type: ignore[call-overload]
            succeeded, value = rank.answer()
            (results if succeeded else errors)[rank.number] = value
            if not succeeded:
                deadline = min(deadline, time.monotonic() + GRACE)
    return results, errors, list(waiting.values())


def _reports(errors: dict[int, str]) -> list[str]:
    first = next(iter(errors.values()), "")
    return [f"rank {rank} failed:\n{'the same' if index and text == first else text}"
            for index, (rank, text) in enumerate(errors.items())]


def _places(ranks: list[_Rank], verdict: str) -> list[str]:
    """Return a line and the stack of each rank that hangs.

    SIGUSR2 makes faulthandler write the stack, even while the rank waits in a collective. SIGUSR1 would ask a training
    run to stop.
    """
    for rank in ranks:
        if rank.process.pid and rank.trace.exists():
            os.kill(rank.process.pid, signal.SIGUSR2)
    time.sleep(0.3 if ranks else 0)
    return [f"rank {rank.number} {verdict}:\n{rank.trace.read_text() if rank.trace.exists() else 'not started'}"
            for rank in ranks]


def _serve(rank: int, world_size: int, connection: Connection, store: str, trace: str) -> None:
    """Run one rank: receive a function, call it within a process group, and send back its result or traceback."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
                      LOCAL_WORLD_SIZE=str(world_size), CUDA_VISIBLE_DEVICES="",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # the group is formed through a file instead
    with open(trace, "w") as file:
        faulthandler.register(signal.SIGUSR2, file=file)
        try:
            import torch
            import torch.distributed as dist

            torch.set_num_threads(1)
            fn, args = pickle.loads(connection.recv_bytes())
            dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size,
                                    timeout=timedelta(minutes=10))
            answer = pickle.dumps((True, fn(*args)))
            if dist.is_initialized():  # a tested program may have destroyed the group
                dist.barrier()
                dist.destroy_process_group()
        except BaseException:  # also SystemExit and pytest's own: the parent raises it again
            answer = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)
