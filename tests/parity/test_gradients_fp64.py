"""Every layout computes the gradients of the plain one-process model, in fp64 to 1e-9.

Whole gradient tensors, the loss and the global gradient norm, seen from every rank: a factor of a
parallel degree, a sum that is missing or made twice, a token at the wrong position or a head paired
with the wrong key all show as a difference of more than a percent.
"""

from __future__ import annotations

from functools import lru_cache

import pytest

from megatron_sp.proof.data import batch
from megatron_sp.proof.reference import random_weights
from megatron_sp.proof.steps import Step, differences, reference_step, step_in_layout
from tests.helpers.configs import Case
from tests.helpers.spawn import run_ranks

TOLERANCE = 1e-9
TP2 = "--tensor-model-parallel-size 2"
SP = "--sequence-parallel"
U2, U4 = "--ulysses-size 2", "--ulysses-size 4"

LAYOUTS = [
    Case("one process", 1),
    Case("ulysses 2", 2, U2),
    Case("ulysses 4", 4, U4),
    Case("tp 2", 2, TP2),
    Case("tp 2, megatron sp", 2, f"{TP2} {SP}"),
    Case("tp 4, megatron sp", 4, f"--tensor-model-parallel-size 4 {SP}"),
    *[Case(f"dp 2, zero {stage}", 2, f"--zero-stage {stage}") for stage in (0, 1, 2, 3)],
    *[Case(f"ulysses 2, dp 2, zero {stage}", 4, f"{U2} --zero-stage {stage}") for stage in (0, 1, 2, 3)],
    Case("ulysses 2, dp 2, zero 3 within 2", 4, f"{U2} --zero-stage 3 --fsdp-size 2"),
    Case("ulysses 2, tp 2", 4, f"{U2} {TP2}"),
    Case("ulysses 2, tp 2, megatron sp, zero 3", 4, f"{U2} {TP2} {SP} --zero-stage 3"),
    Case("ulysses 2, tp 2, dp 2", 8, f"{U2} {TP2}"),
    Case("ulysses 2, tp 2, dp 2, megatron sp, zero 2", 8, f"{U2} {TP2} {SP} --zero-stage 2"),
    Case("ulysses 4, dp 2, through sockets", 8, f"{U4} --no-shared-memory"),
    *[Case(f"ulysses 2{name}, overlapped", world, f"{U2} {flags} --ulysses-overlap-groups 2", "eight_heads")
      for name, world, flags in (("", 2, ""), (", tp 2, zero 2", 4, f"{TP2} --zero-stage 2"))],
    Case("ulysses 2, one key/value head, overlapped", 2, f"{U2} --ulysses-overlap-groups 2", "eight_heads",
         model="--num-key-value-heads 1"),
    Case("ulysses 4, tp 2, zero 3, recompute", 8, f"{U4} {TP2} --zero-stage 3 --recompute-granularity full",
         "eight_heads"),
]

STEPS = [
    Case("accumulation 1", 1, "--micro-batch-size 4"),
    Case("accumulation 2", 1, "--micro-batch-size 2"),
    Case("micro-batch 2, ulysses 2", 2, f"{U2} --micro-batch-size 2"),
    *[Case(f"micro-batch {size}, ulysses 2, dp 2, zero {stage}", 4,
           f"{U2} --zero-stage {stage} --micro-batch-size {size}") for size in (1, 2) for stage in (1, 2)],
    Case("micro-batch 4, ulysses 2, tp 2, megatron sp", 4, f"{U2} {TP2} {SP} --micro-batch-size 4"),
    Case("recompute", 1, "--recompute-granularity full"),
    Case("recompute, ulysses 2, zero 3", 2, f"{U2} --zero-stage 3 --recompute-granularity full"),
    Case("recompute, tp 2, megatron sp", 2, f"{TP2} {SP} --recompute-granularity full"),
    Case("unfused attention, ulysses 2", 2, f"{U2} --attention-core unfused"),
]

HEADS = [
    *[Case(f"{kv} kv of 4 heads, ulysses 4", 4, U4, model=f"--num-key-value-heads {kv}") for kv in (1, 4)],
    *[Case(f"{kv} kv of 6 heads, ulysses 4", 4, U4, "six_heads", f"--num-key-value-heads {kv}") for kv in (1, 2, 3, 6)],
    *[Case(f"1 kv head, tp 2{name}", 2, f"{TP2} {flag}", model="--num-key-value-heads 1")
      for name, flag in (("", ""), (", megatron sp", SP), (", zero 1", "--zero-stage 1"))],
    Case("1 kv head, ulysses 2, tp 2", 4, f"{U2} {TP2}", model="--num-key-value-heads 1"),
    Case("1 kv head, tp 2, dp 2, zero 3, megatron sp", 4, f"{TP2} {SP} --zero-stage 3",
         model="--num-key-value-heads 1"),
    Case("2 kv heads, tp 4", 4, "--tensor-model-parallel-size 4"),
    *[Case(f"{kv} kv of 6 heads, tp 2, ulysses 2", 4, f"{TP2} {U2}", "six_heads", f"--num-key-value-heads {kv}")
      for kv in (3, 6)],
]

