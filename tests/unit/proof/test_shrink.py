"""Making a run small: what must stay, what may go, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_sp.config.load import load_run
from megatron_sp.config.rules.checks import check_problems
from megatron_sp.config.schema import Run
from megatron_sp.layout.masks.segments import Segments, window_reach
from megatron_sp.layout.sharding import uses_fsdp
from megatron_sp.layout.tiles import num_chunks
from megatron_sp.proof.small.code_paths import PATHS, code_paths, head_paths
from megatron_sp.proof.small.shrink import MOST_PROCESSES, PREFERRED_PROCESSES, NoSmallRunError, shrink

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
    (2, f"{HEADS} --pipeline-model-parallel-size 2 --recompute-granularity full --recompute-num-layers 5"),
    (2, f"{HEADS} --pipeline-model-parallel-size 2 --recompute-granularity full --recompute-num-layers 24"),
    (1, f"{HEADS} --recompute-granularity full --recompute-method block --recompute-num-layers 5"),
    (4, f"{HEADS} --pipeline-model-parallel-size 4 --recompute-granularity selective --recompute-method block "
        "--recompute-num-layers 6"),
    (2, f"{HEADS} --ulysses-size 2 --sequence-chunk-size 128"),
    (3, f"{HEADS} --pipeline-model-parallel-size 3 --sequence-chunk-size 1024"),
    (1, f"{HEADS} --sequence-chunk-size 64 --window-size 65"),
    (1, f"{HEADS} --sequence-chunk-size 64 --window-size 100"),
    (1, f"{HEADS} --sequence-chunk-size 256 --window-size 4000 --window-attn-skip-freq 2"),
    (1, f"{HEADS} --attention-pattern bigbird --attention-block-size 100"),
    (3, f"{HEADS} --ulysses-size 3 --seq-length 8190 --attention-pattern fixed --attention-block-size 90"),
    (1, f"{HEADS} --sequence-chunk-size 1024 --attention-pattern strided --attention-block-size 2048"),
    (1, f"{HEADS} --position-embedding-type rope --rotary-percent 0.5 --rope-scaling-type ntk "
        "--rotary-scaling-factor 4"),
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
    assert code_paths(small) == code_paths(run)
    assert small.parallel.world_size <= MOST_PROCESSES and small.model.hidden_size <= 64
    for axis in ("tp", "pp", "ulysses", "ring", "stages_per_rank", "zero_stage", "pipeline_schedule", "megatron_sp"):
        assert getattr(small.parallel, axis) == getattr(run.parallel, axis)
    assert small.model.num_attention_heads * run.model.num_query_groups == \
        run.model.num_attention_heads * small.model.num_query_groups
    assert small.memory.recompute_granularity == run.memory.recompute_granularity


LLAMA_70B = ("--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
             "--num-key-value-heads 8 --swiglu --normalization RMSNorm --position-embedding-type rope "
             "--disable-bias-linear --untie-embeddings-and-output-weights --seq-length 131072 --bf16 --zero-stage 1")


@pytest.mark.parametrize(("world", "flags", "degrees", "left_out"), [
    # the last two values: tp, pp, ulysses, ring, dp of the small run; a part that the small run does not prove
    (128, f"{LLAMA_70B} --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 "
          "--ulysses-size 4 --global-batch-size 32", (2, 3, 2, 1, 1), ""),
    (1024, f"{LLAMA_70B} --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 8 "
           "--ring-size 4 --num-layers-per-virtual-pipeline-stage 5 --global-batch-size 512", (2, 2, 1, 2, 2),
     "a ring of more than two ranks"),
    (1024, f"{LLAMA_70B} --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --ulysses-size 2 "
           "--ring-size 4 --global-batch-size 512", (2, 2, 2, 2, 1), "data parallelism"),
    # A ring of two would send to the rank that it receives from.
    (128, f"{HEADS} --ulysses-size 8 --ring-size 16 --zero-stage 3", (1, 1, 2, 3, 1), ""),
    # Shards within a sequence, copies across.
    (64, f"{HEADS} --ulysses-size 8 --ring-size 4 --zero-stage 3 --fsdp-size 32 --global-batch-size 64",
     (1, 1, 2, 3, 2), ""),
    # Key/value heads whose weights are whole on every rank, because tensor parallelism does not divide them.
    (64, "--num-attention-heads 64 --num-key-value-heads 4 --tensor-model-parallel-size 16 --ulysses-size 4",
     (2, 1, 3, 1, 1), ""),
    # 24 ranks do not divide 32 heads, so the small run has ranks that do not divide its heads.
    (24, f"{HEADS} --ulysses-size 24 --seq-length 8184", (1, 1, 3, 1, 1), ""),
    # The gradient of the tied embedding stays a sum over more than two ranks.
    (32, f"{HEADS} --ulysses-size 8 --pipeline-model-parallel-size 4", (1, 3, 3, 1, 1), ""),
    (64, f"{HEADS} --ulysses-size 8 --pipeline-model-parallel-size 4 --pipeline-schedule zbv --num-layers 80 "
         "--global-batch-size 64", (1, 2, 2, 1, 2), ""),
    (64, f"{HEADS} --pipeline-model-parallel-size 32 --num-layers 43 --pipeline-layers {'1 ' * 31} 12 "
         "--ulysses-size 2 --global-batch-size 64", (1, 3, 2, 1, 1), ""),
])
def test_large_degrees_shrink_to_small_ones_of_the_same_kind(world: int, flags: str, degrees: tuple[int, ...],
                                                             left_out: str) -> None:
    run = run_of(flags, world)
    small = shrink(run)
    parallel = small.run.parallel
    assert (parallel.tp, parallel.pp, parallel.ulysses, parallel.ring, parallel.dp) == degrees
    assert parallel.world_size <= MOST_PROCESSES and not check_problems(small.run)
    text = " ".join(small.notes)
    assert "degrees made smaller" in text and (left_out in text if left_out else not small.not_proven)
    assert head_paths(small.run) == head_paths(run)
    for switch in ("zero_stage", "pipeline_schedule", "megatron_sp"):
        assert getattr(parallel, switch) == getattr(run.parallel, switch)


def test_degrees_stay_while_they_fit() -> None:
    """A layout that needs few enough processes is proven as it is."""
    small = shrink(run_of(f"{HEADS} --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2", 16)).run.parallel
    assert (small.tp, small.pp, small.world_size) == (8, 2, 16) and small.world_size > PREFERRED_PROCESSES


def test_what_runs_on_gpus_is_proven() -> None:
    """A shrunk run keeps what GPUs run: overlapped exchanges by collectives, and FSDP for half precision at ZeRO 0."""
    small = shrink(run_of(f"{HEADS} --ulysses-size 2 --bf16", 4)).run
    assert small.parallel.ulysses_overlap_groups == 2 and not small.parallel.shared_memory
    assert uses_fsdp(small) and small.parallel.fsdp_size == 1
    assert not uses_fsdp(shrink(run_of(f"{HEADS} --ulysses-size 2", 4)).run)
    assert shrink(run_of(f"{HEADS} --ulysses-size 2 --ulysses-overlap-groups 1", 4)).run.parallel \
        .ulysses_overlap_groups == 1


def test_tied_copies_of_sums_of_several_terms_stay() -> None:
    """The small run sums more than two terms, because two terms have the same sum in any order."""
    run = run_of(f"{HEADS} --pipeline-model-parallel-size 2 --global-batch-size 64", 16)
    assert shrink(run).run.parallel.fsdp > 2


def test_a_code_path_has_a_description() -> None:
    assert code_paths(run_of(HEADS, 1)).keys() == PATHS.keys()


def test_chunks_are_more_than_any_buffer() -> None:
    """Twelve chunks, or as many as the run has, or so many that windows cut them into segments as in the run."""
    for flags, count, is_cut in (("--sequence-chunk-size 1024", 8, False), ("--sequence-chunk-size 64", 12, False),
                                 ("--sequence-chunk-size 64 --window-size 60", 16, True)):
        small = shrink(run_of(f"{HEADS} {flags}", 1)).run
        assert num_chunks(small) == count
        assert (Segments.of(count, window_reach(small)).size < count) == is_cut


@pytest.mark.parametrize(("flags", "divides_sequence", "divides_chunk"), [
    ("--attention-block-size 64", True, True), ("--attention-block-size 100", False, False),
    ("--sequence-chunk-size 64 --attention-block-size 64", True, True),
    ("--sequence-chunk-size 64 --attention-block-size 128", True, False),
    ("--sequence-chunk-size 64 --attention-block-size 100", False, False)])
def test_blocks_divide_what_the_users_blocks_divide(flags: str, divides_sequence: bool, divides_chunk: bool) -> None:
    small = shrink(run_of(f"{HEADS} --attention-pattern bigbird {flags}", 1)).run
    block, length = small.model.attention_block_size, small.data.seq_length
    assert length // block >= 4
    assert (length % block == 0) == divides_sequence
    assert ((small.memory.sequence_chunk_size or length) % block == 0) == divides_chunk


def test_notes_name_what_became_smaller() -> None:
    text = " ".join(shrink(run_of(f"{HEADS} --sequence-chunk-size 128 --window-size 300 --recompute-granularity full "
                                  "--recompute-num-layers 3 --mlp-tile-size 16", 1)).notes)
    for words in ("chunks 64 of 128 tokens -> 32 of 4 tokens", "recomputed layers 3 -> 2", "window 300 -> 7",
                  "MLP tile 16 -> 2", "layers 24 -> 4", "vocabulary 32000 -> 89"):
        assert words in text, words
    assert "block" not in text and "not in this proof" not in text


def test_a_run_without_small_form_is_refused_with_the_rule_that_it_breaks() -> None:
    run = run_of(f"{HEADS} --position-embedding-type rope --rotary-percent 0.25 --kv-channels 16 --rope-scaling-type "
                 "ntk --rotary-scaling-factor 4", 1)
    assert shrink(run).run.model.kv_channels == 16
    broken = replace(run, model=replace(run.model, rotary_percent=0.125))
    with pytest.raises(NoSmallRunError, match="at least 4 rotated elements"):
        shrink(broken)
