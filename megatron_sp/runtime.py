"""Process start and stop: environment variables, process group, device, exit codes.

The only module that reads environment variables. Importing it does not import torch, so that a
mistake on the command line is reported before anything heavy happens.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from megatron_sp.check_in import check_in
from megatron_sp.errors import ConfigError, PeerLostError, UserError
from megatron_sp.launchers import OTHER_LAUNCHERS, TORCHRUN, Environment, read_environment

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from megatron_sp.config.schema import Parallel

#: What gloo and NCCL say when another rank is gone.
PEER_IS_GONE = ("Connection closed by peer", "Connection reset by peer", "connectFullMesh failed",
                "remote server shutdown", "Broken pipe", "ncclRemoteError", "NCCL communicator was aborted")
#: Seconds that a failing rank stays, after its message, for the other ranks of its node to report the same mistake.
SAME_MISTAKE_WINDOW = 1.0
PR_SET_PDEATHSIG = 1    # linux/prctl.h


def launch_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Return what the launcher says about this process (see ``launchers.read_environment``).

    Raises:
        ConfigError: the launcher's variables are incomplete or contradict each other, or name a host that is not known
            here.
    """
    environment = read_environment(os.environ if variables is None else variables)
    if variables is None and environment.address and not environment.launcher_holds_store:
        _refuse_unknown_host(environment)
    return environment


def _refuse_unknown_host(environment: Environment) -> None:
    """Raise ConfigError where MASTER_ADDR is no address and no name of a host; torch would wait for its time-out."""
    try:
        socket.getaddrinfo(environment.address, environment.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"MASTER_ADDR={environment.address} is not known on {socket.gethostname()} "
                          f"({getattr(error, 'strerror', '') or error}). Set it to the name or the IP address of rank "
                          "0's node, as the other nodes reach it.") from None


def planning_environment() -> Environment:
    """Return what the launcher says about a process that only plans and starts nothing.

    Without a launcher, WORLD_SIZE alone is the number of processes to plan for.

    Raises:
        ConfigError: the launcher's variables are incomplete or contradict each other.
    """
    ranks = [name for launcher in (TORCHRUN, *OTHER_LAUNCHERS) for name in launcher.rank]
    if any(os.environ.get(name) for name in ranks) or not announced_world_size():
        return launch_environment()
    return Environment(world_size=announced_world_size())


def announced_world_size() -> int:
    """Return the WORLD_SIZE that a user sets for a tool that checks a larger run on this machine; 0 where it is unset.

    Unlike ``launch_environment`` this needs no rank: the tool itself is one plain process.

    Raises:
        ConfigError: the variable is not a whole number of at least 1.
    """
    text = os.environ.get("WORLD_SIZE") or ""
    if text and (not text.isdecimal() or int(text) < 1):
        raise ConfigError(f"WORLD_SIZE={text} must be a whole number of at least 1: the processes of the real run. "
                          "Correct it or unset it.")
    return int(text or 0)


def use_only_cpu() -> None:
    """Hide all GPUs from this process and its children, and give each one compute thread unless the user chose more.

    Call it before torch is imported. Programs that start many processes on few cores would otherwise slow each other.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def keep_tokenizers_single_threaded() -> None:
    """Stop Hugging Face's tokenizers library from starting threads in this process and its children."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def start(parallel: Parallel, environment: Environment, stop_asked: object = None) -> torch.device:
    """Join the process group, choose this rank's device and return it.

    A single process gets a group of its own, so that it runs the same code as many ranks. If the process is in a group
    already, that group is used.

    Args:
        stop_asked: an object that is true once a signal has asked the run to stop (``train.signals.StopSignals``).

    Returns:
        This rank's device: its GPU with the nccl backend, else the CPU.

    Raises:
        ConfigError: there is no GPU for this rank, or two ranks would use the same one.
        PeerLostError: the ranks did not meet.
    """
    import torch
    import torch.distributed as dist

    backend = parallel.distributed_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend == "nccl" and not torch.cuda.is_available():
        raise ConfigError("--distributed-backend nccl needs a GPU and none is visible; leave the flag out or use gloo.")
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", choose_gpu(environment.local_rank, torch.cuda.device_count()))
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return device
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    if environment.world_size == 1:
        _make_group_of_one(backend, timeout)
        return device
    try:
        with _sigterm_ends_process(stop_asked):
            store = meet(environment, timeout)
            if backend == "nccl":
                _refuse_shared_gpu(store, str(torch.cuda.get_device_properties(device).uuid))
            dist.init_process_group(backend, timeout=timeout, store=store, rank=environment.rank,
                                    world_size=environment.world_size)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise PeerLostError(
            f"rank {environment.rank} of {environment.world_size} did not meet the other ranks at MASTER_ADDR "
            f"{environment.address}, MASTER_PORT {environment.port}: {reason}. Another rank may have ended before; its "
            "message is above or in its log. If the port is in use, choose another one.") from None
    return device


