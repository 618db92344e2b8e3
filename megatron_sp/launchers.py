"""What a launcher says about a process: its rank, the number of processes, and where the ranks meet.

Launchers set environment variables. torchrun sets ``RANK``, ``WORLD_SIZE`` and ``MASTER_ADDR``; srun and the mpirun of
each MPI library set names of their own. This module reads any of them from a mapping. A process that some launcher
started as one of several never trains alone: either its rank and the meeting place are known, or it is refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_sp.errors import ConfigError

#: Ports for ranks whose launcher names none. Below 32768, where Linux starts to give ports to clients.
FIRST_PORT, NUMBER_OF_PORTS = 15000, 17000
#: Set for tasks of srun, and not for the batch script around them.
STEP = ("SLURM_STEP_ID", "SLURM_STEPID")
CURE_MEETING_PLACE = ("Set MASTER_ADDR to the address of rank 0's node (127.0.0.1 when all ranks run on one node) and "
                      "MASTER_PORT to a free port there, the same for all ranks, or start with torchrun.")


@dataclass(frozen=True)
class Environment:
    """What the launcher says about this process.

    Attributes:
        rank: number of this process among all, from 0.
        world_size: number of processes.
        local_rank: number of this process among those of its node, from 0.
        local_world_size: processes of this node; 0 where the launcher does not say.
        address, port: where rank 0, or the launcher, holds the store through which the ranks meet; "" and 0 where
            one process needs none.
        launcher_holds_store: whether torchrun holds that store, and not rank 0.
        attempt: number of restarts so far, as torchrun counts them on this node.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 0
    address: str = ""
    port: int = 0
    launcher_holds_store: bool = False
    attempt: int = 0


@dataclass(frozen=True)
class Launcher:
    """Names of the variables of one launcher; of several names for one value, the first that is set is read.

    Attributes:
        program: what users call it.
        job: variables that all ranks of one start share and other starts do not.
        nodes: variables with the number of nodes.
    """

    program: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


