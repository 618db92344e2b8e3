"""A real Slurm cluster of two nodes on this machine, for tests of the launch scripts.

The daemons come from Debian's packages ``slurm-wlm`` and ``munge``. All files of the cluster (key, sockets, state,
logs) lie in one temporary directory, and every daemon listens on 127.0.0.1 only. The two nodes are two ``slurmd``
processes with ports of their own. ``sbatch``, ``srun``, ``scancel`` and ``scontrol requeue`` behave as on a cluster.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NODES = ("n1", "n2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "sinfo", "squeue")
HOSTS = Path("/etc/hosts")
#: Seconds after which the daemons must be ready, even on a busy machine.
START_TIMEOUT = 60.0

CONFIGURATION = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
AccountingStorageType=accounting_storage/none
KillWait=60
SchedulerParameters=batch_sched_delay=1,sched_interval=2
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Return why no cluster can be started here, or "" when one can."""
    if os.geteuid() != 0:
        return "starting Slurm's daemons needs root"
    missing = [name for name in PROGRAMS if _program(name) is None]
    return f"not installed: {', '.join(missing)} (Debian packages slurm-wlm and munge)" if missing else ""


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


class SlurmCluster:
    """A running cluster, started by ``slurm_cluster``.

    Attributes:
        root: directory of the cluster's files and logs.
        environment: variables with which Slurm's commands reach this cluster.
    """

    def __init__(self, root: Path):
        self.root = root
        self.environment = {**os.environ, "SLURM_CONF": str(root / "slurm.conf")}

    def run(self, *words: str | Path, timeout: float = 60, check: bool = True, **variables: str) -> str:
        """Run one of Slurm's commands and return its standard output.

        Raises:
            AssertionError: the command failed; the message has its output.
        """
        done = subprocess.run([str(word) for word in words], env={**self.environment, **variables}, text=True,
                              capture_output=True, timeout=timeout, check=False)
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *words: str | Path, **variables: Any) -> int:
        """Submit a batch script and return the job's number; ``variables`` are added to its environment."""
        return int(self.run("sbatch", "--parsable", *words, **variables).split(";")[0])

    def state(self, job: int) -> str:
        """Return the state of a job, such as ``RUNNING`` or ``COMPLETED``."""
        shown = self.run("scontrol", "-o", "show", "job", str(job))
        return next(word.split("=", 1)[1] for word in shown.split() if word.startswith("JobState="))

    def wait_for(self, job: int, *states: str, timeout: float) -> str:
        """Wait until a job is in one of these states and return it.

        Raises:
            AssertionError: the job was in none of these states before the timeout.
        """
        deadline = time.monotonic() + timeout
        while (state := self.state(job)) not in states:
            assert time.monotonic() < deadline, f"job {job} is {state} after {timeout:g} s, not {' or '.join(states)}"
            time.sleep(0.5)
        return state


@contextmanager
def slurm_cluster(root: Path, cpus: int = 4) -> Iterator[SlurmCluster]:
    """Start a cluster of two nodes in an empty directory, and end its daemons and jobs afterwards.

    Args:
        root: an empty directory with a short path: Unix sockets allow about 100 characters.
        cpus: processors that each node offers, whether the machine has them or not.
    """
    controller, *ports = _free_ports(1 + len(NODES))
    nodes = "\n".join(f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={cpus}"
                      for name, port in zip(NODES, ports))
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (root / name).mkdir()
    (root / "slurm.conf").write_text(CONFIGURATION.format(controller=controller, root=root, nodes=nodes,
                                                          names=",".join(NODES)))
    key = root / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    cluster = SlurmCluster(root)
    with _names_that_resolve(), _daemons(root, cluster.environment):
        deadline = time.monotonic() + START_TIMEOUT
        while cluster.run("sinfo", "-h", "-N", "-o", "%T", check=False).split() != ["idle"] * len(NODES):
            assert time.monotonic() < deadline, _last_lines(root)
            time.sleep(0.3)
        try:
            yield cluster
        finally:
            cluster.run("scancel", "--full", "--signal=KILL", "--user=root", check=False)
            cluster.run("scancel", "--user=root", check=False)


@contextmanager
def _names_that_resolve() -> Iterator[None]:
    """Make the nodes' names resolve to this machine, because launch scripts look up the first node's address."""
    before = HOSTS.read_text()
    HOSTS.write_text(before + "".join(f"127.0.0.1 {name}  # megatron_sp's tests\n" for name in NODES))
    try:
        yield
    finally:
        HOSTS.write_text("".join(line for line in HOSTS.read_text().splitlines(keepends=True)
                                 if not line.rstrip().endswith("# megatron_sp's tests")))


@contextmanager
def _daemons(root: Path, environment: dict[str, str]) -> Iterator[None]:
    """Run munged, slurmctld and a slurmd for each node in the foreground; end them in the opposite order."""
    munge = [f"--key-file={root}/munge.key", f"--socket={root}/munge.socket", f"--pid-file={root}/munged.pid",
             f"--log-file={root}/munged.log", f"--seed-file={root}/munge.seed", "--foreground", "--force"]
    commands = [["munged", *munge], ["slurmctld", "-D", "-c"], *(["slurmd", "-D", "-N", node] for node in NODES)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            program = _program(command[0])
            assert program is not None
            with (root / f"{command[0]}.{len(started)}.out").open("wb") as output:
                started.append(subprocess.Popen([program, *command[1:]], env=environment, stdout=output,
                                                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL))
            if command[0] == "munged":
                _wait_for_file(root / "munge.socket")
        yield
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for_file(path: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not appear"
        time.sleep(0.05)


def _last_lines(root: Path) -> str:
    logs = [path for path in sorted(root.iterdir()) if path.suffix in (".log", ".out") and path.is_file()]
    ends = {path.name: path.read_text(errors="replace").splitlines()[-8:] for path in logs}
    return "\n".join(line for name, lines in ends.items() for line in (f"== {name}", *lines))
