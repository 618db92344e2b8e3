"""Make a run small enough to prove on a few CPU processes, without changing which code it runs.

What may shrink: widths, heads (by a common factor), layers per stage, sequence, microbatches, data
parallelism. What stays: all other degrees, the number of stages, ratios of heads, and every switch. After
each shrink the ``signature`` of the run, the list of decisions that pick a branch of the code, must be what
it was. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_sp.config.resolve import resolve, with_vocab
from megatron_sp.config.rules.checks import check_problems
from megatron_sp.config.schema import Checkpoint, Data, Logging, Precision, Run, Schedule
from megatron_sp.errors import ConfigError
from megatron_sp.layout.heads import HeadSplit
from megatron_sp.layout.stages import stage_layers

MOST_PROCESSES = 16
#: Not a multiple of anything, so that the vocabulary has padding rows.
VOCABULARY = 89


class TooLargeError(ConfigError):
    """A run that cannot be shrunk to what fits here."""


@dataclass(frozen=True)
class Small:
    """A run to prove, and what is different from the run that was asked for."""

    run: Run
    notes: list[str]


def head_signature(run: Run) -> tuple[Any, ...]:
    """How heads meet tp and Ulysses: replicated key/value heads, uneven splits, copies, unequal groups."""
    model, parallel = run.model, run.parallel
    found = []
    for tp_rank in range(parallel.tp):
        split = HeadSplit.of(model.num_attention_heads, model.num_query_groups, tp=parallel.tp, tp_rank=tp_rank,
                             ulysses=parallel.ulysses)
        sizes = {stop - start for start, stop in split.ulysses_query}
        covered = [head for start, stop in split.ulysses_kv for head in range(start, stop)]
        groups = [split.groups(rank) for rank in range(parallel.ulysses)]
        even = [len(group) % (group[-1] + 1) == 0 and group == tuple(
            i * (group[-1] + 1) // len(group) for i in range(len(group))) for group in groups]
        found.append((split.kv_is_replicated_over_tp, len(sizes), len(covered) != len(set(covered)), tuple(even),
                      model.num_query_groups == 1, model.num_query_groups == model.num_attention_heads))
    return tuple(found)


def signature(run: Run) -> dict[str, Any]:
    """The decisions that sizes and degrees take about which code runs."""
    model, parallel, train = run.model, run.parallel, run.train
    counts = [len(layers) for layers in stage_layers(model, parallel)]
    microbatches = train.global_batch_size // max(1, train.micro_batch_size * parallel.dp)
    stages = len(counts)
    shard = 1 if parallel.zero_stage == 0 else parallel.fsdp_size or parallel.fsdp
    return {
        "heads": head_signature(run), "stages": stages, "uneven stages": len(set(counts)) > 1,
        "accumulation": microbatches > 1, "pipeline filled": microbatches >= stages,
        "pipeline steady": microbatches > stages, "rounds": min(2, microbatches // parallel.pp),
        "micro-batch above 1": train.micro_batch_size > 1, "data parallel": parallel.dp > 1,
        # a sum of three terms has the same bits everywhere only if it is made in one order
        "copies of sums": parallel.pp > 1 and not model.untie_embeddings_and_output_weights and parallel.fsdp > 2,
        "sharded": shard > 1, "replicated": parallel.fsdp // shard > 1,
        "memory": memory_signature(run), "partly rotated heads": model.rotary_percent < 1, "tail of learned positions":
            model.position_embedding_type == "learned_absolute" and model.max_position_embeddings > run.data.seq_length,
    }


def memory_signature(run: Run) -> tuple[bool, ...]:
    """Whether there is more than one tile of tokens, more than one layer in a recomputed unit, and a rest."""
    memory, tokens = run.memory, run.data.seq_length // run.parallel.sp
    fewest = min(len(layers) for layers in stage_layers(run.model, run.parallel))
    return (0 < memory.mlp_tile_size < tokens, 0 < memory.loss_tile_size < tokens, memory.recompute_num_layers > 1,
            memory.recompute_method == "block" and memory.recompute_num_layers < fewest)


def shrink(run: Run, most: int = MOST_PROCESSES) -> Small:
    """The smallest run that still is this one.

    Args:
        run: resolved and checked, vocabulary open.
        most: processes that may be used.

    Raises:
        TooLargeError: too many processes, or no smaller run with the same signature.
    """
    run, notes = _without_what_proof_cannot_keep(run)
    wanted = signature(run)
    base = _small_model(_small_heads(run, wanted), wanted)
    per_replica = run.parallel.tp * run.parallel.pp * run.parallel.sp
    if per_replica > most:
        raise TooLargeError(
            f"too large to prove here: one replica needs {per_replica} processes (tensor {run.parallel.tp} x pipeline "
            f"{run.parallel.pp} x Ulysses {run.parallel.ulysses} x ring {run.parallel.ring}), and at most {most} are "
            "used; prove a layout with smaller degrees of the same kind.")
    for small in _candidates(base, most // per_replica):
        if signature(small) == wanted:
            return Small(small, notes + _changes(run, small))
    if run.parallel.dp > 1 and run.parallel.sp > 1:  # states stay sharded over the sequence ranks
        alone = shrink(_one_replica(run), most)
        return Small(alone.run, [*notes, f"data parallelism is left out of this proof: {run.parallel.dp} -> 1 (two "
                                         f"replicas would need {2 * per_replica} processes, {most} are allowed).",
                                 *alone.notes])
    raise TooLargeError(
        f"too large to prove here: every smaller form of this run with at most {most} processes would run other code "
        f"({per_replica} processes per replica, data parallel {run.parallel.dp}); prove a layout with smaller degrees "
        "of the same kind.")


def _without_what_proof_cannot_keep(run: Run) -> tuple[Run, list[str]]:
    """In fp32/fp64, without dropout, files and ramp-up: the notes say so."""
    notes, parallel = [], replace(run.parallel, sequence_split=0, shared_memory=False,  # exchanges as on GPUs
                                  ulysses_overlap_groups=_overlap_on_gpus(run))
    if run.precision.dtype != "float32":
        if parallel.zero_stage == 0 and parallel.fsdp > 1:  # FSDP keeps the master weights: in shards of one rank
            parallel = replace(parallel, zero_stage=1, fsdp_size=1)
        notes.append(f"{run.precision.dtype} is proven in float64: rounding would hide errors.")
    model = run.model
    if model.attention_dropout or model.hidden_dropout:
        notes.append("dropout is set to 0: its masks differ between layouts on purpose.")
    if run.train.rampup_batch_size or run.train.step_batch_size_schedule:
        notes.append("the final global batch size is proven, not its ramp-up.")
    run = replace(
        run, precision=Precision(), checkpoint=Checkpoint(), logging=Logging(), schedule=Schedule(lr=run.schedule.lr),
        parallel=parallel,
        data=Data(seq_length=run.data.seq_length, mock_data=True, tokenizer_type="NullTokenizer"),
        model=replace(model, attention_dropout=0.0, hidden_dropout=0.0, vocab_size=VOCABULARY, padded_vocab_size=0,
                      make_vocab_size_divisible_by=8),
        train=replace(run.train, rampup_batch_size=(), step_batch_size_schedule=(),
                      decrease_batch_size_if_needed=False))
    step = run.train.micro_batch_size * run.parallel.dp
    rounded = max(1, run.train.global_batch_size // step) * step
    return replace(run, train=replace(run.train, global_batch_size=rounded)), notes


def _overlap_on_gpus(run: Run) -> int:
    """Head groups of the Ulysses exchange where ``--ulysses-overlap-groups`` says nothing."""
    parallel, model = run.parallel, run.model
    if parallel.ulysses_overlap_groups or parallel.ulysses == 1 or parallel.ring > 1 or run.train.compile or (
            run.memory.attention_head_groups > 1):
        return parallel.ulysses_overlap_groups
    heads = HeadSplit.of(model.num_attention_heads, model.num_query_groups, tp=parallel.tp, ulysses=parallel.ulysses)
    return heads.free_groups(2)


def _one_replica(run: Run) -> Run:
    parallel = run.parallel
    world = parallel.world_size // parallel.dp
    whole = parallel.fsdp_size in (0, parallel.fsdp)
    one = replace(run, parallel=replace(parallel, world_size=world, fsdp_size=0 if whole else parallel.fsdp_size),
                  train=replace(run.train, global_batch_size=run.train.global_batch_size // parallel.dp))
    if not whole and parallel.sp % parallel.fsdp_size:
        raise TooLargeError("too large to prove here: --fsdp-size spans replicas that would have to be left out; prove "
                            "a layout with smaller degrees of the same kind.")
    return resolve(one, world)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(number, 0, -1) if number % divisor == 0]


def _small_heads(run: Run, wanted: dict[str, Any]) -> Run:
    """Heads divided by the largest factor that changes nothing."""
    model, parallel = run.model, run.parallel
    runs = max(1, parallel.ulysses_overlap_groups, run.memory.attention_head_groups)  # each has a head for each rank
    for factor in _divisors(model.num_query_groups):
        heads, groups = model.num_attention_heads // factor, model.num_query_groups // factor
        if heads % parallel.tp or heads < parallel.tp * parallel.ulysses * runs:
            continue
        small = replace(run, model=replace(model, num_attention_heads=heads, num_query_groups=groups))
        if head_signature(small) == wanted["heads"]:
            return small
    return run


def _small_model(run: Run, wanted: dict[str, Any]) -> Run:
    """Narrow widths, few layers, a short sequence."""
    model, parallel = run.model, run.parallel
    width = next(width for width in (4, 8, 16, 32, 64, model.kv_channels)
                 if int(width * model.rotary_percent) % 2 == 0 and int(width * model.rotary_percent) > 0)
    if model.position_embedding_type != "rope":
        width = 4
    hidden, unit = 32, 4 * parallel.tp
    ffn = max(unit, round(model.ffn_hidden_size / model.hidden_size * hidden / unit) * unit)
    tokens = parallel.sp * (2 if parallel.ring > 1 else 1) * (parallel.tp if parallel.megatron_sp else 1)
    length = tokens * max(1, -(-16 // tokens))
    tail = 8 if wanted["tail of learned positions"] else 0
    given, tile = run.memory, max(1, length // parallel.sp // 2)
    mlp_tiled, loss_tiled, *_ = memory_signature(run)
    memory = replace(given, mlp_tile_size=tile if mlp_tiled else given.mlp_tile_size,
                     loss_tile_size=tile if loss_tiled else given.loss_tile_size,
                     recompute_num_layers=_few_recomputed(run))
    return replace(
        run, memory=memory, data=replace(run.data, seq_length=length),
        train=replace(run.train, train_iters=3, train_samples=0),
        model=replace(model, hidden_size=hidden, kv_channels=min(width, model.kv_channels), ffn_hidden_size=ffn,
                      num_layers=_few_layers(run), max_position_embeddings=length + tail),
        parallel=replace(parallel, layers_per_virtual_stage=0, pipeline_layers=_few_layers_each(run)))


def _few_recomputed(run: Run) -> int:
    return 1 if run.memory.recompute_method == "block" else min(2, run.memory.recompute_num_layers)


def _layers_per_stage(run: Run) -> int:
    """One, or two where recomputation makes units of several layers or leaves a rest."""
    *_, several, rest = memory_signature(run)
    return 2 if several or rest else 1


def _few_layers(run: Run) -> int:
    """Few layers a stage where stages are equal, and what is left over; without pipeline two."""
    stages = run.parallel.pp * run.parallel.stages_per_rank
    if stages == 1:
        return min(2, run.model.num_layers)
    return sum(_few_layers_each(run)) or stages * _layers_per_stage(run) + run.model.num_layers % stages


def _few_layers_each(run: Run) -> tuple[int, ...]:
    """What the user gave each stage, less what they have in common."""
    given = run.parallel.pipeline_layers
    return tuple(count - min(given) + _layers_per_stage(run) for count in given)


def _candidates(run: Run, most_replicas: int) -> Iterator[Run]:
    """The run on fewer replicas and with fewer samples, smallest first; only those the rules allow."""
    parallel, train = run.parallel, run.train
    size = min(2, train.micro_batch_size)
    number = train.global_batch_size // (train.micro_batch_size * parallel.dp)
    whole = parallel.fsdp_size in (0, parallel.fsdp)
    for dp in range(1, min(parallel.dp, most_replicas) + 1):
        for shard in [0] if whole else _divisors(dp * parallel.sp):
            for count in range(1, number + 1):
                world = parallel.tp * parallel.pp * parallel.sp * dp
                small = replace(run, parallel=replace(parallel, world_size=world, fsdp_size=shard),
                                train=replace(train, micro_batch_size=size, global_batch_size=size * dp * count))
                small = with_vocab(resolve(small, world), VOCABULARY)
                if not check_problems(small):
                    yield small
                if count > 4 * parallel.pp * parallel.stages_per_rank:  # nothing new comes with more
                    break


def _changes(run: Run, small: Run) -> list[str]:
    """One line about what was made smaller."""
    pairs = {
        "hidden": (run.model.hidden_size, small.model.hidden_size),
        "heads": (f"{run.model.num_attention_heads}/{run.model.num_query_groups}",
                  f"{small.model.num_attention_heads}/{small.model.num_query_groups}"),
        "head width": (run.model.kv_channels, small.model.kv_channels),
        "ffn": (run.model.ffn_hidden_size, small.model.ffn_hidden_size),
        "layers": (run.model.num_layers, small.model.num_layers),
        "sequence": (run.data.seq_length, small.data.seq_length),
        "data parallel": (run.parallel.dp, small.parallel.dp),
        "global batch": (run.train.global_batch_size, small.train.global_batch_size),
        "micro-batch": (run.train.micro_batch_size, small.train.micro_batch_size),
    }
    changed = [f"{name} {before} -> {after}" for name, (before, after) in pairs.items() if before != after]
    return [f"made smaller: {', '.join(changed)}."] if changed else []
