"""The sizes of a small run: for each technique the smallest shape in which all its branches run. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_sp.config.schema import Memory, Model, Run
from megatron_sp.layout.masks.segments import window_reach
from megatron_sp.layout.masks.windows import layer_names
from megatron_sp.layout.tiles import num_chunks
from megatron_sp.proof.small.code_paths import MANY_CHUNKS, block_fit, code_paths, has_segments, head_paths

#: Tokens of a small sequence: without chunks; with patterns of blocks, of which it then has several.
LENGTH, LENGTH_WITH_BLOCKS = 16, 32
#: Tokens of a chunk, where a sequence has few of them and where it has many.
CHUNK, CHUNK_OF_MANY = 8, 4
#: Window of a proof: a few of them in each sequence, and no divisor of its length.
WINDOW = 5
#: Tokens of a block that are tried, in this order, until blocks divide sequence and chunk as the user's blocks do.
BLOCKS = (3, 4, 5, 2, 6, 7, 9, 8, 10, 12, 16)
#: Fewest blocks in a sequence: with fewer, most patterns would see all earlier blocks.
FEWEST_BLOCKS = 4
#: Widths of a head that are tried, until an even number of channels is rotated.
WIDTHS = (4, 8, 16, 32, 64)


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(number, 0, -1) if number % divisor == 0]


def _head_counts(run: Run) -> Iterator[tuple[int, int]]:
    """Yield numbers of query and key/value heads to try: in the model's ratio, then in lower ones, smallest first."""
    model = run.model
    ratio = model.num_attention_heads // model.num_query_groups
    for factor in divisors(model.num_query_groups):
        yield model.num_attention_heads // factor, model.num_query_groups // factor
    smaller = [(groups * share, groups) for groups in range(1, 13) for share in range(min(2, ratio), min(6, ratio) + 1)]
    yield from sorted(smaller)


def small_heads(run: Run, wanted: object) -> Run | None:
    """Return the run with the fewest heads that take the code paths ``wanted``; None if its degrees allow no heads."""
    model, parallel = run.model, run.parallel
    # Each of these groups of heads needs a head for every rank.
    number_of_groups = max(1, parallel.ulysses_overlap_groups, run.memory.attention_head_groups)
    possible = [(heads, groups) for heads, groups in _head_counts(run)
                if heads % parallel.tp == 0 and heads >= parallel.tp * parallel.ulysses * number_of_groups]
    small = [replace(run, model=replace(model, num_attention_heads=heads, num_query_groups=groups))
             for heads, groups in possible]
    return next((one for one in small if head_paths(one) == wanted), small[-1] if small else None)