def _make_group_of_one(backend: str, timeout: timedelta) -> None:
    """Make a process group of this process alone, also where no network interface is up, which gloo needs."""
    import torch.distributed as dist

    from megatron_sp.torch_internals import backend_without_network

    try:
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    except RuntimeError:
        if backend != "gloo":
            raise
        dist.init_process_group(backend_without_network(), timeout=timeout, store=dist.HashStore(), rank=0,
                                world_size=1)


def choose_gpu(local_rank: int, visible: int) -> int:
    """Return the number of this rank's GPU among the visible ones.

    A launcher that shows each task only its own GPU (``srun --gpus-per-task 1``) makes it device 0 for every rank.

    Raises:
        ConfigError: several GPUs are visible, and fewer than ranks of this node.
    """
    if visible == 1:
        return 0    # ``start`` refuses a GPU that two ranks were given, once the ranks can compare
    if local_rank >= visible:
        raise ConfigError(f"local rank {local_rank} has no GPU: {visible} are visible. Start at most one process per "
                          "GPU, or pass --distributed-backend gloo.")
    return local_rank


def meet(environment: Environment, timeout: timedelta) -> dist.Store:
    """Return the store through which the ranks find each other.

    torchrun keeps one store over its restarts, and keys of an earlier attempt would be taken for those of this one.
    So each attempt has a prefix of its own. On several nodes torchrun counts restarts for each node alone; there the
    numbers may differ, and the store is used as torch would (``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` in front of
    torchrun gives each attempt a new store).
    """
    import torch.distributed as dist

    holds_store = environment.rank == 0 and not environment.launcher_holds_store
    # torchrun has waited for all nodes and numbered the ranks. Ranks of other launchers check in below, so that a
    # message can name those that are missing.
    store = dist.TCPStore(environment.address, environment.port, environment.world_size, is_master=holds_store,
                          timeout=timeout, multi_tenant=True, wait_for_workers=environment.launcher_holds_store)
    if not environment.launcher_holds_store:
        check_in(store, environment.rank, environment.world_size, timeout,
                 lambda line: print(line, file=sys.stderr, flush=True))
    if environment.local_world_size == environment.world_size:
        return dist.PrefixStore(f"attempt {environment.attempt}", store)
    return store


def _refuse_shared_gpu(store: dist.Store, gpu: str) -> None:
    """Raise ConfigError on the second rank that was given this GPU, because NCCL's own error would be less clear."""
    if store.add(f"ranks of GPU {gpu}", 1) > 1:
        raise ConfigError("Two ranks of this node were given the same GPU. Start at most one process per GPU, or pass "
                          "--distributed-backend gloo.")


@contextlib.contextmanager
def _sigterm_ends_process(stop_asked: object) -> Iterator[None]:
    """Let SIGTERM end the process at once while the ranks wait for each other.

    Nothing is trained yet, so nothing is lost. When one rank fails before the ranks have met, torchrun sends SIGTERM
    to the others; a handler that only notes the signal would leave them waiting until torchrun kills them after 30 s.
    """
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if stop_asked:
        signal.raise_signal(signal.SIGTERM)     # SIGTERM came before this function changed the handler
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def join_local_group(rank: int, world_size: int, port: int) -> None:
    """Join a process group on this machine's CPU, whose first store listens on a port (see ``proof.processes``)."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(minutes=2))


def stop() -> None:
    """Leave the process group, all ranks together."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()  # if a rank left earlier, the last collective of its peers would fail
        dist.destroy_process_group()