TORCHRUN = Launcher("torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",))
#: MPI comes before Slurm, because an mpirun inside a Slurm job passes on Slurm's variables, and these describe the
#: mpirun and not its ranks.
OTHER_LAUNCHERS = (
    Launcher("mpirun (Open MPI)", ("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_LOCAL_RANK",),
             ("OMPI_COMM_WORLD_LOCAL_SIZE",), ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")),
    Launcher("mpirun (MVAPICH)", ("MV2_COMM_WORLD_RANK",), ("MV2_COMM_WORLD_SIZE",), ("MV2_COMM_WORLD_LOCAL_RANK",),
             ("MV2_COMM_WORLD_LOCAL_SIZE",), ("MPIRUN_ID",)),
    Launcher("mpirun (PMI)", ("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
             ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"), ("PMI_ID",)),
    Launcher("srun", ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"), ("SLURM_LOCALID",),
             (), ("SLURM_JOB_ID", "SLURM_JOBID"), ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")),
    Launcher("a launcher with PMIx", ("PMIX_RANK",), ()),
)


@dataclass(frozen=True)
class _Claim:
    """What one launcher's variables say; ``local_rank`` and ``local_size`` are -1 and 0 where it does not say."""

    launcher: Launcher
    rank: int
    size: int
    local_rank: int
    local_size: int
    is_one_node: bool


def read_environment(variables: Mapping[str, str]) -> Environment:
    """Return rank, world size, local rank and meeting place from torchrun, srun or mpirun, or one plain process.

    Raises:
        ConfigError: the variables are incomplete, contradict each other, or tell a process that it is one of several
            but not where they meet.
    """
    claims = [claim for launcher in OTHER_LAUNCHERS if (claim := _read(launcher, variables)) is not None]
    other = _most_trusted(claims)
    own = _read(TORCHRUN, variables)
    _refuse_halves(own, claims, variables)
    claim = own or other
    if claim is None:
        return Environment()
    _refuse_contradiction(own, other, variables)
    same = next((found for found in claims if (found.rank, found.size) == (claim.rank, claim.size)
                 and found.local_rank >= 0), claim)
    local_rank = claim.local_rank if claim.local_rank >= 0 else same.local_rank
    address, port = _meeting_place(claim, same, variables) if claim.size > 1 else ("", 0)
    return Environment(
        claim.rank, claim.size, local_rank if local_rank >= 0 else claim.rank,
        local_world_size=claim.local_size or same.local_size, address=address, port=port,
        launcher_holds_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number("TORCHELASTIC_RESTART_COUNT", variables.get("TORCHELASTIC_RESTART_COUNT") or "0"))


def _refuse_contradiction(own: _Claim | None, other: _Claim | None, variables: Mapping[str, str]) -> None:
    """Refuse a WORLD_SIZE that somebody exported and the launcher does not confirm: each rank would train alone."""
    if other is None or "TORCHELASTIC_RUN_ID" in variables:     # torchrun may well start 2 ranks in each of 4 tasks
        return
    size = variables.get("WORLD_SIZE") or str(other.size)
    if (own is None or _is_certain(other, variables)) and size != str(other.size):
        raise ConfigError(f"WORLD_SIZE={size} contradicts {other.launcher.size[0]}, by which {other.launcher.program} "
                          f"started {other.size} of these processes; unset RANK and WORLD_SIZE.")


def _is_certain(claim: _Claim, variables: Mapping[str, str]) -> bool:
    """Return whether the launcher started this process itself.

    Slurm also sets a rank of 0 for the batch script around its tasks, although only one process runs it.
    """
    return claim.launcher.program != "srun" or bool(_first(STEP, variables))


def _first(names: tuple[str, ...], variables: Mapping[str, str]) -> str:
    """Return the first of these names whose variable is set and not empty, or ""."""
    return next((name for name in names if variables.get(name)), "")


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text} is not a whole number; the launcher sets it, so unset it, or start with "
                          "torchrun.") from None


def _refuse_halves(own: _Claim | None, claims: list[_Claim], variables: Mapping[str, str]) -> None:
    """Refuse a rank without a size, a size without a rank, or a local rank alone: the process would train alone.

    Half of the variables of one launcher is no mistake where another one says the whole: PMIx sets a rank and never a
    size, and an mpirun passes on what Slurm says about the mpirun.
    """
    if own is not None and "TORCHELASTIC_RUN_ID" in variables:
        return
    known = [claim for claim in (own, *claims) if claim is not None]
    for launcher in (TORCHRUN, *OTHER_LAUNCHERS):
        rank, size = _first(launcher.rank, variables), _first(launcher.size, variables)
        local = _first(launcher.local_rank, variables)
        if launcher.program == "srun":
            if not rank:    # a shell in an allocation has SLURM_NTASKS; only a task of srun has the size of a step
                local, size = "", size if size == "SLURM_STEP_NUM_TASKS" and variables[size] != "1" else ""
            elif not size and variables[rank] == "0" and not _first(STEP, variables):
                continue    # this is the batch script of a job that was submitted without --ntasks
        found = rank or size or local
        if not found or rank and size or launcher is not TORCHRUN and any(
                claim.size > 1 or str(claim.rank if rank else claim.size) == variables[found] for claim in known):
            continue
        if launcher is TORCHRUN and not rank and known:
            continue        # somebody exported WORLD_SIZE or LOCAL_RANK; ``_refuse_contradiction`` compares the sizes
        names = ((launcher.rank, rank), (launcher.size or ("the number of processes",), size))
        missing = " and ".join(of[0] for of, name in names if not name) + (" is" if rank or size else " are")
        raise ConfigError(f"{found}={variables[found]} is set but {missing} not, so this process does not know its "
                          f"place among others. Start with torchrun, or unset {found} for one plain process.")


def _read(launcher: Launcher, variables: Mapping[str, str]) -> _Claim | None:
    """Return what this launcher's variables say; None where they do not give both rank and number of processes."""
    rank_name, size_name = _first(launcher.rank, variables), _first(launcher.size, variables)
    if not rank_name or not size_name:
        return None
    rank, size = _number(rank_name, variables[rank_name]), _number(size_name, variables[size_name])
    if not 0 <= rank < size:
        raise ConfigError(f"{rank_name}={rank} must be at least 0 and below {size_name}={size}.")
    local_name, local_size_name = _first(launcher.local_rank, variables), _first(launcher.local_size, variables)
    local_size = _number(local_size_name, variables[local_size_name]) if local_size_name else 0
    nodes = _first(launcher.nodes, variables)
    return _Claim(launcher, rank, size, _number(local_name, variables[local_name]) if local_name else -1, local_size,
                  is_one_node=local_size == size or bool(nodes) and variables[nodes] == "1")


def _most_trusted(claims: list[_Claim]) -> _Claim | None:
    """Return the claim of the first launcher that started several processes; without one, the first claim.

    When a later launcher gives the same rank and size, and also the local rank, its claim is returned instead. This
    happens under srun, which sets the variables of PMI too, without the local rank.
    """
    several = [claim for claim in claims if claim.size > 1] or claims
    if not several:
        return None
    first = several[0]
    return next((claim for claim in several if (claim.rank, claim.size) == (first.rank, first.size)
                 and claim.local_rank >= 0), first)


def _meeting_place(claim: _Claim, same: _Claim, variables: Mapping[str, str]) -> tuple[str, int]:
    """Return address and port of the store through which the ranks meet.

    Where all ranks are on one node, the address is 127.0.0.1. The port is computed from the job's id, so that all ranks
    get the same one.
    """
    address, port = _address(variables.get("MASTER_ADDR", "")), variables.get("MASTER_PORT", "")
    if port and not 0 < _number("MASTER_PORT", port) < 2**16:
        raise ConfigError(f"MASTER_PORT={port} must be a port number from 1 to 65535.")
    if address and port:
        return address, int(port)
    job = _job(claim, variables) or _job(same, variables)
    is_one_node = claim.is_one_node or same.is_one_node
    if (address or is_one_node) and (port or job):
        derived = FIRST_PORT + zlib.crc32(job.encode()) % NUMBER_OF_PORTS
        return address or "127.0.0.1", int(port or derived)
    missing = " and ".join(name for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)) if not value)
    batch = ("" if _is_certain(claim, variables) else
             " If this is a batch script and no srun stands before the program, put srun there, or unset SLURM_PROCID "
             "for one plain process.")
    raise ConfigError(f"{claim.launcher.rank[0]} and {claim.launcher.size[0]} make this process rank {claim.rank} of "
                      f"{claim.size}, but without {missing} the ranks cannot meet. {CURE_MEETING_PLACE}{batch}")


def _address(text: str) -> str:
    """Return the host of MASTER_ADDR: a name, an IPv4 address, or an IPv6 address with or without brackets."""
    address = text.strip()
    if address.startswith("[") and address.endswith("]"):
        address = address[1:-1]
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and (":" not in host or host.endswith("]")):
        raise ConfigError(f"MASTER_ADDR={address} must be an address without a port. Set MASTER_ADDR={host} and "
                          f"MASTER_PORT={port}.")
    return address


def _job(claim: _Claim, variables: Mapping[str, str]) -> str:
    """Return an id that all processes of this start share and other starts do not have, or ""."""
    name = _first(claim.launcher.job, variables)
    if not name or claim.launcher.program != "srun":
        return variables[name] if name else ""
    step = _first(STEP, variables)
    return f"{variables[name]}.{variables[step]}" if step else ""

