"""Make a run small enough to prove on a few CPU processes, without changing which code paths it takes.

Widths, heads, layers, the sequence, microbatches and data parallelism always shrink. The other parallel degrees stay as
they are if one replica fits into the available processes. Otherwise they shrink to the smallest degrees that take the
same code paths (``proof.code_paths``). Pure arithmetic.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_sp.config.resolve import resolve, with_vocab
from megatron_sp.config.rules.checks import check_problems
from megatron_sp.config.schema import Checkpoint, Data, Logging, Model, Optimizer, Parallel, Precision, Run, Schedule
from megatron_sp.errors import ConfigError
from megatron_sp.layout.heads import HeadSplit
from megatron_sp.layout.masks.windows import layer_names
from megatron_sp.proof.code_paths import COSTS, code_paths, cost_of_missing, head_paths

MOST_PROCESSES = 16
#: Of small runs that take all code paths, one that needs at most this many processes is preferred.
PREFERRED_PROCESSES = 8
#: A prime, so that the vocabulary is padded in every layout.
VOCABULARY = 89
#: Length of the learning rate schedule in iterations. The proof trains only the first few of them.
ITERATIONS = 8
#: The first step warms up, the second has the peak learning rate, and the third begins the decay.
SCHEDULE = Schedule(lr=3e-3, min_lr=1e-3, lr_decay_style="cosine", lr_decay_iters=ITERATIONS, lr_warmup_iters=1,
                    lr_warmup_init=1e-3)
#: The gradient norm of random weights is larger than this, so clipping is active.
CLIP = 0.1
#: Initial dynamic loss scale of a proof in fp16. The default one would overflow in the first steps and skip them.
LOSS_SCALE = 256.0
#: Window of a proof: a few blocks in each sequence, and no divisor of its length.
WINDOW = 5
#: Tokens of a block in a proof of a pattern; no divisor of the length either.
BLOCK = 3
AXES = {"tensor": "tp", "pipeline": "pp", "Ulysses": "ulysses", "ring": "ring"}


class TooLargeError(ConfigError):
    """No small run that the rules allow takes nearly the same code paths."""


@dataclass(frozen=True)
class Small:
    """A small run to prove, and how it differs from the user's run.

    Attributes:
        run: the small run, resolved, with vocabulary sizes, in fp64.
        notes: sentences that tell the user what was changed.
        half: the half precision of the user's run; None for fp32.
        not_proven: code paths of the user's run that the small run does not take (keys of ``code_paths``).
    """

    run: Run
    notes: list[str]
    half: Precision | None = None
    not_proven: tuple[str, ...] = ()


def shrink(run: Run, most: int = MOST_PROCESSES) -> Small:
    """Return the smallest run that takes the same code paths.

    Args:
        run: the user's run, resolved and checked; its vocabulary size may be unknown.
        most: number of processes that the proof may use.

    Raises:
        TooLargeError: no smaller run takes nearly the same code paths.
    """
    half = half_precision(run.precision)
    run, notes = _with_settings_of_proof(run)
    wanted = code_paths(run)
    best: Run | None = None
    best_key: tuple[int, bool, int] | None = None
    for degrees in _choices_of_degrees(run, most):
        with_heads = _small_heads(_with_degrees(run, degrees), head_paths(run))
        if with_heads is None:
            continue
        base = _small_model(with_heads, run)
        size = base.parallel.tp * base.parallel.pp * base.parallel.sp
        for small in _candidates(base, run, min(most // size, run.parallel.dp)):
            is_exact = degrees == _degrees(run.parallel)
            key = (cost_of_missing(_missing_paths(small, wanted)),
                   not is_exact and small.parallel.world_size > PREFERRED_PROCESSES,
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
    missing = _missing_paths(best, wanted)
    return Small(best, [*notes, *_changes(run, best), *_degree_notes(run, best, missing)], half, tuple(missing))


def _missing_paths(small: Run, wanted: dict[str, object]) -> list[str]:
    return [name for name, value in code_paths(small).items() if value != wanted[name]]


# ---------------------------------------------------------------- what every proof changes


def _with_settings_of_proof(run: Run) -> tuple[Run, list[str]]:
    """Return the run with the settings that every proof has, and notes about them for the user.

    A proof computes in fp64, on random documents and without a batch size ramp-up. Tensors are exchanged as on GPUs:
    through collectives, and under Ulysses overlapped by groups of heads.
    """
    notes, parallel = [], replace(run.parallel, sequence_split=0, shared_memory=False,
                                  ulysses_overlap_groups=_overlap_on_gpus(run))
    if run.precision.dtype != "float32":
        if parallel.zero_stage == 0 and parallel.fsdp > 1:  # as in half precision: FSDP, with shards of one rank
            parallel = replace(parallel, zero_stage=1, fsdp_size=1)
        notes.append(f"{run.precision.dtype} is proven in float64, since rounding would hide errors; then compared "
                     f"roughly in {run.precision.dtype}.")
    if run.data.pack_documents:
        notes.append(f"samples are cut out of a row of documents, without --pack-documents {run.data.pack_documents}, "
                     "which changes which tokens are read, but not how they are computed.")
    if run.train.rampup_batch_size or run.train.step_batch_size_schedule:
        notes.append("the final global batch size is proven, not its ramp-up.")
    run = replace(
        run, precision=Precision(), checkpoint=Checkpoint(), logging=Logging(), parallel=parallel, schedule=SCHEDULE,
        optimizer=_optimizer_of_proof(run.optimizer),
        data=Data(seq_length=run.data.seq_length, mock_data=True, split="70,30,0", eod_mask_loss=True,
                  tokenizer_type="NullTokenizer", num_workers=run.data.num_workers,
                  reset_position_ids=run.data.reset_position_ids, reset_attention_mask=run.data.reset_attention_mask,
                  document_boundaries=run.data.document_boundaries),
        memory=replace(run.memory, attention_head_groups=min(2, run.memory.attention_head_groups)),
        model=replace(run.model, vocab_size=VOCABULARY, padded_vocab_size=0, make_vocab_size_divisible_by=8),
        train=replace(run.train, rampup_batch_size=(), step_batch_size_schedule=(), train_samples=0, train_tokens=0,
                      train_iters=ITERATIONS, eval_iters=2, decrease_batch_size_if_needed=False))
    step = run.train.micro_batch_size * run.parallel.dp
    rounded = max(1, run.train.global_batch_size // step) * step
    return replace(run, train=replace(run.train, global_batch_size=rounded)), notes


def _optimizer_of_proof(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer with a low clipping threshold, a weight decay and a large epsilon.

    Clipping and decay then change the weights enough for a fault in them to be seen. The epsilon is for Adam, which
    divides by moments of gradients. Where these are nearly 0, rounding differs between layouts, and a small epsilon
    would turn that into different steps.
    """
    return replace(optimizer, clip_grad=min(CLIP, optimizer.clip_grad), adam_eps=1e-4, weight_decay=0.1,
                   start_weight_decay=0.1, end_weight_decay=0.1, weight_decay_incr_style="constant")


