"""What torchrun, srun and mpirun say about a process, from forged environments."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megatron_sp.errors import ConfigError
from megatron_sp.launchers import FIRST_PORT, NUMBER_OF_PORTS, Environment, read_environment
from megatron_sp.runtime import launch_environment

MEET = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
OMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
SRUN = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_NODES": "2"}
BATCH = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "1"}


def test_no_launcher_is_one_process() -> None:
    assert read_environment({}) == Environment(0, 1, 0)
    assert read_environment({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4"}) == Environment(0, 1, 0), "an interactive shell"
    assert read_environment({"SLURM_PROCID": "0", "SLURM_JOB_ID": "77"}) == Environment(0, 1, 0), "a batch script"
    assert read_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}).world_size == 1
    assert read_environment({"SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}).world_size == 1, "SLURM_PROCID was unset"
    one = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"}
    assert read_environment(one).world_size == 1


def test_torchrun() -> None:
    variables = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
                 "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "x"}
    expected = Environment(3, 4, 1, 2, "node1", 29500, launcher_holds_store=True, attempt=2)
    assert read_environment(variables | MEET) == expected
    assert read_environment(variables | MEET | BATCH) == expected, "torchrun in a batch script"
    assert read_environment(variables | MEET | SRUN) == expected, "torchrun in a task of srun"


@pytest.mark.parametrize("variables, expected", [
    (OMPI, Environment(1, 4, 1, 2, "node1", 29500)),
    ({name.replace("OMPI_COMM", "MV2_COMM"): value for name, value in OMPI.items()},
     Environment(1, 4, 1, 2, "node1", 29500)),
    ({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"},
     Environment(1, 4, 0, 2, "node1", 29500)),
    (SRUN, Environment(3, 4, 1, 0, "node1", 29500)),
    (SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4"}, Environment(3, 4, 1, 0, "node1", 29500)),
    (BATCH | OMPI, Environment(1, 4, 1, 2, "node1", 29500)),
    (SRUN | {"PMIX_RANK": "3"}, Environment(3, 4, 1, 0, "node1", 29500)),
    (SRUN | {"RANK": "3", "WORLD_SIZE": "4"}, Environment(3, 4, 1, 0, "node1", 29500)),
    (SRUN | {"WORLD_SIZE": "4"}, Environment(3, 4, 1, 0, "node1", 29500)),
], ids=["open mpi", "mvapich", "mpich", "srun", "srun with pmi", "mpirun in a batch script", "srun with pmix",
        "exported rank", "exported size"])
def test_other_launchers(variables: dict[str, str], expected: Environment) -> None:
    assert read_environment(variables | MEET) == expected


@pytest.mark.parametrize("variables", [
    SRUN | {"SLURM_STEP_NUM_NODES": "1"}, OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "prterun-9@1"}])
def test_ranks_of_one_node_derive_where_they_meet(variables: dict[str, str]) -> None:
    found = read_environment(variables)
    assert found.address == "127.0.0.1" and FIRST_PORT <= found.port < FIRST_PORT + NUMBER_OF_PORTS
    other = {name: "2" if name.endswith(("RANK", "PROCID", "LOCALID")) else value for name, value in variables.items()}
    assert read_environment(other).port == found.port, "the same on every rank"
    later = {name: value + "1" if name in ("SLURM_STEP_ID", "PMIX_NAMESPACE") else value
             for name, value in variables.items()}
    assert read_environment(later).port != found.port, "another start"


@pytest.mark.parametrize("variables, said", [
    ({"RANK": "0"}, "RANK=0 is set but WORLD_SIZE is not"),
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set but RANK is not"),
    ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 is set but RANK and WORLD_SIZE are not"),
    ({"SLURM_PROCID": "5", "SLURM_JOB_ID": "77"}, "SLURM_PROCID=5 is set but SLURM_STEP_NUM_TASKS is not"),
    ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, "SLURM_PROCID=0 is set but SLURM_STEP_NUM_TASKS is not"),
    ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "0"}, "SLURM_STEP_NUM_TASKS=4 is set but SLURM_PROCID is not"),
    ({"SLURM_PROCID": "5", "RANK": "0", "WORLD_SIZE": "1"}, "SLURM_PROCID=5 is set but SLURM_STEP_NUM_TASKS is not"),
    ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4 is set but OMPI_COMM_WORLD_RANK is not"),
    ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, "OMPI_COMM_WORLD_LOCAL_RANK=1 is set but OMPI_COMM_WORLD_RANK and OMPI_COMM"),
    ({"PMI_SIZE": "4"}, "PMI_SIZE=4 is set but PMI_RANK is not"),
    ({"MV2_COMM_WORLD_RANK": "1"}, "MV2_COMM_WORLD_RANK=1 is set but MV2_COMM_WORLD_SIZE is not"),
    ({"PMIX_RANK": "1"}, "PMIX_RANK=1 is set but the number of processes is not"),
    (MEET | {"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 must be at least 0 and below WORLD_SIZE=2"),
    (MEET | {"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x is not a whole number"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "without MASTER_ADDR and MASTER_PORT the ranks cannot meet"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node1"}, "without MASTER_PORT"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "70000"}, "MASTER_PORT=70000 must be"),
    ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_RANK=0 is set but OMPI_COMM_WORLD_SIZE is not"),
    ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, "rank 1 of 2, but without MASTER_ADDR and MASTER_PORT"),
    (MEET | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node1:29500"},
     "Set MASTER_ADDR=node1 and MASTER_PORT=29500"),
    (MEET | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "[::1]:29500"},
     "Set MASTER_ADDR=[::1] and MASTER_PORT=2950"),
    (SRUN, "rank 3 of 4, but without MASTER_ADDR"), (OMPI, "rank 1 of 4, but without MASTER_ADDR"),
    (BATCH, "unset SLURM_PROCID for one plain process"),
    (SRUN | MEET | {"WORLD_SIZE": "2"}, "WORLD_SIZE=2 contradicts SLURM_STEP_NUM_TASKS"),
    (SRUN | MEET | {"RANK": "0", "WORLD_SIZE": "1"}, "WORLD_SIZE=1 contradicts SLURM_STEP_NUM_TASKS"),
])
def test_what_is_refused(variables: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_environment(variables)
    assert said in str(caught.value)


@pytest.mark.parametrize("text, address", [("[::1]", "::1"), ("fe80::1", "fe80::1"), ("node1\n", "node1"),
                                           (" 10.0.0.1 ", "10.0.0.1")])
def test_addresses(text: str, address: str) -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1", "MASTER_ADDR": text}
    assert read_environment(variables).address == address


def test_an_unknown_host_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1", "MASTER_ADDR": "nowhere.invalid"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="MASTER_ADDR=nowhere.invalid is not known on"):
        launch_environment()


def test_two_tasks_of_srun_form_one_group() -> None:
    program = ("import torch\nfrom megatron_sp.config.schema import Parallel\n"
               "from megatron_sp.runtime import launch_environment, start, stop\n"
               "start(Parallel(distributed_backend='gloo'), launch_environment())\n"
               "total = torch.ones(1)\ntorch.distributed.all_reduce(total)\nprint(total.item())\nstop()")
    job = SRUN | {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    tasks = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True,
                              env=os.environ | job | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)})
             for rank in range(2)]
    assert [task.communicate(timeout=60)[0].strip() for task in tasks] == ["2.0", "2.0"]
