"""Processes on this machine that form a process group on CPU, for a proof without a launcher.

They are forked from a server that has imported torch once, and meet through a store that the parent holds,
as torchrun's do, so that no port has to be guessed.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from megatron_sp import runtime

PRELOAD = ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "megatron_sp.proof.steps"]
#: Seconds the others get to report an error of their own after the first one.
GRACE = 2.0


class ProcessesFailedError(RuntimeError):
    """A process failed, died or did not finish; the text has its traceback."""


def run_processes(function: Callable[..., Any], world_size: int, *args: Any, timeout: float) -> Any:
    """Call ``function(*args)`` on every rank of a new process group and return rank 0's result.

    Args:
        function: at the top level of a module.
        timeout: seconds, after which the processes are ended.

    Raises:
        ProcessesFailedError: with the traceback of the first process that failed.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    started: dict[Connection, tuple[int, BaseProcess]] = {}
    try:
        for rank in range(world_size):
            mine, theirs = context.Pipe(duplex=False)
            process: BaseProcess = context.Process(  # type: ignore[attr-defined,unused-ignore]
                target=_serve, args=(function, args, rank, world_size, store.port, theirs), daemon=True)
            process.start()
            theirs.close()
            started[mine] = (rank, process)
        return _collect(started, time.monotonic() + timeout, timeout)
    finally:
        for _, process in started.values():
            process.join(0.1)
            process.kill()


def _collect(started: dict[Connection, tuple[int, BaseProcess]], deadline: float, timeout: float) -> Any:
    """Rank 0's result."""
    waiting, errors, result = dict(started), list[str](), None
    while waiting and (left := deadline - time.monotonic()) > 0:
        for connection in wait(list(waiting), timeout=left):
            assert isinstance(connection, Connection)
            rank, _ = waiting.pop(connection)
            try:
                succeeded, value = connection.recv()
            except EOFError:
                succeeded, value = False, "the process died"
            if not succeeded:
                errors.append(f"rank {rank}: {value}")
                deadline = min(deadline, time.monotonic() + GRACE)
            elif rank == 0:
                result = value
    if errors:
        raise ProcessesFailedError(errors[0])
    if waiting:
        late = ", ".join(str(rank) for rank, _ in waiting.values())
        raise ProcessesFailedError(f"rank {late} did not finish in {timeout:g} s")
    return result


def _serve(function: Callable[..., Any], args: tuple[Any, ...], rank: int, world_size: int, port: int,
           connection: Connection) -> None:
    """A rank's life."""
    try:
        import torch

        torch.set_num_threads(1)
        runtime.join_local_group(rank, world_size, port)
        answer = True, function(*args)
        runtime.stop()
    except BaseException:  # the parent judges
        answer = False, traceback.format_exc()
    connection.send(answer if rank == 0 or not answer[0] else (True, None))
