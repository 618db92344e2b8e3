"""``--memory-efficiency auto`` in a run: ranks of unequal memory choose alike, and train with what they chose."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist

from megatron_sp.plan.devices import DEVICES, device_like
from megatron_sp.plan.memory import predict
from megatron_sp.train.memory_efficiency import smallest
from tests.helpers.configs import STYLES, tiny_run
from tests.helpers.spawn import run_ranks
from tests.helpers.training import train_and_tell

RUN = (STYLES["llama"].replace("--num-query-groups", "--num-key-value-heads")
       + " --seq-length 2048 --global-batch-size 1 --train-iters 2 --ulysses-size 2 --zero-stage 3")


def trained(memory: str) -> tuple[str, str]:
    return train_and_tell(f"{RUN} --memory-efficiency auto --device-memory {memory}")


def refused_and_agreed() -> tuple[str, tuple[int, int, float]]:
    """Return the error of too little memory, and what two ranks with different devices agree on."""
    _, problem = trained("1MiB")
    rank = dist.get_rank()
    agreed = smallest(device_like("H200" if rank else "H100", 100 - rank, 50 + rank), torch.device("cpu"))
    return problem, (agreed.memory, agreed.host_memory, agreed.tflops)


def test_a_run_trains_with_the_techniques_that_it_needs() -> None:
    needed = predict(tiny_run(RUN.split(), 2)).total
    (output, problem), (other, _) = run_ranks(trained, 2, f"{needed * 8 // 10}B")
    assert not problem and "turned on:" in output and "turned on:" not in other
    assert re.search(r"memory\.recompute_granularity\.+ (full|selective)", output)
    assert output.count("lm loss:") == 2


def test_ranks_agree_on_the_smallest_device_and_refuse_alike() -> None:
    (problem, agreed), (problem_too, agreed_too) = run_ranks(refused_and_agreed, 2)
    assert problem == problem_too and "no memory technique makes this run fit" in problem
    assert agreed == agreed_too == (99, 50, DEVICES["H100"].tflops)