def run_program(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Run a program's ``main(argv)`` and exit.

    A user's mistake is printed without a traceback and exits with 2; a mistake that several ranks of a node report is
    printed once. A rank whose collective failed because another rank ended says so in one line, so that the other
    rank's message is not buried.
    """
    _end_with_torchrun()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):   # a stream that was replaced by one without an encoding
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # paths may be unprintable
    try:
        code = main(sys.argv[1:]) or 0
    except UserError as error:
        _say_once(f"{type(error).__name__}: {error}")
        code = error.exit_code
    except KeyboardInterrupt:
        _say_once("interrupted")
        code = 128 + signal.SIGINT
    except BrokenPipeError:
        # a reader such as `head` has seen enough; other ranks wait for this one, so let the launcher end them
        code = 0 if _known_environment().world_size == 1 else 128 + signal.SIGPIPE
    except Exception as error:
        environment, sign = _known_environment(), _lost_peer(error)
        if sign and environment.world_size != 1:
            print(f"rank {environment.rank} stopped because another rank ended ({sign}); its message is above or "
                  "in its log", file=sys.stderr, flush=True)
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


def _end_with_torchrun() -> None:
    """Ask the kernel to kill this rank when torchrun dies.

    Ranks whose torchrun was killed would train and save on, and collide with the restart in the same directory.
    SIGKILL, because a rank may be in the middle of a step of minutes; checkpoints are complete or absent at any time.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    import ctypes

    with contextlib.suppress(OSError, AttributeError):      # a C library without prctl
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _known_environment() -> Environment:
    """Return what the launcher says about this process, with a world size of 0 where that cannot be read."""
    try:
        return read_environment(os.environ)
    except ConfigError:
        return Environment(world_size=0)


def _lost_peer(error: BaseException | None) -> str:
    """Return the text in an error, or in an error that led to it, which says that another rank has ended; else "".

    Pipelines raise errors of their own in place of torch's, so the causes are searched too.
    """
    seen: list[BaseException] = []      # errors can be the cause of each other; without this the loop would not end
    while error is not None and error not in seen:
        if sign := next((words for words in PEER_IS_GONE if words in str(error)), ""):
            return sign
        seen.append(error)
        error = error.__cause__ or error.__context__
    return ""


def _say_once(message: str) -> None:
    """Print a message to stderr, unless another rank of this node is just printing the same.

    Most mistakes are seen by all ranks and should be read once; one that a single rank meets (a damaged page of a
    file, say) must be read too. So the first rank with a message prints it at once, and holds a datagram socket whose
    abstract name (without a file) stands for the message until every other rank of the node has reported it there,
    one second at most::

        rank 1:  bind, print | wait ..................... exit
        rank 0:                  cannot bind: send "." -> exit
        rank 2:  bind the name of another message, print | wait ...

    The name vanishes with its process, so the same mistake in the next attempt is printed again.
    """
    environment = _known_environment()
    if environment.world_size == 1:
        print(message, file=sys.stderr, flush=True)
        return
    start_of_job = (os.getppid(), environment.address, environment.port, environment.attempt)
    name = f"\0megatron_sp {start_of_job} {zlib.crc32(message.encode(errors='replace'))}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        try:
            channel.bind(name)
        except OSError:     # another rank holds the socket of this name, so it prints the message
            # that rank has just ended; printing the message twice is better than not at all
            with contextlib.suppress(OSError):
                channel.sendto(b".", name)
                return
        print(message, file=sys.stderr, flush=True)
        _await_reports(channel, environment.local_world_size - 1)


def _await_reports(channel: socket.socket, others: int) -> None:
    """Wait until ``others`` ranks have reported the same mistake, at most ``SAME_MISTAKE_WINDOW`` seconds.

    A negative number means that the launcher does not say how many ranks this node has.
    """
    deadline, received = time.monotonic() + SAME_MISTAKE_WINDOW, 0
    while received != others and (left := deadline - time.monotonic()) > 0:
        channel.settimeout(left)
        with contextlib.suppress(OSError):      # no report arrived in time, or the socket is not bound
            channel.recv(1)
            received += 1