MASKS = [
    *[Case(f"{masked} masked, {name}", 4, layout, masked=masked)
      for masked in ("eod", "late half", "a sample", "all but one", "ragged")
      for name, layout in (("ulysses 2, dp 2", U2), ("ulysses 2, tp 2, zero 3", f"{U2} {TP2} --zero-stage 3"))],
    Case("late half masked, ulysses 4", 4, U4, masked="late half"),
    Case("ragged masked, micro-batch 2, dp 2, zero 2", 2, "--micro-batch-size 2 --zero-stage 2", masked="ragged"),
]

KINDS = [
    *[Case(f"gpt2, {name}", world, layout, "gpt2") for name, world, layout in (
        ("one process", 1, ""),
        ("ulysses 2, zero 3", 2, f"{U2} --zero-stage 3"),
        ("tp 2", 2, TP2),
        ("tp 2, megatron sp", 2, f"{TP2} {SP}"),
        ("ulysses 2, tp 2, megatron sp", 4, f"{U2} {TP2} {SP}"),
        ("tp 2, dp 2, zero 2, recompute", 4, f"{TP2} --zero-stage 2 --recompute-granularity full"))],
    # tp 2 does not divide three key/value heads: both ranks hold all their weights, and each uses two heads.
    *[Case(f"mixed, {name}", world, layout, "mixed") for name, world, layout in (
        ("one process", 1, ""),
        ("ulysses 2, zero 3", 2, f"{U2} --zero-stage 3"),
        ("tp 2", 2, TP2),
        ("tp 2, megatron sp", 2, f"{TP2} {SP}"),
        ("ulysses 2, tp 2, megatron sp, zero 3", 4, f"{U2} {TP2} {SP} --zero-stage 3"))],
    *[Case(f"{flag} {name}", 2, layout, "gpt2", f"--{flag}")
      for flag in ("openai-gelu", "squared-relu", "untie-embeddings-and-output-weights", "qk-layernorm")
      for name, layout in (("ulysses 2", U2), ("tp 2, megatron sp", f"{TP2} {SP}"))],
    Case("no positions, ulysses 2", 2, U2, "llama", "--position-embedding-type none"),
    Case("interpolated positions, ulysses 2", 2, U2, "llama", "--rotary-seq-len-interpolation-factor 4"),
    Case("layernorm 1p RMSNorm with qk norm, tp 2", 2, TP2, "llama", "--apply-layernorm-1p --qk-layernorm"),
]


def _same_reference(case: Case) -> tuple[str, str, str, int]:
    return case.style, case.model, case.masked, case.world


PP2, PP4, RING = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4", "--ring-size 2"
VIRTUAL, FOUR = "--num-virtual-stages-per-pipeline-rank 2", "--num-layers 4"

RINGS = [
    Case("ring 2", 2, RING),
    Case("ring 4", 4, "--ring-size 4"),
    Case("ring 2, ulysses 2, zero 3", 4, f"{RING} {U2} --zero-stage 3"),
    Case("ring 2, tp 2, megatron sp", 4, f"{RING} {TP2} {SP}"),
    Case("ring 2, ulysses 2, 2 kv of 6 heads", 4, f"{RING} {U2}", "six_heads", "--num-key-value-heads 2"),
    Case("ring 2, ulysses 4, dp 1, zero 2, ragged masked", 8, f"{RING} {U4} --zero-stage 2", masked="ragged"),
]

