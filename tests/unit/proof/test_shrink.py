"""Making a run small: what must stay, what may go, and what is refused."""

from __future__ import annotations

import pytest

from megatron_sp.config.load import load_run
from megatron_sp.config.rules.checks import check_problems
from megatron_sp.config.schema import Run
from megatron_sp.layout.sharding import uses_fsdp
from megatron_sp.proof.shrink import MOST_PROCESSES, TooLargeError, shrink, signature

BASE = ("--seq-length 8192 --lr 1e-4 --mock-data --vocab-size 32000 --attention-dropout 0 "
        "--hidden-dropout 0 --num-layers 24 --hidden-size 4096")
HEADS = "--num-attention-heads 32 --num-key-value-heads 8"


def run_of(flags: str, world: int) -> Run:
    length = "" if "--train-samples" in flags else "--train-iters 10"
    return load_run(f"{BASE} {length} {flags}".split(), world)[0]


@pytest.mark.parametrize(("world", "flags"), [
    (1, HEADS),
    (64, f"{HEADS} --tensor-model-parallel-size 2 --ulysses-size 2 --zero-stage 1 --global-batch-size 256"),
    (64, f"{HEADS} --ulysses-size 4 --ring-size 2 --zero-stage 3 --global-batch-size 64"),
    (64, f"{HEADS} --fsdp-size 8 --zero-stage 3 --global-batch-size 64 --micro-batch-size 1"),
    (32, f"{HEADS} --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 3 --global-batch-size 64"),
    (8, f"{HEADS} --pipeline-model-parallel-size 4 --num-layers 23 --global-batch-size 64"),
    (8, f"{HEADS} --pipeline-model-parallel-size 4 --pipeline-layers 5 7 7 5 --global-batch-size 2"),
    (8, f"{HEADS} --pipeline-model-parallel-size 4 --pipeline-schedule dualpipev --global-batch-size 64"),
    (8, "--num-attention-heads 12 --num-key-value-heads 3 --hidden-size 3072 --tensor-model-parallel-size 2 "
        "--ulysses-size 4"),
    (4, "--num-attention-heads 10 --num-key-value-heads 10 --hidden-size 2560 --ulysses-size 4"),
    (4, "--num-attention-heads 32 --num-key-value-heads 1 --ulysses-size 4 --micro-batch-size 4"),
    (2, f"{HEADS} --ulysses-size 2 --attention-head-groups 8"),
    (2, f"{HEADS} --ulysses-size 2 --ulysses-overlap-groups 4"),
    (16, f"{HEADS} --pipeline-model-parallel-size 2 --global-batch-size 64"),
    (2, f"{HEADS} --ulysses-size 2 --recompute-granularity full --recompute-num-layers 3"),
    (2, f"{HEADS} --ulysses-size 2 --mlp-tile-size 1024 --loss-tile-size 8192"),
    (2, f"{HEADS} --position-embedding-type rope --rotary-percent 0.25 --max-position-embeddings 16384"),
    (16, f"{HEADS} --tensor-model-parallel-size 8 --sequence-parallel"),
    (8, f"{HEADS} --train-samples 4096 --lr-decay-samples 4000 --lr-warmup-samples 100 "
        "--rampup-batch-size 8 8 100 --global-batch-size 32"),
])
def test_small_runs_are_the_same_run(world: int, flags: str) -> None:
    run = run_of(flags, world)
    small = shrink(run).run
    assert not check_problems(small)
    assert signature(small) == signature(run)
    assert small.parallel.world_size <= MOST_PROCESSES and small.model.hidden_size <= 64
    for axis in ("tp", "pp", "ulysses", "ring", "stages_per_rank", "zero_stage", "pipeline_schedule", "megatron_sp"):
        assert getattr(small.parallel, axis) == getattr(run.parallel, axis)
    assert small.model.num_attention_heads * run.model.num_query_groups == \
        run.model.num_attention_heads * small.model.num_query_groups
    assert small.memory.recompute_granularity == run.memory.recompute_granularity


def test_data_parallelism_goes_first_and_is_mentioned() -> None:
    small = shrink(run_of(f"{HEADS} --ulysses-size 8 --ring-size 2 --zero-stage 2 --global-batch-size 8", 128))
    assert small.run.parallel.dp == 1 and small.run.parallel.world_size == 16
    assert any("data parallelism is left out" in note for note in small.notes)


@pytest.mark.parametrize(("world", "flags"), [
    (32, f"{HEADS} --ulysses-size 8 --pipeline-model-parallel-size 4"),
    (32, f"{HEADS} --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --global-batch-size 8"),
])
def test_too_large(world: int, flags: str) -> None:
    with pytest.raises(TooLargeError, match="too large to prove here"):
        shrink(run_of(flags, world))


def test_what_runs_on_gpus_is_proven() -> None:
    """Heads overlapped through collectives; half precision at ZeRO stage 0 through FSDP."""
    small = shrink(run_of(f"{HEADS} --ulysses-size 2 --bf16", 4)).run
    assert small.parallel.ulysses_overlap_groups == 2 and not small.parallel.shared_memory
    assert uses_fsdp(small) and small.parallel.fsdp_size == 1
    assert not uses_fsdp(shrink(run_of(f"{HEADS} --ulysses-size 2", 4)).run)
    assert shrink(run_of(f"{HEADS} --ulysses-size 2 --ulysses-overlap-groups 1", 4)).run.parallel \
        .ulysses_overlap_groups == 1


def test_tied_copies_of_sums_of_several_terms_stay() -> None:
    """Two terms have the same sum in any order."""
    run = run_of(f"{HEADS} --pipeline-model-parallel-size 2 --global-batch-size 64", 16)
    assert shrink(run).run.parallel.fsdp > 2
