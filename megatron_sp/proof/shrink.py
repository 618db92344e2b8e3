"""Make a run small enough to prove on a few CPU processes, without changing which code it runs.

Widths, heads, layers, the sequence, microbatches and data parallelism always shrink. The other degrees stay when one
replica fits into the processes that may be used; else they shrink to the smallest ones of the same kind (``kinds``).
Pure arithmetic.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_sp.config.resolve import resolve, with_vocab
from megatron_sp.config.rules.checks import check_problems
from megatron_sp.config.schema import Checkpoint, Data, Logging, Optimizer, Parallel, Precision, Run, Schedule
from megatron_sp.errors import ConfigError
from megatron_sp.layout.heads import HeadSplit
from megatron_sp.proof.kinds import COSTS, cost_of, head_kinds, kinds

MOST_PROCESSES = 16
#: Smaller degrees are chosen so that a proof needs no more than this, where that gives up nothing.
PREFERRED_PROCESSES = 8
#: Not a multiple of anything, so that the vocabulary has padding rows.
VOCABULARY = 89
#: Iterations that the schedule of a proof is made for; the proof itself trains for fewer.
ITERATIONS = 8
#: Warm-up in the first step, the peak in the second, decay from the third on.
SCHEDULE = Schedule(lr=3e-3, min_lr=1e-3, lr_decay_style="cosine", lr_decay_iters=ITERATIONS, lr_warmup_iters=1,
                    lr_warmup_init=1e-3)
#: Random weights have larger gradients than this, so that clipping is active.
CLIP = 0.1
#: First dynamic loss scale of a proof in fp16: the default overflows in the first steps.
LOSS_SCALE = 256.0
AXES = {"tensor": "tp", "pipeline": "pp", "Ulysses": "ulysses", "ring": "ring"}


class TooLargeError(ConfigError):
    """A run that has no smaller form of its kind."""


@dataclass(frozen=True)
class Small:
    """A run to prove, and what is different from the run that was asked for.

    Attributes:
        run: resolved, with vocabulary sizes; in fp64.
        notes: sentences for the user.
        half: the half precision that the run asked for; None for fp32.
        lost: kinds of the run that this small run is not (keys of ``kinds``); empty in most cases.
    """

    run: Run
    notes: list[str]
    half: Precision | None = None
    lost: tuple[str, ...] = ()


def shrink(run: Run, most: int = MOST_PROCESSES) -> Small:
    """Return the smallest run of the same kind.

    Args:
        run: resolved and checked; the vocabulary may be open.
        most: processes that may be used.

    Raises:
        TooLargeError: no smaller run is of the same kind, even nearly.
    """
    half = half_precision(run.precision)
    run, notes = _without_what_proof_cannot_keep(run)
    wanted = kinds(run)
    best: Run | None = None
    best_key: tuple[int, bool, int] | None = None
    for degrees in _choices_of_degrees(run, most):
        with_heads = _small_heads(_with_degrees(run, degrees), head_kinds(run))
        if with_heads is None:
            continue
        base = _small_model(with_heads, run)
        size = base.parallel.tp * base.parallel.pp * base.parallel.sp
        for small in _candidates(base, run, min(most // size, run.parallel.dp)):
            is_exact = degrees == _degrees(run.parallel)
            key = (cost_of(_lost(small, wanted)), not is_exact and small.parallel.world_size > PREFERRED_PROCESSES,
                   0 if is_exact else small.parallel.world_size)
            if best_key is None or key < best_key:
                best, best_key = small, key
            if key[0] == 0:
                break
        if best_key is not None and best_key[:2] == (0, False):
            break
    if best is None:
        raise TooLargeError(
            f"too large to prove here: no smaller form of this run with at most {most} processes keeps the rules that "
            f"its flags must keep (tensor {run.parallel.tp} x pipeline {run.parallel.pp} x Ulysses "
            f"{run.parallel.ulysses} x ring {run.parallel.ring}); prove a layout with smaller degrees.")
    lost = _lost(best, wanted)
    return Small(best, [*notes, *_changes(run, best), *_degree_notes(run, best, lost)], half, tuple(lost))


def _lost(small: Run, wanted: dict[str, object]) -> list[str]:
    return [name for name, value in kinds(small).items() if value != wanted[name]]


# ---------------------------------------------------------------- what no proof keeps


def _without_what_proof_cannot_keep(run: Run) -> tuple[Run, list[str]]:
    """Return the run in fp64, on made-up documents, without ramp-up, and notes that say so.

    Exchanges are made as on GPUs: through collectives, overlapped by groups of heads.
    """
    notes, parallel = [], replace(run.parallel, sequence_split=0, shared_memory=False,
                                  ulysses_overlap_groups=_overlap_on_gpus(run))
    if run.precision.dtype != "float32":
        if parallel.zero_stage == 0 and parallel.fsdp > 1:  # FSDP keeps the master weights: in shards of one rank
            parallel = replace(parallel, zero_stage=1, fsdp_size=1)
        notes.append(f"{run.precision.dtype} is proven in float64, since rounding would hide errors; then compared "
                     f"roughly in {run.precision.dtype}.")
    if run.train.rampup_batch_size or run.train.step_batch_size_schedule:
        notes.append("the final global batch size is proven, not its ramp-up.")
    run = replace(
        run, precision=Precision(), checkpoint=Checkpoint(), logging=Logging(), parallel=parallel, schedule=SCHEDULE,
        optimizer=_visible(run.optimizer),
        data=Data(seq_length=run.data.seq_length, mock_data=True, split="70,30,0", eod_mask_loss=True,
                  tokenizer_type="NullTokenizer", num_workers=run.data.num_workers),
        memory=replace(run.memory, attention_head_groups=min(2, run.memory.attention_head_groups)),
        model=replace(run.model, vocab_size=VOCABULARY, padded_vocab_size=0, make_vocab_size_divisible_by=8),
        train=replace(run.train, rampup_batch_size=(), step_batch_size_schedule=(), train_samples=0, train_tokens=0,
                      train_iters=ITERATIONS, eval_iters=2, decrease_batch_size_if_needed=False))
    step = run.train.micro_batch_size * run.parallel.dp
    rounded = max(1, run.train.global_batch_size // step) * step
    return replace(run, train=replace(run.train, global_batch_size=rounded)), notes


def _visible(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer with clipping that acts, decay that shows, and an epsilon that keeps Adam well conditioned.

    Adam divides by gradients that may be nearly 0, where rounding differs between layouts.
    """
    return replace(optimizer, clip_grad=min(CLIP, optimizer.clip_grad), adam_eps=1e-4, weight_decay=0.1,
                   start_weight_decay=0.1, end_weight_decay=0.1, weight_decay_incr_style="constant")