PIPELINES = [
    Case("pp 2", 2, PP2),
    Case("pp 2, tied", 2, PP2, "gpt2"),
    Case("pp 2, ulysses 2, dp 2, through sockets, tied", 8, f"{PP2} {U2} --no-shared-memory", "gpt2"),
    Case("pp 2, ulysses 2, zero 1, tied", 4, f"{PP2} {U2} --zero-stage 1", "gpt2"),
    Case("pp 2, tp 2, megatron sp, tied", 4, f"{PP2} {TP2} {SP}", "gpt2"),
    *[Case(f"pp 2, dp 2, zero {stage}, tied", 4, f"{PP2} --zero-stage {stage}", "gpt2") for stage in (0, 2, 3)],
    Case("pp 4", 4, PP4, model=FOUR),
    Case("pp 2, two stages each", 2, f"{PP2} {VIRTUAL}", model=FOUR),
    Case("pp 2, two stages each, dp 2, zero 1, tied", 4, f"{PP2} {VIRTUAL} --zero-stage 1", "gpt2", FOUR),
    Case("pp 2, zero-bubble", 2, f"{PP2} --pipeline-schedule zero-bubble", model=FOUR),
    Case("pp 2, zero-bubble, two stages each, dp 2, zero 2", 4,
         f"{PP2} {VIRTUAL} --pipeline-schedule zero-bubble --zero-stage 2", model=FOUR),
    Case("pp 2, zbv", 2, f"{PP2} --pipeline-schedule zbv", model=FOUR),
    Case("pp 2, zbv, dp 2, zero 1, tied", 4, f"{PP2} --pipeline-schedule zbv --zero-stage 1", "gpt2", FOUR),
    Case("pp 2, dualpipev", 2, f"{PP2} --pipeline-schedule dualpipev", model=FOUR),
    Case("pp 2, 5 layers", 2, PP2, model="--num-layers 5"),
    Case("pp 2, recompute", 2, f"{PP2} --recompute-granularity full"),
    Case("pp 2, ring 2, ulysses 2, zero 2, ragged masked", 8, f"{PP2} {RING} {U2} --zero-stage 2", masked="ragged"),
]

BY_INDEX = "--reset-position-ids --reset-attention-mask"
BY_EOD = f"{BY_INDEX} --document-boundaries eod"

DOCUMENTS = [
    *[Case(f"documents, {name}", world, layout, model=model, masked="eod") for name, world, layout, model in (
        ("one process", 1, "", BY_INDEX),
        ("unfused, micro-batch 2", 1, "--attention-core unfused --micro-batch-size 2", BY_INDEX),
        ("eod, ulysses 2, micro-batch 2, recompute", 2,
         f"{U2} --micro-batch-size 2 --recompute-granularity full", BY_EOD),
        ("selective, head groups", 1, "--recompute-granularity selective --attention-head-groups 2", BY_INDEX),
        ("tp 2, megatron sp, tiles", 2, f"{TP2} {SP} --mlp-tile-size 8 --loss-tile-size 8", BY_INDEX),
        ("dp 2, zero 3", 2, "--zero-stage 3", BY_INDEX),
        ("pp 2", 2, "--pipeline-model-parallel-size 2", BY_INDEX),
        ("pp 2, zero-bubble, eod", 2, "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble", BY_EOD),
        ("ring 2, micro-batch 2", 2, "--ring-size 2 --micro-batch-size 2", BY_INDEX),
        ("attention alone, ulysses 2", 2, U2, "--reset-attention-mask"),
        ("positions alone, ulysses 2", 2, U2, "--reset-position-ids"))],
    Case("documents, chunks, ulysses 2, micro-batch 2", 2, f"{U2} --sequence-chunk-size 16 --micro-batch-size 2",
         model=BY_INDEX, masked="eod"),
    Case("documents, ulysses 3", 3, "--ulysses-size 3", "six_heads",
         f"{BY_INDEX} --seq-length 66 --num-key-value-heads 2", "ragged"),
    Case("documents, learned positions, ulysses 2, ring 2", 4, f"{U2} --ring-size 2", "gpt2", BY_INDEX, "ragged"),
]

#: Cases with the same reference follow one another, so that each reference is computed once.
CASES = sorted(LAYOUTS + STEPS + HEADS + MASKS + KINDS + RINGS + PIPELINES + DOCUMENTS, key=_same_reference)


@lru_cache(maxsize=1)
def _expected(style: str, model: str, masked: str) -> Step:
    run = Case("reference", 1, "", style, model, masked).run()
    return reference_step(run, random_weights(run), *batch(run, masked))


def _compare(case: Case, expected: Step) -> dict[str, float]:
    """Run on one rank; return what differs by more than the tolerance."""
    run = case.run()
    step = step_in_layout(run, random_weights(run), *batch(run, case.masked))
    return {name: value for name, value in differences(step, expected).items() if not value <= TOLERANCE}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients(case: Case) -> None:
    for rank, wrong in enumerate(run_ranks(_compare, case.world, case, _expected(case.style, case.model, case.masked))):
        assert not wrong, f"rank {rank} of {case.flags()}"


def test_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