def half_precision(precision: Precision) -> Precision | None:
    """Return the half precision of a run with a lower initial loss scale; None for fp32."""
    if precision.dtype == "float32":
        return None
    return replace(precision, initial_loss_scale=min(precision.initial_loss_scale, LOSS_SCALE))


def _overlap_on_gpus(run: Run) -> int:
    """Return the number of head groups by which the Ulysses exchange overlaps on GPUs, at most 2."""
    parallel, model = run.parallel, run.model
    if parallel.ulysses_overlap_groups or parallel.ulysses == 1 or parallel.ring > 1 or run.train.compile or (
            run.memory.attention_head_groups > 1):
        return min(2, parallel.ulysses_overlap_groups)
    heads = HeadSplit.of(model.num_attention_heads, model.num_query_groups, tp=parallel.tp, ulysses=parallel.ulysses)
    chunked = run.memory.sequence_chunk_size and not heads.can_cut_keys(2)
    return 1 if chunked else min(2, heads.fewest_query_heads)


# ---------------------------------------------------------------- degrees


def _degrees(parallel: Parallel) -> tuple[int, ...]:
    """Return tp, pp, ulysses, ring and stages per rank."""
    return parallel.tp, parallel.pp, parallel.ulysses, parallel.ring, parallel.stages_per_rank


def _choices_of_degrees(run: Run, most: int) -> Iterator[tuple[int, ...]]:
    """Yield degrees (see ``_degrees``) whose replica needs at most ``most`` ranks.

    The run's own degrees come first, then smaller ones by their number of ranks.
    """
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
    """Return the run with these degrees and the same data parallelism. Uneven stages stay uneven."""
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
    """Yield numbers of query and key/value heads to try: in the model's ratio, then in lower ones, smallest first."""
    model = run.model
    ratio = model.num_attention_heads // model.num_query_groups
    for factor in _divisors(model.num_query_groups):
        yield model.num_attention_heads // factor, model.num_query_groups // factor
    smaller = [(groups * share, groups) for groups in range(1, 13) for share in range(min(2, ratio), min(6, ratio) + 1)]
    yield from sorted(smaller)


def _small_heads(run: Run, wanted: object) -> Run | None:
    """Return the run with the fewest heads that take the code paths ``wanted``; None if its degrees allow no heads."""
    model, parallel = run.model, run.parallel
    # Each of these groups of heads needs a head for every rank.
    number_of_groups = max(1, parallel.ulysses_overlap_groups, run.memory.attention_head_groups)
    possible = [(heads, groups) for heads, groups in _head_counts(run)
                if heads % parallel.tp == 0 and heads >= parallel.tp * parallel.ulysses * number_of_groups]
    small = [replace(run, model=replace(model, num_attention_heads=heads, num_query_groups=groups))
             for heads, groups in possible]
    return next((one for one in small if head_paths(one) == wanted), small[-1] if small else None)