def half_precision(precision: Precision) -> Precision | None:
    """Return the half precision of a run as a proof trains in it; None for fp32."""
    if precision.dtype == "float32":
        return None
    return replace(precision, initial_loss_scale=min(precision.initial_loss_scale, LOSS_SCALE))


def _overlap_on_gpus(run: Run) -> int:
    """Return the head groups of the Ulysses exchange, as a GPU chooses them where the flag says nothing; at most 2."""
    parallel, model = run.parallel, run.model
    if parallel.ulysses_overlap_groups or parallel.ulysses == 1 or parallel.ring > 1 or run.train.compile or (
            run.memory.attention_head_groups > 1):
        return min(2, parallel.ulysses_overlap_groups)
    heads = HeadSplit.of(model.num_attention_heads, model.num_query_groups, tp=parallel.tp, ulysses=parallel.ulysses)
    return heads.max_groups_without_extra_traffic(2)


# ---------------------------------------------------------------- degrees


def _degrees(parallel: Parallel) -> tuple[int, ...]:
    """tp, pp, ulysses, ring and stages per rank."""
    return parallel.tp, parallel.pp, parallel.ulysses, parallel.ring, parallel.stages_per_rank


def _choices_of_degrees(run: Run, most: int) -> Iterator[tuple[int, ...]]:
    """Yield degrees (``_degrees``) whose replica fits: the run's own first, then smaller ones, fewest ranks first."""
    own = _degrees(run.parallel)
    options = [range(min(2, degree), min(degree, 4) + 1) for degree in own[:4]]
    options.append(range(min(2, own[4]), min(2, own[4]) + 1))

    def ranks(degrees: tuple[int, ...]) -> int:
        tp, pp, ulysses, ring, _ = degrees
        return tp * pp * ulysses * ring

    if ranks(own) <= most:
        yield own
    smaller = [degrees for degrees in itertools.product(*options) if degrees != own and ranks(degrees) <= most]
    yield from sorted(smaller, key=lambda degrees: (ranks(degrees), degrees))


