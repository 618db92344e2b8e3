"""List the branches of the framework's code that the sizes and degrees of a run select.

A proof trains a small version of a run. It proves the original only if both take the same code paths. ``shrink``
compares the code paths of the two: each one that differs is a branch that the proof leaves out. Pure arithmetic.
"""

from __future__ import annotations

from typing import Any

from megatron_sp.config.schema import Run
from megatron_sp.layout.heads import HeadSplit, are_equal_groups
from megatron_sp.layout.masks.segments import Segments, window_reach
from megatron_sp.layout.masks.windows import layer_names, layer_windows
from megatron_sp.layout.patterns.choice import layer_patterns
from megatron_sp.layout.recomputation import recompute_unit, recomputed_layers
from megatron_sp.layout.schedules import SCHEDULES
from megatron_sp.layout.stages import stage_layers
from megatron_sp.layout.tiles import num_chunks, tokens_at_once

#: A small run with as many chunks as this has more of them than any buffer of the framework holds. Sends that are open
#: at a time, segments that windows cut a sequence into, and keys and values on their way to the host are all fewer.
MANY_CHUNKS = 12

#: For each code path: the cost of a proof without it, and its description for users. Where a proof cannot have all code
#: paths, ``shrink`` chooses the small run for which the costs of the missing ones have the lowest sum.
PATHS: dict[str, tuple[int, str]] = {
    "data parallel": (2, "data parallelism; weights and optimizer states are sharded over the sequence ranks only"),
    "copies of sums": (1, "a tied embedding whose gradient is a sum over more than two ranks"),
    "ring above two": (3, "a ring of more than two ranks, in which the next and the previous rank differ"),
    "inner pipeline rank": (3, "a pipeline rank that holds neither the first nor the last stage"),
    "inner stage": (3, "a pipeline stage without embedding and loss"),
    "rounds": (2, "more microbatches than pipeline ranks"),
    "pipeline steady": (2, "a pipeline that alternates forward and backward of different microbatches"),
    "pipeline filled": (2, "as many microbatches as pipeline stages"),
    "shards within a sequence": (4, "whether the ranks of a shard group share one sequence"),
    "replicated": (5, "copies of the shards (hybrid sharding)"),
    "sharded": (20, "sharding of the model states"),
    "heads": (8, "the way the heads meet tensor parallelism and Ulysses"),
    "axes": (20, "a parallel degree above 1"),
    "stages per rank": (20, "several pipeline stages on a rank"),
    "uneven stages": (20, "pipeline stages with different numbers of layers"),
    "accumulation": (20, "several microbatches in a step"),
    "micro-batch above 1": (20, "microbatches of several sequences"),
    "tiles": (20, "tiles of the MLP or the loss"),
    "recomputation": (20, "the groups of layers that are recomputed together, and the layers that are not recomputed"),
    "chunks": (20, "the number of chunks of a sequence, up to 12, and the segments that windows cut them into"),
    "windows": (20, "layers with and without a window, and a window that reaches several chunks back"),
    "patterns": (20, "the patterns of blocks, and whether blocks divide the sequence and its chunks"),
    "partly rotated heads": (20, "heads of which a part is rotated"),
    "tail of learned positions": (20, "learned positions beyond the sequence"),
}


