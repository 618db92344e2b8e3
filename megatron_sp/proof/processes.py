"""Start processes on this machine that form a process group on CPUs, for a proof without a launcher.

They are forked from a server process that has imported torch once. They meet through a store in the parent, which
lets the system choose a free port.
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
#: Seconds to wait for errors of other ranks after the first rank has reported an error.
GRACE = 2.0


class ProcessesFailedError(RuntimeError):
    """A process raised an exception, died, or did not finish in time. The message has its rank and its traceback."""


def run_processes(function: Callable[..., Any], world_size: int, *args: Any, timeout: float) -> Any:
    """Call ``function(*args)`` on every rank of a new process group and return rank 0's result.

    Args:
        function: a function at the top level of a module, so that it can be pickled.
        world_size: number of processes.
        args: arguments of the function; they must be picklable.
        timeout: seconds after which the processes are killed.

    Raises:
        ProcessesFailedError: a process failed; the message has the traceback of the first one.
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
    """Wait for the answers of all ranks and return rank 0's result."""
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
    """Run one rank: join the process group, call the function, and send the result or the traceback to the parent."""
    try:
        import torch

        torch.set_num_threads(1)
        runtime.join_local_group(rank, world_size, port)
        answer = True, function(*args)
        runtime.stop()
    except BaseException:  # of any kind: the parent raises it
        answer = False, traceback.format_exc()
    connection.send(answer if rank == 0 or not answer[0] else (True, None))