def _with_degrees(run: Run, degrees: tuple[int, ...]) -> Run:
    """Return the run with these degrees and stages that are as uneven as before; its data parallelism stays."""
    tp, pp, ulysses, ring, stages_per_rank = degrees
    parallel = run.parallel
    if degrees == _degrees(parallel):
        return run
    given, stages = parallel.pipeline_layers, pp * stages_per_rank
    layers = (*given[:stages - 1], given[-1]) if given else ()
    if given and len(set(given)) > 1 and len(set(layers)) == 1:
        layers = (layers[0] + 1, *layers[1:])
    parallel = replace(parallel, tp=tp, pp=pp, ulysses=ulysses, ring=ring, stages_per_rank=stages_per_rank,
                       pipeline_layers=layers, world_size=tp * pp * ulysses * ring * parallel.dp,
                       fsdp_size=0 if parallel.fsdp_size in (0, parallel.fsdp) else parallel.fsdp_size)
    return replace(run, parallel=parallel)


# ---------------------------------------------------------------- sizes


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(number, 0, -1) if number % divisor == 0]


def _head_counts(run: Run) -> Iterator[tuple[int, int]]:
    """Yield query and key/value heads to try: in the model's ratio, smallest first, then in smaller ratios."""
    model = run.model
    ratio = model.num_attention_heads // model.num_query_groups
    for factor in _divisors(model.num_query_groups):
        yield model.num_attention_heads // factor, model.num_query_groups // factor
    smaller = [(groups * share, groups) for groups in range(1, 13) for share in range(min(2, ratio), min(6, ratio) + 1)]
    yield from sorted(smaller)


def _small_heads(run: Run, wanted: object) -> Run | None:
    """Return the run with the fewest heads of these ``head_kinds``; None when its degrees allow none."""
    model, parallel = run.model, run.parallel
    runs = max(1, parallel.ulysses_overlap_groups, run.memory.attention_head_groups)  # each has a head for each rank
    possible = [(heads, groups) for heads, groups in _head_counts(run)
                if heads % parallel.tp == 0 and heads >= parallel.tp * parallel.ulysses * runs]
    small = [replace(run, model=replace(model, num_attention_heads=heads, num_query_groups=groups))
             for heads, groups in possible]
    return next((one for one in small if head_kinds(one) == wanted), small[-1] if small else None)


