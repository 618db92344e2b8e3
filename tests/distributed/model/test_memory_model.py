"""The memory plan of pipelines against what their ranks really allocate (tests/unit has everything else)."""

from __future__ import annotations

import pytest

from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.plan.memory import predict
from tests.helpers.spawn import RunRanks
from tests.helpers.trace import Traced, trace_here
from tests.unit.plan.test_memory_model import FULL, LLAMA, TOLERANCE, resolved

SMALL = "--hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 352 --seq-length 1024 --global-batch-size 4 "
CASES = {
    "1f1b": (2, LLAMA + SMALL + "--pipeline-model-parallel-size 2"),
    "full": (2, LLAMA + FULL + SMALL + "--pipeline-model-parallel-size 2"),
    "interleaved": (2, LLAMA + SMALL + "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    "chunks": (2, LLAMA + SMALL + "--pipeline-model-parallel-size 2 --sequence-chunk-size 256 --global-batch-size 1"),
    "sharded": (4, LLAMA + FULL + SMALL + "--pipeline-model-parallel-size 2 --zero-stage 2 --ulysses-size 2"),
    "sharded, one microbatch": (4, LLAMA + FULL + SMALL + "--pipeline-model-parallel-size 2 --zero-stage 2 "
                                   "--ulysses-size 2 --global-batch-size 1"),
    "weights kept between microbatches": (4, LLAMA + FULL + SMALL + "--zero-stage 1 --ulysses-size 4"),
}


def traced(cases: dict[str, str]) -> dict[str, Traced]:
    """On a rank: what each allocates."""
    found = {}
    for name, flags in cases.items():
        run = resolved(flags, CASES[name][0])
        found[name] = trace_here(run, ParallelMesh.build(run.parallel), explain=True)
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_the_fullest_rank_within_a_tenth(world: int, ranks: RunRanks) -> None:
    cases = {name: flags for name, (size, flags) in CASES.items() if size == world}
    results = ranks(traced, world, cases, timeout=120)
    for name, flags in cases.items():
        plan = predict(resolved(flags, world), optimizer=False)
        peaks = [result[name].peak for result in results]
        assert plan.total == pytest.approx(max(peaks), rel=TOLERANCE), (name, peaks, plan)