def code_paths(run: Run) -> dict[str, Any]:
    """Return a value for each code path that depends on the sizes and degrees of a resolved run.

    Two runs with equal values take the same branches. The keys are those of ``PATHS``.
    """
    model, parallel, train = run.model, run.parallel, run.train
    counts = [len(layers) for layers in stage_layers(model, parallel)]
    stages = len(counts)
    microbatches = train.global_batch_size // max(1, train.micro_batch_size * parallel.dp)
    shard = 1 if parallel.zero_stage == 0 else parallel.fsdp_size or parallel.fsdp
    is_v_shaped = parallel.pp > 1 and SCHEDULES[parallel.pipeline_schedule].is_v_shaped
    return {
        "axes": (parallel.tp > 1, parallel.pp > 1, parallel.ulysses > 1, parallel.ring > 1),
        "heads": head_paths(run), "ring above two": parallel.ring > 2,
        "stages per rank": min(2, parallel.stages_per_rank), "uneven stages": len(set(counts)) > 1,
        "inner stage": stages > 2, "inner pipeline rank": parallel.pp > (1 if is_v_shaped else 2),
        "accumulation": microbatches > 1, "pipeline filled": microbatches >= stages,
        "pipeline steady": microbatches > stages, "rounds": min(2, microbatches // parallel.pp),
        "micro-batch above 1": train.micro_batch_size > 1, "data parallel": parallel.dp > 1,
        # Copies of a tied weight must stay equal to the bit. Sums of two terms are equal in any order, those of three
        # or more only if every rank adds them in the same order.
        "copies of sums": parallel.pp > 1 and not model.untie_embeddings_and_output_weights and parallel.fsdp > 2,
        "sharded": shard > 1, "replicated": parallel.fsdp // shard > 1,
        "shards within a sequence": 1 < shard <= parallel.sp,
        "tiles": tile_paths(run), "recomputation": recompute_paths(run), "chunks": chunk_paths(run),
        "windows": window_paths(run), "patterns": pattern_paths(run),
        "partly rotated heads": model.rotary_percent < 1,
        "tail of learned positions":
            model.position_embedding_type == "learned_absolute" and model.max_position_embeddings > run.data.seq_length,
    }


def head_paths(run: Run) -> frozenset[tuple[Any, ...]]:
    """Return which code paths the numbers of heads select under tensor parallelism and Ulysses.

    The set has an entry for each different case among the tensor-parallel ranks. An entry says

    - whether every tensor-parallel rank holds the whole key/value weights;
    - whether Ulysses ranks get different numbers of query heads;
    - whether one key/value head is sent to several Ulysses ranks;
    - for which Ulysses ranks the query heads form groups of equal size, one for each key/value head;
    - whether the model has one key/value head, and whether it has one for each query head;
    - whether tensor-parallel ranks use different key/value heads: only then does a mix-up of ranks change a result.
    """
    model, parallel = run.model, run.parallel
    splits = [HeadSplit.of(model.num_attention_heads, model.num_query_groups, tp=parallel.tp, tp_rank=rank,
                           ulysses=parallel.ulysses) for rank in range(parallel.tp)]
    differ = len({split.kv for split in splits}) > 1
    found = set()
    for split in splits:
        sizes = {stop - start for start, stop in split.ulysses_query}
        sent = [head for start, stop in split.ulysses_kv for head in range(start, stop)]
        even = {are_equal_groups(split.kv_indices(rank)) for rank in range(parallel.ulysses)}
        found.add((split.kv_is_replicated_over_tp, len(sizes), len(sent) != len(set(sent)), tuple(sorted(even)),
                   model.num_query_groups == 1, model.num_query_groups == model.num_attention_heads, differ))
    return frozenset(found)


def chunk_paths(run: Run) -> tuple[int, bool]:
    """Return the number of chunks of a sequence, at most ``MANY_CHUNKS``, and whether windows cut it into segments."""
    count = num_chunks(run)
    return min(MANY_CHUNKS, count), has_segments(count, window_reach(run))


def has_segments(count: int, reach: int | None) -> bool:
    """Return whether the first pass keeps the keys and values of a part of the chunks only.

    Args:
        count: number of chunks.
        reach: see ``layout.masks.segments.window_reach``.
    """
    return Segments.of(count, reach).size < count


def window_paths(run: Run) -> tuple[bool, bool, int]:
    """Return whether some layers attend within a window, whether some do not, and how many chunks it reaches back.

    The number of chunks is at most 2.
    """
    windows = layer_windows(run.model)
    return any(windows), not all(windows), min(2, -(-(max(windows) - 1) // tokens_at_once(run)))


def pattern_paths(run: Run) -> tuple[frozenset[str], bool, bool, tuple[bool, bool, bool] | None]:
    """Return the patterns of blocks, whether some layers have none, whether their heads differ, and how blocks fit."""
    patterns = layer_patterns(run.model)
    names = frozenset(name for name, pattern in zip(layer_names(run.model), patterns) if pattern is not None)
    of_blocks = [pattern for pattern in patterns if pattern is not None]
    return (names, not all(patterns), any(pattern.by_head for pattern in of_blocks),
            block_fit(of_blocks[0].block, run.data.seq_length, tokens_at_once(run)) if of_blocks else None)


def block_fit(block: int, length: int, at_once: int) -> tuple[bool, bool, bool]:
    """Return whether blocks divide the sequence, whether they divide a chunk, and whether they are longer than one.

    Args:
        block: tokens of a block of a pattern.
        length: tokens of a sequence.
        at_once: tokens of a chunk; without chunks those of the sequence.
    """
    return length % block == 0, at_once % block == 0, block > at_once


def tile_paths(run: Run) -> tuple[bool, bool]:
    """Return whether the MLP has several tiles of tokens, and whether the loss has."""
    memory, tokens = run.memory, tokens_at_once(run) // run.parallel.sp
    return 0 < memory.mlp_tile_size < tokens, 0 < memory.loss_tile_size < tokens


def recompute_paths(run: Run) -> frozenset[tuple[bool, int, bool, bool]]:
    """Return which code paths recomputation takes in the pipeline stages; empty without it.

    An entry says of a stage whether several layers are recomputed as one group, how many whole groups of them there are
    (at most 2), whether a smaller group follows, and whether the stage has layers that are not recomputed.
    """
    memory, found = run.memory, set()
    unit = recompute_unit(memory)
    if memory.recompute_granularity:
        for layers in stage_layers(run.model, run.parallel):
            count = len(recomputed_layers(memory, layers))
            whole = min(2, count // unit) if unit > 1 else 0
            found.add((unit > 1, whole, count % unit > 0, count < len(layers)))
    return frozenset(found)


def cost_of_missing(names: list[str]) -> int:
    """Return the cost of a proof that leaves out these code paths, from ``PATHS``."""
    return sum(PATHS[name][0] for name in names)
