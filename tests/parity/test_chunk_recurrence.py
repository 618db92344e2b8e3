"""Sequences computed in chunks give the plain model's gradients and loss, in fp64 to 1e-9, in every layout.

The plain model computes whole sequences. So a chunk that misses an earlier key, or whose keys miss the gradient from a
later chunk, shows as a difference of more than a percent.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from megatron_sp.inference.sampling import Sampling, generate_batch
from megatron_sp.model.build import build_model
from megatron_sp.model.reading import token_losses
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.proof.data import batch, local_microbatches
from megatron_sp.proof.reference import random_weights, reference_evaluation
from megatron_sp.proof.steps import load_full
from megatron_sp.train.forward_backward import build_engine
from tests.helpers.configs import Case
from tests.helpers.spawn import run_ranks
from tests.parity.against_one_process import TOLERANCE, check_gradients

CHUNK = "--sequence-chunk-size 16"
FULL, SELECTIVE = "--recompute-granularity full", "--recompute-granularity selective"
DROPOUT = "--hidden-dropout 0.2 --attention-dropout 0.3"
TP2, U2 = "--tensor-model-parallel-size 2", "--ulysses-size 2"
SP = f"{TP2} --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
OVERLAP = "--ulysses-overlap-groups 2 --no-shared-memory"

Layout = tuple[str, str, str]
#: Name -> number of ranks, and for each case its flags beside ``CHUNK``, its style and flags of the model.
LAYOUTS: dict[str, tuple[int, list[Layout]]] = {
    "one process": (1, [
        ("", "llama", ""), (f"{SELECTIVE} --offload-key-values", "gpt2", ""), (f"{DROPOUT} {FULL}", "gpt2", "")]),
    "two ranks": (2, [
        (U2, "gpt2", ""), (f"{U2} --zero-stage 3 --offload-key-values", "llama", ""),
        (f"{SP} {SELECTIVE}", "mixed", ""), ("--zero-stage 0 --micro-batch-size 1", "gpt2", ""), (PP2, "gpt2", "")]),
}
MORE: dict[str, tuple[int, list[Layout]]] = {
    "one process": (1, [
        ("", "mixed", ""), ("--micro-batch-size 2", "llama", "--num-key-value-heads 1"), (FULL, "gpt2", ""),
        (f"{FULL} --recompute-num-layers 2", "llama", ""),
        (f"{FULL} --recompute-method block --recompute-num-layers 1 --offload-activations", "llama", ""),
        ("--mlp-tile-size 6 --loss-tile-size 6", "gpt2", ""), (f"--attention-head-groups 2 {FULL}", "llama", ""),
        ("--offload-optimizer", "gpt2", ""), ("--sequence-chunk-size 64", "llama", "")]),
    "two ranks": (2, [
        (U2, "llama", ""), (f"{U2} {SELECTIVE} --no-shared-memory", "llama", ""),
        (f"{U2} {OVERLAP} {FULL}", "eight_heads", ""), (f"{U2} --attention-head-groups 2", "llama", ""),
        (f"{U2} {DROPOUT}", "llama", ""), (f"{U2} {OVERLAP} {DROPOUT}", "eight_heads", ""),
        (TP2, "llama", "--num-key-value-heads 1"), (SP, "gpt2", ""), (f"{SP} {DROPOUT}", "llama", ""),
        *[(f"--zero-stage {stage} --micro-batch-size 1", "gpt2", "") for stage in (1, 2, 3)],
        (f"--zero-stage 3 {FULL}", "llama", ""), (f"{PP2} {DROPOUT}", "llama", ""),
        (f"{PP2} {SELECTIVE} --offload-key-values --micro-batch-size 2", "llama", "--num-layers 3")]),
    "three ranks": (3, [
        ("--pipeline-model-parallel-size 3", "gpt2", "--num-layers 3"),
        ("--pipeline-model-parallel-size 3 --sequence-chunk-size 4 --seq-length 48 --micro-batch-size 1", "gpt2",
         "--num-layers 3"),  # many chunks and several microbatches, where transfers in a wrong order hang
        ("--ulysses-size 3 --sequence-chunk-size 12 --seq-length 60", "six_heads", "--num-key-value-heads 2"),
        ("--ulysses-size 3 --sequence-chunk-size 12 --seq-length 60", "llama", "")]),
    "four ranks": (4, [
        (f"{U2} {SP} --zero-stage 3 {SELECTIVE}", "eight_heads", ""), (f"{U2} --zero-stage 2", "gpt2", ""),
        (f"{U2} --zero-stage 1 --fsdp-size 2", "gpt2", ""), (f"{PP2} {U2} --zero-stage 3", "gpt2", ""),
        (f"{PP2} {SP} {FULL}", "mixed", ""), (f"{PP2} --zero-stage 2 --micro-batch-size 1", "gpt2", "")]),
}


def cases(world: int, layouts: list[Layout]) -> list[Case]:
    return [Case(f"{style} {flags}", world, f"{CHUNK} {flags}", style, model, "ragged")
            for flags, style, model in layouts]


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients(name: str) -> None:
    world, layouts = LAYOUTS[name]
    check_gradients(world, cases(world, layouts))


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_gradients_of_more_layouts(name: str) -> None:
    world, layouts = MORE[name]
    check_gradients(world, cases(world, layouts))


def evaluation_errors(flags: Sequence[str], world: int) -> list[float]:
    """On a rank: the relative differences of an evaluation's mean loss from the plain model's."""
    return [evaluation_error(some, world) for some in flags]


def evaluation_error(flags: str, world: int) -> float:
    run = Case("evaluation", world, f"{CHUNK} {flags}", "gpt2", masked="eod").run()
    mesh, weights, data = ParallelMesh.build(run.parallel), random_weights(run), batch(run, "eod")
    model = build_model(run, mesh, dtype=torch.float64)
    load_full(model, weights)
    loss, valid = build_engine(run, model, mesh).evaluate(local_microbatches(run, mesh, *data))
    count = mesh.sum_over(torch.tensor(float(valid)), "fsdp")
    total = mesh.sum_over(mesh.sum_over(loss.double(), "fsdp"), "pp")  # only the last stage has losses
    return abs(float(total / count) / reference_evaluation(weights, run, [data]) - 1)


def test_evaluation() -> None:
    flags = [f"{U2} --offload-key-values --zero-stage 3", f"{PP2} --micro-batch-size 2"]
    for errors in run_ranks(evaluation_errors, 2, flags, 2):
        assert len(errors) == 2 and max(errors) < TOLERANCE


def reading_errors() -> tuple[float, bool]:
    """On a rank: the largest change of a token's loss when a text is read in chunks, and whether texts are equal."""
    run = Case("reading", 1, f"{CHUNK} --attention-head-groups 2", "gpt2").run()
    model = build_model(run, ParallelMesh.build(run.parallel), dtype=torch.float64)
    load_full(model, random_weights(run))
    text = batch(run)[0][0, :54]  # three chunks and a part of one
    whole, chunks = (token_losses(model.eval(), text, size) for size in (0, 16))
    prompts = [text[:40].tolist(), text[:45].tolist()]
    texts = [list(generate_batch(model, prompts, 5, Sampling(temperature=0), vocab_size=97, chunk=size))
             for size in (0, 16)]
    return float((whole - chunks).abs().max()), texts[0] == texts[1] and len(texts[0]) == 10


def test_a_text_read_in_chunks_is_read_alike() -> None:
    ((error, is_equal),) = run_ranks(reading_errors, 1)
    assert error < TOLERANCE and is_equal
