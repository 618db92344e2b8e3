"""Compiled layers compute the gradients of layers that are not compiled, with every kind of attention."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_sp.proof.data import batch
from megatron_sp.proof.reference import random_weights
from megatron_sp.proof.steps import differences, step_in_layout
from tests.helpers.configs import STYLES, tiny_run
from tests.helpers.spawn import RunRanks

CASES = {
    "overlap": "--ulysses-size 2 --ulysses-overlap-groups 2 --no-shared-memory",
    "ring": "--ring-size 2 --zero-stage 3",
    "chunks": "--ulysses-size 2 --sequence-chunk-size 16 --no-shared-memory",
    "chunks, recomputed": "--ulysses-size 2 --sequence-chunk-size 16 --recompute-granularity full",
    "documents, selective": "--ulysses-size 2 --reset-attention-mask --recompute-granularity selective",
    "window, tp, dropout": "--tensor-model-parallel-size 2 --sequence-parallel --window-size 11 --hidden-dropout 0.1",
    "attention dropout": "--ulysses-size 2 --hidden-dropout 0.1 --attention-dropout 0.2 --recompute-granularity full",
    "pattern": "--ulysses-size 2 --attention-pattern bigbird --attention-block-size 8",
}


def largest_difference(flags: str) -> float:
    """On a rank: trace the layers as for any compiler, run what was traced, and compare with layers not compiled."""
    words = f"{STYLES['eight_heads']} --num-layers 3 --attention-dropout 0 --hidden-dropout 0 {flags}"
    steps = []
    for compiled in ("", " --compile"):
        run = tiny_run(f"{words}{compiled}".split(), dist.get_world_size())
        torch._dynamo.reset()
        with torch.compiler.set_stance("default", force_backend="aot_eager"):
            steps.append(step_in_layout(run, random_weights(run), *batch(run)))
    return max(differences(*steps).values())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_layers_not_compiled(case: str, ranks: RunRanks) -> None:
    assert max(ranks(largest_difference, 2, CASES[case])) < 1e-12
