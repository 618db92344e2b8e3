"""Process start and stop: environment variables, process group, device, exit codes.

The only module that reads environment variables. Importing it does not import torch, so that a
mistake on the command line is reported before anything heavy happens.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from megatron_sp.errors import ConfigError, UserError

if TYPE_CHECKING:
    import torch

    from megatron_sp.config.schema import Parallel

#: What gloo and NCCL say when another rank is gone.
PEER_IS_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "ncclRemoteError",
                "NCCL communicator was aborted")


@dataclass(frozen=True)
class Environment:
    """What the launcher says about this process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    launched: bool = False
    local_world_size: int = 0  # processes of this node; 0: not known


def launch_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Rank, world size and local rank from torchrun, or one plain process.

    Raises:
        ConfigError: some of the variables are set but not all, or they contradict each other.
    """
    variables = os.environ if variables is None else variables
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    found = {name: variables[name] for name in names if variables.get(name)}
    if "RANK" not in found and "WORLD_SIZE" not in found:
        return Environment()
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in found]
    if missing:
        raise ConfigError(f"the launcher set {', '.join(found)} but not {', '.join(missing)}; start with torchrun, "
                          f"or unset {', '.join(found)} for one plain process")
    try:
        rank, world = int(found["RANK"]), int(found["WORLD_SIZE"])
        local = int(found.get("LOCAL_RANK", rank))
        on_node = int(variables.get("LOCAL_WORLD_SIZE") or 0)
    except ValueError:
        raise ConfigError(f"the launcher's variables are not whole numbers: {found}") from None
    if not 0 <= rank < world:
        raise ConfigError(f"RANK={rank} must be at least 0 and below WORLD_SIZE={world}")
    return Environment(rank, world, local, launched=True, local_world_size=on_node)


def start(parallel: Parallel, environment: Environment) -> torch.device:
    """Join the process group and take a device.

    Without a launcher a group of one is made, so that one process runs the same code as many.
    A group that exists already is used as it is.

    Returns:
        This rank's device: its GPU with the nccl backend, else the CPU.
    """
    import torch
    import torch.distributed as dist

    backend = parallel.distributed_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend == "nccl" and not torch.cuda.is_available():
        raise ConfigError("--distributed-backend nccl needs a GPU and none is visible; leave the flag out or use gloo")
    device = torch.device("cpu")
    if backend == "nccl":
        if environment.local_rank >= torch.cuda.device_count():
            raise ConfigError(f"local rank {environment.local_rank} has no GPU: {torch.cuda.device_count()} visible; "
                              "start at most one process per GPU or pass --distributed-backend gloo")
        device = torch.device("cuda", environment.local_rank)
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
        if environment.launched:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    return device


def join_local_group(rank: int, world_size: int, port: int) -> None:
    """Join a process group on this machine's CPU, whose first store listens on a port (see ``proof.processes``)."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(minutes=2))


def stop() -> None:
    """Leave the process group, all ranks together."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()  # a rank that leaves early makes its peers' last collective fail
        dist.destroy_process_group()


def run_program(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Run a program's ``main(argv)`` and exit; a user's mistake is printed once and exits with 2.

    A rank that another one left behind says so in a line, so that the other's message is not buried.
    """
    try:
        code = main(sys.argv[1:]) or 0
    except UserError as error:
        message = f"{type(error).__name__}: {error}"
        if _is_first_to_say(message):
            print(message, file=sys.stderr, flush=True)
        code = error.exit_code
    except KeyboardInterrupt:
        if _is_first_to_say("interrupted"):
            print("interrupted", file=sys.stderr, flush=True)
        code = 128 + signal.SIGINT
    except BrokenPipeError:
        # a reader such as `head` has seen enough; other ranks wait for this one, so let the launcher end them
        code = 0 if os.environ.get("WORLD_SIZE", "1") == "1" else 128 + signal.SIGPIPE
    except Exception as error:
        sign = _lost_peer(error)
        if sign and os.environ.get("WORLD_SIZE", "1") != "1":
            print(f"rank {os.environ.get('RANK')} stopped because another rank ended ({sign}); its message is above "
                  "or in its log", file=sys.stderr, flush=True)
        else:
            sys.excepthook(type(error), error, error.__traceback__)  # here, since what follows leaves at once
        code = 1
    if "torch" in sys.modules:
        # Threads of process groups outlive them, and one that meets the interpreter while it shuts down
        # aborts the process ("terminate called without an active exception"): leave without a shutdown.
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _lost_peer(error: BaseException | None) -> str:
    """What an error, or one that it was raised from (pipelines wrap theirs), says about a rank that is gone; or ""."""
    seen: list[BaseException] = []      # a chain can be a circle
    while error is not None and error not in seen:
        if sign := next((words for words in PEER_IS_GONE if words in str(error)), ""):
            return sign
        seen.append(error)
        error = error.__cause__ or error.__context__
    return ""


def _is_first_to_say(message: str) -> bool:
    """Whether no other rank of this launcher said the same in the last minute.

    Most mistakes are seen by all ranks and should be read once; one that a single rank meets (a damaged
    page of a file, say) must be heard as well. Ranks of a node agree through a file's creation.
    """
    if "RANK" not in os.environ or os.environ.get("WORLD_SIZE") == "1":
        return True
    attempt = [os.environ.get(name, "") for name in ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")]
    digest = hashlib.blake2b(" ".join([*attempt, message]).encode(), digest_size=8).hexdigest()
    path = os.path.join(tempfile.gettempdir(), f"megatron_sp-{os.getppid()}-{digest}")
    try:
        if os.path.exists(path) and time.time() - os.path.getmtime(path) > 60:
            os.unlink(path)  # of a launcher long gone whose number came round again
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:
        return os.environ["RANK"] == "0"
    return True
