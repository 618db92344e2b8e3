"""A rank that does not answer is named with its axis, after a time-out and while a step stands still."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_sp.errors import PeerLostError
from megatron_sp.parallel import lost_peers
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.stall_warning import warning_of_stalls
from megatron_sp.train.trainer import Trainer
from tests.helpers.configs import STYLES, tiny_run
from tests.helpers.spawn import RunRanks, run_ranks
from tests.helpers.training import train


def message() -> str:
    """Rank 3 is late for a sum over tp; rank 2 waits for it, ranks 0 and 1 for rank 2 and 3 over dp."""
    lost_peers.GRACE_SECONDS = 1.5
    run = tiny_run([*STYLES["gpt2"].split(), "--tensor-model-parallel-size", "2"], 4)
    mesh = ParallelMesh.build(run.parallel)
    groups = {ranks: dist.new_group(ranks, timedelta(seconds=2)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
    if mesh.global_rank == 3:
        time.sleep(8)
        return ""
    with pytest.raises(PeerLostError) as error, lost_peers.naming_lost_peers(mesh):
        if mesh.global_rank != 2:
            dist.all_reduce(torch.ones(3), group=groups[0, 1])
            dist.all_reduce(torch.ones(3), group=groups[mesh.global_rank, mesh.global_rank + 2])
        dist.all_reduce(torch.ones(3), group=groups[2, 3])
    return str(error.value)


def test_a_rank_that_does_not_answer_is_named_with_its_axis(ranks: RunRanks) -> None:
    found = ranks(message, 4)
    assert "rank 3 (tensor parallel), which has reported nothing" in found[2], found
    assert "rank 3 (data parallel), which has reported nothing" in found[1], found
    assert found[0].startswith("rank 0 waited") and "--distributed-timeout-minutes" in found[0]


def warnings_of_a_stall() -> list[str]:
    """Return the warnings of rank 0: in step 3 rank 1 is away, in step 4 both ranks are busy, step 5 is quick."""
    mesh = ParallelMesh.build(tiny_run([*STYLES["gpt2"].split(), "--tensor-model-parallel-size", "2"], 2).parallel)
    said: list[str] = []
    done = 3
    with contextlib.ExitStack() as watching:
        if mesh.global_rank == 0:
            watching.enter_context(warning_of_stalls(mesh, lambda: done, said.append, patience=0.3, grace=0.3))
            time.sleep(1.5)
        dist.barrier()
        done = 4
        if mesh.global_rank == 1:
            watching.enter_context(warning_of_stalls(mesh, lambda: done, said.append, patience=0.3, grace=0.3))
        time.sleep(1.5)
        dist.barrier()
        done = 5
    return said


def test_a_step_that_stands_still_is_reported_once_with_the_ranks_that_do_not_run(ranks: RunRanks) -> None:
    away, busy = ranks(warnings_of_a_stall, 2)[0]
    assert "after iteration 3. These ranks do not answer: rank 1 (tensor parallel)" in away
    assert "after iteration 4. All ranks of its groups still run" in busy


def message_of_a_run() -> str:
    """What the program says when a collective of a step runs out of time."""
    def fail(trainer: Trainer) -> None:
        raise RuntimeError("Timed out waiting 100ms for recv operation to complete")

    lost_peers.GRACE_SECONDS = 0.1
    Trainer.fit = fail  # type: ignore[method-assign, assignment]
    return train(STYLES["gpt2"])


def test_a_training_run_says_it_too() -> None:
    (said,) = run_ranks(message_of_a_run, 1)
    assert said.startswith("PeerLostError: rank 0 waited") and "--distributed-timeout-minutes" in said


def test_other_errors_stay_as_they_are(ranks: RunRanks) -> None:
    with pytest.raises(RuntimeError, match="another"), lost_peers.naming_lost_peers(None):  # type: ignore[arg-type]
        raise RuntimeError("another mistake")
