"""Patterns of sparse attention compute the gradients of the plain model with dense masks, in fp64 to 1e-9."""

from __future__ import annotations

import pytest

from tests.helpers.configs import Case
from tests.parity.against_one_process import check_gradients

BLOCK = "--attention-block-size 5 --attention-local-blocks 2"
FIXED, BIRD = f"--attention-pattern fixed {BLOCK}", f"--attention-pattern bigbird {BLOCK}"
LONG, STRIDED = f"--attention-pattern longformer {BLOCK}", f"--attention-pattern strided {BLOCK}"
BY_HEAD, HALF = "--attention-blocks-by-head", "--window-attn-skip-freq 2"
MIXED = f"--attention-pattern-per-layer strided sliding-window {BLOCK} --window-size 11"
FULL, SELECTIVE = "--recompute-granularity full", "--recompute-granularity selective"
DROPOUT = "--attention-dropout 0.3"
DOCUMENTS = "--reset-position-ids --reset-attention-mask"
TP2, U2, PP2 = "--tensor-model-parallel-size 2", "--ulysses-size 2", "--pipeline-model-parallel-size 2"
CHUNK = "--sequence-chunk-size 16"  # no multiple of the block

#: Number of ranks -> flags of the layout, style, flags of the model.
LAYOUTS: dict[int, list[tuple[str, str, str]]] = {
    1: [("", "llama", f"{FIXED} {BY_HEAD}"), ("", "mixed", f"{BIRD} {HALF}"), (FULL, "gpt2", f"{LONG} {DOCUMENTS}"),
        ("--attention-core unfused", "gpt2", f"{STRIDED} {BY_HEAD}"), ("", "gpt2", f"{BIRD} {BY_HEAD} {DROPOUT}"),
        ("--attention-head-groups 2", "llama", f"{STRIDED} {BY_HEAD}"), ("", "gpt2", MIXED),
        (CHUNK, "llama", f"{BIRD} {BY_HEAD}"), (f"{CHUNK} {SELECTIVE}", "mixed", f"{FIXED} {DOCUMENTS}"),
        (CHUNK, "gpt2", f"{STRIDED} {DROPOUT}"), (f"{CHUNK} --offload-key-values", "mixed", MIXED)],
    2: [(U2, "llama", f"{BIRD} {BY_HEAD}"), (f"{U2} --zero-stage 3 {FULL}", "gpt2", f"{FIXED} {BY_HEAD} {HALF}"),
        (f"{U2} --ulysses-overlap-groups 2 --no-shared-memory", "eight_heads", f"{STRIDED} {BY_HEAD}"),
        (TP2, "gpt2", f"{BIRD} {BY_HEAD}"), (f"{TP2} --sequence-parallel", "llama", f"{LONG} {DOCUMENTS}"),
        (PP2, "llama", f"{FIXED} {BY_HEAD}"), (PP2, "gpt2", MIXED), (f"{U2} {CHUNK}", "llama", f"{FIXED} {BY_HEAD}"),
        (f"{PP2} {CHUNK}", "gpt2", BIRD), (U2, "llama", f"{BIRD} {BY_HEAD} {DROPOUT}"),
        *[(f"--zero-stage {stage}", "gpt2", f"{STRIDED} {BY_HEAD}") for stage in (1, 2, 3)]],
    3: [("--ulysses-size 3 --seq-length 60", "six_heads", f"{BIRD} {BY_HEAD} --num-key-value-heads 2"),
        ("--ulysses-size 3 --seq-length 60", "eight_heads", f"{FIXED} {BY_HEAD}"),
        ("--ulysses-size 3 --seq-length 60 --sequence-chunk-size 12", "eight_heads", f"{STRIDED} {BY_HEAD}")],
    4: [(f"{TP2} {U2}", "eight_heads", f"{BIRD} {BY_HEAD} {DOCUMENTS}"), (f"{U2} {PP2} {CHUNK}", "llama", FIXED)],
}


#: The layouts of every run of the tests.
ALWAYS = [(U2, "llama", f"{BIRD} {BY_HEAD}"), (f"{U2} {CHUNK}", "llama", f"{FIXED} {BY_HEAD} {DOCUMENTS}"),
          (TP2, "gpt2", f"{STRIDED} {BY_HEAD}")]


def cases(world: int, layouts: list[tuple[str, str, str]]) -> list[Case]:
    return [Case(f"{style} {model} {flags}", world, flags, style, model, "ragged") for flags, style, model in layouts]


@pytest.mark.slow
@pytest.mark.parametrize("world", LAYOUTS)
def test_gradients(world: int) -> None:
    check_gradients(world, cases(world, LAYOUTS[world]))


def test_gradients_of_few_layouts() -> None:
    check_gradients(2, cases(2, ALWAYS))
