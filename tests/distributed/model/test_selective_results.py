"""With selective recomputation a whole step attends and communicates in attention as often as without recomputation."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_sp.proof.data import batch
from megatron_sp.proof.reference import random_weights
from megatron_sp.proof.steps import step_in_layout
from tests.helpers.configs import STYLES, tiny_run
from tests.helpers.spawn import RunRanks

SELECTIVE, HOST = "--recompute-granularity selective", "--recompute-granularity selective --offload-activations"
#: Operators that attend, forwards only, and those that communicate inside attention.
COUNTED = {"_scaled_dot_product_flash_attention_for_cpu": "attention", "logsumexp": "attention, unfused",
           "send": "shifts of the ring", "all_to_all_single": "exchanges"}
RING, ULYSSES = "--ring-size 2", "--ulysses-size 2 --no-shared-memory"
WINDOW, PATTERN = "--window-size 11", "--attention-pattern longformer --attention-block-size 4"
DOCUMENTS, DROPOUT = "--reset-attention-mask", "--attention-dropout 0.2"
#: Name -> number of ranks, flags of the layout and of the model, and what a step must call.
LAYOUTS = {
    "ring, zero 3": (2, f"{RING} --zero-stage 3", ["attention", "shifts of the ring"]),
    "ulysses, overlapped, pattern": (2, f"{ULYSSES} {PATTERN} --ulysses-overlap-groups 2", ["attention", "exchanges"]),
    "pp, window": (2, f"--pipeline-model-parallel-size 2 {WINDOW} --window-attn-skip-freq 2", ["attention"]),
}
MORE = {
    "ring, window": (2, f"{RING} {WINDOW}", ["attention", "shifts of the ring"]),
    "ring, documents": (2, f"{RING} {DOCUMENTS}", ["attention", "shifts of the ring"]),
    "ulysses, window, documents": (2, f"{ULYSSES} {DOCUMENTS} {WINDOW}", ["attention", "exchanges"]),
    "ulysses, dropout": (2, f"{ULYSSES} {DROPOUT}", ["attention, unfused", "exchanges"]),
    "tp, pattern": (2, f"--tensor-model-parallel-size 2 --sequence-parallel {PATTERN}", ["attention"]),
    "interleaved pp, pattern": (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
                                   f"{PATTERN}", ["attention"]),
    "chunks, dropout": (2, f"{ULYSSES} --sequence-chunk-size 32 {DROPOUT}", ["attention, unfused"]),
    "ring of 3": (3, "--ring-size 3 --seq-length 60", ["attention", "shifts of the ring"]),
    "ring, ulysses": (4, f"{RING} {ULYSSES} {DOCUMENTS}", ["attention", "exchanges", "shifts of the ring"]),
    "ring, pp": (4, f"{RING} --pipeline-model-parallel-size 2", ["attention", "shifts of the ring"]),
}


class Calls(TorchDispatchMode):
    """Counts the operators of ``COUNTED``."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = COUNTED.get(str(function).split(".")[1])
        if name:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


def differing(flags: str, expected: list[str], offloads: bool) -> list[str]:
    """Return sentences about steps with selective recomputation that call more, or give other gradients."""
    steps = []
    for extra in ("", SELECTIVE, HOST) if offloads else ("", SELECTIVE):
        words = f"{STYLES['eight_heads']} --num-layers 4 {flags} {extra}"
        run = tiny_run(words.split(), dist.get_world_size())
        with Calls() as calls:
            step = step_in_layout(run, random_weights(run), *batch(run))
        steps.append((step.gradients, calls.counts))
    gradients, counts = steps[0]
    found = [f"no {kind}" for kind in expected if not counts[kind]]
    for others, again in steps[1:]:
        if again != counts:
            found.append(f"{dict(again)} instead of {dict(counts)}")
        found += [name for name, gradient in gradients.items() if not torch.equal(gradient, others[name])]
    return found


@pytest.mark.parametrize("name", [*LAYOUTS, *[pytest.param(name, marks=pytest.mark.slow) for name in MORE]])
def test_nothing_of_attention_is_computed_or_sent_again(name: str, ranks: RunRanks) -> None:
    world, flags, expected = (LAYOUTS | MORE)[name]
    assert ranks(differing, world, flags, expected, "chunk" not in flags) == [[]] * world
