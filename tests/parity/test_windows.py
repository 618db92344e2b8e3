"""Sliding windows compute the gradients of the plain model with an explicit mask in every layout, in fp64 to 1e-9."""

from __future__ import annotations

import pytest

from megatron_sp.proof.data import batch
from megatron_sp.proof.reference import random_weights
from megatron_sp.proof.steps import differences, reference_step
from tests.helpers.configs import Case
from tests.parity.against_one_process import check_gradients

W, MIXED = "--window-size 11", "--window-size 11 --window-attn-skip-freq 2"
FULL, SELECTIVE = "--recompute-granularity full", "--recompute-granularity selective"
DROPOUT = "--attention-dropout 0.3"
TP2, U2, PP2 = "--tensor-model-parallel-size 2", "--ulysses-size 2", "--pipeline-model-parallel-size 2"
CHUNK = "--sequence-chunk-size 16"
SEGMENTS = "--sequence-chunk-size 4"  # 16 chunks, which a window of up to 5 tokens cuts into segments of 4

#: Number of ranks -> flags of the layout, style, flags of the model.
LAYOUTS: dict[int, list[tuple[str, str, str]]] = {
    1: [("", "llama", W), ("", "mixed", MIXED), ("--attention-core unfused", "gpt2", MIXED), (FULL, "gpt2", W),
        ("--attention-head-groups 2", "llama", W), ("", "gpt2", f"{MIXED} {DROPOUT}"), ("", "llama", "--window-size 1"),
        (CHUNK, "llama", W), (CHUNK, "gpt2", "--window-size 20"), (f"{CHUNK} {SELECTIVE}", "mixed", MIXED),
        (CHUNK, "gpt2", f"{W} {DROPOUT}"), (SEGMENTS, "llama", "--window-size 4"),
        (f"{SEGMENTS} {SELECTIVE}", "gpt2", f"--window-size 5 {DROPOUT}"),
        (f"{SEGMENTS} {SELECTIVE} --offload-key-values", "mixed", "--window-size 3")],
    2: [(U2, "llama", W), (f"{U2} --zero-stage 3 {FULL}", "gpt2", MIXED), (U2, "llama", f"{W} {DROPOUT}"),
        (f"{U2} --ulysses-overlap-groups 2 --no-shared-memory", "eight_heads", W), (TP2, "gpt2", MIXED),
        (f"{TP2} --sequence-parallel", "llama", W), (PP2, "llama", MIXED), ("--ring-size 2", "llama", MIXED),
        (f"{U2} {CHUNK}", "llama", "--window-size 20"), (f"{U2} {SEGMENTS} --zero-stage 3", "llama", "--window-size 4"),
        *[(f"--zero-stage {stage} --micro-batch-size 1", "gpt2", MIXED) for stage in (1, 2, 3)]],
    3: [("--ulysses-size 3 --seq-length 60", "six_heads", f"{W} --num-key-value-heads 2"),
        ("--ring-size 3 --seq-length 60", "llama", W)],
}


def cases(world: int) -> list[Case]:
    return [Case(f"{style} {model} {flags}", world, flags, style, model, "ragged")
            for flags, style, model in LAYOUTS[world]]


@pytest.mark.parametrize("world", LAYOUTS)
def test_gradients(world: int) -> None:
    check_gradients(world, cases(world))


def test_the_window_matters_to_the_reference() -> None:
    """Without the window the reference differs, so the comparison above sees a window that is left out."""
    dense, local = (Case("", 1, "", "llama", flags).run() for flags in ("", W))
    weights, data = random_weights(dense), batch(dense, "ragged")
    steps = [reference_step(run, weights, *data) for run in (dense, local)]
    assert max(differences(*steps).values()) > 0.01
