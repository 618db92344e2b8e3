"""Derive values that the command line leaves open from the values that it gives."""

from __future__ import annotations

from dataclasses import replace

from megatron_sp.config.schema import Data, Model, Optimizer, Parallel, Run, Schedule, Train
from megatron_sp.errors import ConfigError
from megatron_sp.layout.batch_schedule import last_batch_size
from megatron_sp.layout.length_schedule import longest_length
from megatron_sp.layout.patterns.choice import PATTERNS
from megatron_sp.layout.schedules import SCHEDULES
from megatron_sp.layout.sequence_split import with_split


def resolve(run: Run, world_size: int) -> Run:
    """Fill in every value that follows from others.

    Resolving a resolved run changes nothing. A run with mistakes is resolved as far as possible; ``checks.check``
    reports the mistakes. Two values stay open: the vocabulary sizes (see ``with_vocab``), and the communication
    backend, which depends on the devices found.

    Args:
        world_size: number of processes.
    """
    data = replace(run.data, seq_length=run.data.seq_length or longest_length(run.data.seq_length_schedule))
    model = _model(run.model, data)
    parallel = with_split(replace(run.parallel, world_size=world_size), model)
    parallel = _pipeline(_parallel(parallel), model.num_layers)
    return replace(
        run, parallel=parallel, model=model, data=data, optimizer=_optimizer(run.optimizer),
        schedule=_schedule(run.schedule, run.train), train=_train(run.train, parallel))


def with_vocab(run: Run, vocab_size: int) -> Run:
    """Return the run with its vocabulary sizes.

    Args:
        vocab_size: unpadded size, from the tokenizer. A larger ``--vocab-size`` is used instead.

    Raises:
        ConfigError: ``--vocab-size`` or ``--padded-vocab-size`` is too small, or the padded size
            does not divide over the tensor-parallel ranks.
    """
    model, tp = run.model, run.parallel.tp
    if 0 < model.vocab_size < vocab_size and run.checkpoint.load_hf:
        raise ConfigError(f"--load-hf {run.checkpoint.load_hf} is a model of {model.vocab_size} tokens, and the "
                          f"tokenizer has {vocab_size}; name the model's own tokenizer.")
    if 0 < model.vocab_size < vocab_size:
        raise ConfigError(f"--vocab-size {model.vocab_size}: the tokenizer has {vocab_size} tokens; leave the flag "
                          f"out, or give {vocab_size} or more.")
    size = max(vocab_size, model.vocab_size)
    if size < 1:
        raise ConfigError("--vocab-size is required: neither the tokenizer nor the command line says how many tokens "
                          "there are.")
    padded = model.padded_vocab_size or pad(size, model.make_vocab_size_divisible_by * tp)
    if padded < size:
        raise ConfigError(f"--padded-vocab-size {padded} is below the vocabulary size {size}; give "
                          f"{pad(size, tp)} or more, or leave it out.")
    if padded % tp:
        raise ConfigError(f"--padded-vocab-size {padded} does not divide over --tensor-model-parallel-size {tp}; "
                          f"the next valid size is {pad(padded, tp)}.")
    return replace(run, model=replace(model, vocab_size=size, padded_vocab_size=padded))


def pad(size: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``size``."""
    return -(-size // multiple) * multiple


def default_ffn_hidden_size(hidden_size: int, gated: bool) -> int:
    """Return Megatron's default width: 4 h, or with a gate int(8 h / 3 / 64) x 64, but at least 64."""
    return max(64, int(8 * hidden_size / 3 / 64) * 64) if gated else 4 * hidden_size


def _parallel(parallel: Parallel) -> Parallel:
    """Fill in the number of ranks that share one copy of the weights, from the number of copies that a flag asks for.

    A number of copies that does not divide the ranks is left for the check, which reports it."""
    if parallel.fsdp_size or min(parallel.tp, parallel.pp, parallel.ulysses, parallel.ring) < 1:
        return parallel
    replicas = max(parallel.fsdp_replicas, 1)
    left = parallel.fsdp_replicas if parallel.fsdp % replicas else 0
    return replace(parallel, fsdp_size=parallel.fsdp // replicas or 1, fsdp_replicas=left)


def _pipeline(parallel: Parallel, num_layers: int) -> Parallel:
    """Fill in the number of stages per rank and the schedule.

    A missing number of stages follows from the layers per stage, or else from the schedule. A missing schedule follows
    from the number of stages: "1f1b" for one stage per rank, "interleaved" for more.
    """
    per_rank, schedule = parallel.stages_per_rank, parallel.pipeline_schedule
    if not per_rank and parallel.layers_per_virtual_stage > 0 and parallel.pp > 0:
        per_rank = num_layers // (parallel.pp * parallel.layers_per_virtual_stage)
    per_rank = per_rank or (SCHEDULES[schedule].default_stages_per_rank if schedule else 1)
    return replace(parallel, stages_per_rank=per_rank,
                   pipeline_schedule=schedule or ("interleaved" if per_rank > 1 else "1f1b"))


def _model(model: Model, data: Data) -> Model:
    heads, hidden = model.num_attention_heads, model.hidden_size
    positions, original = model.max_position_embeddings or data.seq_length, model.original_max_position_embeddings
    stretched = positions / original if model.rope_scaling_type and 0 < original <= positions else 0.0
    return replace(
        model,
        num_query_groups=model.num_query_groups or heads,
        kv_channels=model.kv_channels or (hidden // heads if heads > 0 else 0),
        ffn_hidden_size=model.ffn_hidden_size or (default_ffn_hidden_size(hidden, model.is_gated) if hidden else 0),
        attention_pattern=_pattern(model.attention_pattern) or (
            "" if model.attention_pattern_per_layer else "sliding-window" if model.window_size else "causal"),
        attention_pattern_per_layer=tuple(map(_pattern, model.attention_pattern_per_layer)),
        max_position_embeddings=positions,
        rotary_scaling_factor=model.rotary_scaling_factor or stretched,
        embedding_init_method_std=model.embedding_init_method_std or (
            0.0 if model.init_method_xavier_uniform else model.init_method_std))


def _pattern(name: str) -> str:
    """Return a value of --attention-pattern with the case that it is declared with; files keep theirs."""
    return name.lower() if name.lower() in PATTERNS else name


def _optimizer(optimizer: Optimizer) -> Optimizer:
    decay = optimizer.weight_decay
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    return replace(optimizer, start_weight_decay=decay if start < 0 else start,
                   end_weight_decay=decay if end < 0 else end)


def _schedule(schedule: Schedule, train: Train) -> Schedule:
    """Fill in the decay length where it is open: the length of the run, in samples if the run is given in samples."""
    if train.train_samples and not train.train_iters:
        return replace(schedule, lr_decay_samples=schedule.lr_decay_samples or train.train_samples)
    return replace(schedule, lr_decay_iters=schedule.lr_decay_iters or train.train_iters)


def _train(train: Train, parallel: Parallel) -> Train:
    size = train.global_batch_size or last_batch_size(train.step_batch_size_schedule)
    steps = max(train.gradient_accumulation_steps, 1)
    return replace(train, global_batch_size=size or train.micro_batch_size * max(parallel.dp, 1) * steps)