def _small_model(run: Run, like: Run) -> Run:
    """Return the run with narrow widths, few layers and a short sequence; it tiles and recomputes as ``like``."""
    model, parallel, wanted = run.model, run.parallel, kinds(like)
    width = 4
    if model.position_embedding_type == "rope":     # pairs of channels are rotated
        width = next(width for width in (4, 8, 16, 32, 64, model.kv_channels)
                     if int(width * model.rotary_percent) % 2 == 0 and int(width * model.rotary_percent) > 0)
    hidden, unit = 32, 4 * parallel.tp
    ffn = max(unit, round(model.ffn_hidden_size / model.hidden_size * hidden / unit) * unit)
    tokens = parallel.sp * (2 if parallel.ring > 1 else 1) * (parallel.tp if parallel.megatron_sp else 1)
    length = tokens * max(1, -(-16 // tokens))
    tail = 8 if wanted["tail of learned positions"] else 0
    given, tile = run.memory, max(1, length // parallel.sp // 2)
    mlp_tiled, loss_tiled, several, rest = wanted["memory"]
    recomputed = 1 if given.recompute_method == "block" else min(2, given.recompute_num_layers)
    layers, each = _few_layers(run, 2 if several or rest else 1, is_uneven=wanted["uneven stages"])
    return replace(
        run, data=replace(run.data, seq_length=length),
        memory=replace(given, mlp_tile_size=tile if mlp_tiled else given.mlp_tile_size,
                       loss_tile_size=tile if loss_tiled else given.loss_tile_size, recompute_num_layers=recomputed),
        model=replace(model, hidden_size=hidden, kv_channels=min(width, model.kv_channels), ffn_hidden_size=ffn,
                      num_layers=layers, max_position_embeddings=length + tail),
        parallel=replace(parallel, layers_per_virtual_stage=0, pipeline_layers=each))


def _few_layers(run: Run, per_stage: int, is_uneven: bool) -> tuple[int, tuple[int, ...]]:
    """Return a small number of layers, and those of each stage where the user gave them.

    Args:
        per_stage: layers of the smallest stage.
        is_uneven: whether stages differ.
    """
    stages, given = run.parallel.pp * run.parallel.stages_per_rank, run.parallel.pipeline_layers
    if stages == 1:
        return min(2, run.model.num_layers), ()
    if given:  # what each stage has more than the smallest stays
        each = tuple(count - min(given) + per_stage for count in given)
        return sum(each), each
    return stages * per_stage + is_uneven, ()


# ---------------------------------------------------------------- replicas and samples


def _candidates(base: Run, like: Run, most_replicas: int) -> Iterator[Run]:
    """Yield the run on few replicas with few samples, smallest first; only runs that all rules allow."""
    parallel, train = base.parallel, base.train
    size = min(2, train.micro_batch_size)
    number = train.global_batch_size // (train.micro_batch_size * like.parallel.dp)
    for dp in range(1, min(4, most_replicas) + 1):
        world = parallel.tp * parallel.pp * parallel.sp * dp
        for shard in _shard_sizes(like.parallel, parallel.sp, dp):
            for count in range(1, min(number, 4 * parallel.pp * parallel.stages_per_rank) + 1):
                small = replace(base, parallel=replace(parallel, world_size=world, fsdp_size=shard),
                                train=replace(train, micro_batch_size=size, global_batch_size=size * dp * count))
                small = with_vocab(resolve(small, world), VOCABULARY)
                if not check_problems(small):
                    yield small


def _shard_sizes(like: Parallel, sp: int, dp: int) -> list[int]:
    """Return the values of --fsdp-size to try: all ranks where ``like`` has that, else every divisor."""
    return [0] if like.fsdp_size in (0, like.fsdp) else _divisors(sp * dp)


# ---------------------------------------------------------------- notes


def _changes(run: Run, small: Run) -> list[str]:
    """Return one line about the sizes that became smaller."""
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


def _degree_notes(run: Run, small: Run, lost: list[str]) -> list[str]:
    """Return lines about the degrees that became smaller, and about what this proof leaves out."""
    notes = []
    before, after = run.parallel, small.parallel
    changed = [f"{name} {getattr(before, axis)} -> {getattr(after, axis)}" for name, axis in AXES.items()
               if getattr(before, axis) != getattr(after, axis)]
    if before.stages_per_rank != after.stages_per_rank:
        changed.append(f"stages per rank {before.stages_per_rank} -> {after.stages_per_rank}")
    if changed:
        notes.append(f"degrees made smaller, because one replica of {before.tp * before.pp * before.sp} ranks does not "
                     f"fit here or a smaller one is of the same kind: {', '.join(changed)}. The smaller degrees run "
                     "the same code.")
    left_out = [COSTS[name][1] if name in COSTS else name for name in lost]
    if left_out:
        notes.append(f"not in this proof (it would need more processes): {'; '.join(left_out)}.")
    return notes