def small_model(run: Run, like: Run) -> Run:
    """Return the run with small widths, few layers and a short sequence, and the code paths of ``like``."""
    model, parallel, wanted = run.model, run.parallel, code_paths(like)
    hidden, unit = 32, 4 * parallel.tp
    ffn = max(unit, round(model.ffn_hidden_size / model.hidden_size * hidden / unit) * unit)
    count, at_once, window = _small_sequence(run, like)
    length = count * at_once
    tail = 8 if wanted["tail of learned positions"] else 0
    given, tile = run.memory, max(1, at_once // parallel.sp // 2)
    mlp_tiled, loss_tiled = wanted["tiles"]
    per_stage, recomputed = _small_groups(given, wanted["recomputation"])
    patterns = _small_patterns(run.model, has_window=window > 0)
    block = _small_block(length, at_once, wanted["patterns"][-1])
    layers, each = _few_layers(run, per_stage, is_uneven=wanted["uneven stages"],
                               least=len(patterns["attention_pattern_per_layer"]))
    return replace(
        run, data=replace(run.data, seq_length=length),
        memory=replace(given, sequence_chunk_size=at_once if given.sequence_chunk_size else 0,
                       mlp_tile_size=tile if mlp_tiled else given.mlp_tile_size,
                       loss_tile_size=tile if loss_tiled else given.loss_tile_size, recompute_num_layers=recomputed),
        model=replace(model, **patterns, attention_block_size=block, window_size=window, hidden_size=hidden,
                      kv_channels=_small_width(model), ffn_hidden_size=ffn, num_layers=layers,
                      max_position_embeddings=length + tail),
        parallel=replace(parallel, layers_per_virtual_stage=0, pipeline_layers=each))


def _small_width(model: Model) -> int:
    """Return a small width of a head, of which rotary embedding rotates an even number of channels, if there is one.

    NTK-aware scaling spreads its factor over the pairs of channels, so it needs two of them.
    """
    if model.position_embedding_type != "rope":
        return min(WIDTHS[0], model.kv_channels)
    least = 4 if model.rope_scaling_type == "ntk" else 2

    def fits(width: int) -> bool:
        rotated = int(width * model.rotary_percent)
        return rotated % 2 == 0 and rotated >= least

    return next(width for width in (*WIDTHS, model.kv_channels) if width >= model.kv_channels or fits(width))


def _small_sequence(run: Run, like: Run) -> tuple[int, int, int]:
    """Return the number of chunks of a sequence, the tokens of a chunk, and the window of the layers that have one.

    Without chunks, all tokens are one chunk. The chunks are as many as in ``like``, or many (see ``MANY_CHUNKS``), and
    a window cuts them into segments as there.
    """
    parallel, wanted = run.parallel, code_paths(like)
    tokens = parallel.sp * (2 if parallel.ring > 1 else 1) * (parallel.tp if parallel.megatron_sp else 1)
    count, (_, is_cut) = num_chunks(like), wanted["chunks"]
    has_window, _, reach = wanted["windows"]
    if count >= MANY_CHUNKS:
        small_reach = None if window_reach(like) is None else min(reach, 2)
        count = next((number for number in range(MANY_CHUNKS, count)
                      if has_segments(number, small_reach) == is_cut), count)
    least = (LENGTH_WITH_BLOCKS if wanted["patterns"][-1] else LENGTH) if count == 1 else (
        CHUNK if count < MANY_CHUNKS else CHUNK_OF_MANY)
    if any(wanted["tiles"]):
        least = max(least, 2 * parallel.sp)
    at_once = tokens * -(-least // tokens)
    window = {0: 1, 1: min(WINDOW, at_once - 1), 2: at_once + 3}[reach] if has_window else 0
    return count, at_once, window


def _small_block(length: int, at_once: int, fit: tuple[bool, bool, bool] | None) -> int:
    """Return the tokens of a block of a pattern; ``fit`` says how the user's blocks lie in sequence and chunk."""
    possible = [block for block in BLOCKS if length // block >= FEWEST_BLOCKS]
    return next((block for block in possible if block_fit(block, length, at_once) == fit), possible[0])


def _small_groups(memory: Memory, wanted: frozenset[tuple[bool, int, bool, bool]]) -> tuple[int, int]:
    """Return the layers that a stage needs for its groups of recomputed layers, and ``recompute_num_layers``.

    Args:
        wanted: see ``code_paths.recompute_paths``.
    """
    if any(in_groups for in_groups, *_ in wanted):
        return max(max(1, 2 * whole + rest) for _, whole, rest, _ in wanted), 2
    if any(others for *_, others in wanted):
        return 2, 1
    return 1, memory.recompute_num_layers


def _small_patterns(model: Model, has_window: bool) -> dict[str, Any]:
    """Return the fields of the patterns: those of the model's layers, with as few blocks as show all of it."""
    names = tuple(dict.fromkeys("causal" if name == "sliding-window" and not has_window else name
                                for name in layer_names(model)))
    several = names if model.attention_pattern_per_layer else ()
    local = min(2, model.attention_local_blocks)
    return dict(
        attention_pattern="" if several else names[0] if len(names) == 1 else next(
            name for name in names if name != "causal"),
        attention_pattern_per_layer=several, window_attn_skip_freq="2" if len(names) > 1 and not several else "",
        attention_local_blocks=local,
        attention_global_blocks=min(1, model.attention_global_blocks),
        attention_random_blocks=min(1, model.attention_random_blocks), attention_stride=min(3, model.attention_stride))


def _few_layers(run: Run, per_stage: int, is_uneven: bool, least: int) -> tuple[int, tuple[int, ...]]:
    """Return a small number of layers, and the layers of each stage if the user chose them.

    Args:
        per_stage: number of layers of the smallest stage.
        is_uneven: whether stages have different numbers of layers.
        least: smallest number of layers that the whole model may have.
    """
    stages, given = run.parallel.pp * run.parallel.stages_per_rank, run.parallel.pipeline_layers
    if stages == 1:
        groups = run.memory.recompute_granularity and run.memory.recompute_num_layers > 1
        return max(least, per_stage, 1 if groups else min(2, run.model.num_layers)), ()
    per_stage = max(per_stage, -(-least // stages))
    if given:  # keep how many layers each stage has more than the smallest one
        each = tuple(count - min(given) + per_stage for count in given)
        return sum(each), each
    return stages * per_stage + is_uneven, ()