def _small_model(run: Run, like: Run) -> Run:
    """Return the run with small widths, few layers and a short sequence, and the memory code paths of ``like``."""
    model, parallel, wanted = run.model, run.parallel, code_paths(like)
    width = 4
    if model.position_embedding_type == "rope":     # an even, positive number of channels must be rotated
        width = next(width for width in (4, 8, 16, 32, 64, model.kv_channels)
                     if int(width * model.rotary_percent) % 2 == 0 and int(width * model.rotary_percent) > 0)
    hidden, unit = 32, 4 * parallel.tp
    ffn = max(unit, round(model.ffn_hidden_size / model.hidden_size * hidden / unit) * unit)
    tokens = parallel.sp * (2 if parallel.ring > 1 else 1) * (parallel.tp if parallel.megatron_sp else 1)
    chunks = wanted["chunks"]
    at_once = tokens * max(1, -(-(16 if chunks == 1 else 8) // tokens))
    length = chunks * at_once
    tail = 8 if wanted["tail of learned positions"] else 0
    given, tile = run.memory, max(1, at_once // parallel.sp // 2)
    mlp_tiled, loss_tiled, several, rest = wanted["memory"]
    recomputed = 1 if given.recompute_method == "block" else min(2, given.recompute_num_layers)
    local, _, spans_chunks = wanted["windows"]
    seen = _small_patterns(run.model, has_window=local)
    layers, each = _few_layers(run, 2 if several or rest else 1, is_uneven=wanted["uneven stages"],
                               least=len(seen["attention_pattern_per_layer"]))
    return replace(
        run, data=replace(run.data, seq_length=length),
        memory=replace(given, sequence_chunk_size=at_once if given.sequence_chunk_size else 0,
                       mlp_tile_size=tile if mlp_tiled else given.mlp_tile_size,
                       loss_tile_size=tile if loss_tiled else given.loss_tile_size, recompute_num_layers=recomputed),
        model=replace(model, **seen, window_size=(at_once + WINDOW if spans_chunks else WINDOW) if local else 0,
                      hidden_size=hidden, kv_channels=min(width, model.kv_channels), ffn_hidden_size=ffn,
                      num_layers=layers, max_position_embeddings=length + tail),
        parallel=replace(parallel, layers_per_virtual_stage=0, pipeline_layers=each))


def _small_patterns(model: Model, has_window: bool) -> dict[str, Any]:
    """Return the fields of the patterns: those of the model's layers, with blocks of which a sequence has several."""
    names = tuple(dict.fromkeys("causal" if name == "sliding-window" and not has_window else name
                                for name in layer_names(model)))
    several = names if model.attention_pattern_per_layer else ()
    local = min(2, model.attention_local_blocks)
    return dict(
        attention_pattern="" if several else names[0] if len(names) == 1 else next(
            name for name in names if name != "causal"),
        attention_pattern_per_layer=several, window_attn_skip_freq="2" if len(names) > 1 and not several else "",
        attention_block_size=BLOCK, attention_local_blocks=local,
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
        return max(least, min(2, run.model.num_layers)), ()
    per_stage = max(per_stage, -(-least // stages))
    if given:  # keep how many layers each stage has more than the smallest one
        each = tuple(count - min(given) + per_stage for count in given)
        return sum(each), each
    return stages * per_stage + is_uneven, ()


# ---------------------------------------------------------------- replicas and samples


def _candidates(base: Run, like: Run, most_replicas: int) -> Iterator[Run]:
    """Yield the run with few replicas and few samples, smallest first. Runs that break a rule are left out."""
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
    """Return the values of --fsdp-size to try: 0 (all ranks) if ``like`` shards over all ranks, else every divisor."""
    return [0] if like.fsdp_size in (0, like.fsdp) else _divisors(sp * dp)


# ---------------------------------------------------------------- notes


def _changes(run: Run, small: Run) -> list[str]:
    """Return a sentence for the user about the sizes that became smaller."""
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


def _degree_notes(run: Run, small: Run, missing: list[str]) -> list[str]:
    """Return sentences for the user about degrees that became smaller and about code paths that are not proven."""
    notes = []
    before, after = run.parallel, small.parallel
    changed = [f"{name} {getattr(before, axis)} -> {getattr(after, axis)}" for name, axis in AXES.items()
               if getattr(before, axis) != getattr(after, axis)]
    if before.stages_per_rank != after.stages_per_rank:
        changed.append(f"stages per rank {before.stages_per_rank} -> {after.stages_per_rank}")
    if changed:
        notes.append(f"degrees made smaller, because one replica of {before.tp * before.pp * before.sp} ranks does not "
                     f"fit here or a smaller one takes the same code paths: {', '.join(changed)}.")
    left_out = [COSTS[name][1] if name in COSTS else name for name in missing]
    if left_out:
        notes.append(f"not in this proof (it would need more processes): {'; '.join(left_out)}.")
    return notes
