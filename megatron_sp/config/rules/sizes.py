"""Rules about sizes: model, ranks, sequence, batch."""

from __future__ import annotations

from megatron_sp.config.cli.values import counted, either, nearest, nearest_multiples
from megatron_sp.config.schema import Run
from megatron_sp.layout.batch_schedule import parse_batch_schedule


def check_model(run: Run) -> list[str]:
    """Return problems with the numbers of heads and with the widths of the model."""
    model = run.model
    found = []
    heads = model.num_attention_heads
    if heads > 0 and model.hidden_size > 0:
        if model.hidden_size % heads and model.kv_channels == model.hidden_size // heads:
            found.append(f"--hidden-size {model.hidden_size} is not a multiple of --num-attention-heads {heads}; "
                         f"choose {either(nearest_multiples(model.hidden_size, heads))}, or give --kv-channels.")
        if heads % max(model.num_query_groups, 1):
            valid = [str(groups) for groups in range(1, heads + 1) if heads % groups == 0]
            found.append(f"--num-query-groups {model.num_query_groups} does not divide --num-attention-heads {heads}; "
                         f"valid: {', '.join(valid)}.")
    if model.position_embedding_type == "rope" and model.kv_channels > 0:
        rotated = int(model.kv_channels * model.rotary_percent)
        if rotated % 2 or not rotated:
            found.append(f"Rotary positions turn pairs: --rotary-percent {model.rotary_percent:g} of head width "
                         f"{model.kv_channels} is {rotated}, which is not an even number above 0.")
    if model.max_position_embeddings < run.data.seq_length and not check_sequence(run):
        found.append(f"--max-position-embeddings {model.max_position_embeddings} is below --seq-length "
                     f"{run.data.seq_length}; raise it to {run.data.seq_length} or more.")
    if 0 < model.padded_vocab_size < model.vocab_size:
        found.append(f"--padded-vocab-size {model.padded_vocab_size} is below --vocab-size {model.vocab_size}.")
    return found


def check_parallel(run: Run) -> list[str]:
    """Return parallel degrees that do not divide the number of ranks, the heads or the widths."""
    model, parallel = run.model, run.parallel
    tp, pp, sp, world = parallel.tp, parallel.pp, parallel.sp, parallel.world_size
    if min(tp, pp, sp) < 1:
        return []
    found = []
    if world % (tp * pp * sp):
        found.append(f"{counted(world, 'process', 'processes')} cannot be divided into groups of {_groups_text(run)} = "
                     f"{tp * pp * sp}; start {either(nearest_multiples(world, tp * pp * sp))} processes, or lower one "
                     "of the sizes.")
    elif parallel.fsdp_size and parallel.fsdp % parallel.fsdp_size:
        found.append(f"--fsdp-size {parallel.fsdp_size} is not a divisor of the data- and "
                     f"sequence-parallel size {parallel.fsdp} ({world} / (--tensor-model-parallel-size {tp} x "
                     f"--pipeline-model-parallel-size {pp})).")
    elif parallel.fsdp_replicas > 1 and parallel.fsdp_size * parallel.fsdp_replicas != parallel.fsdp:
        found.append(f"--num-distributed-optimizer-instances {parallel.fsdp_replicas} x --fsdp-size "
                     f"{parallel.fsdp_size} is not the data- and sequence-parallel size {parallel.fsdp}; give one of "
                     "the two, as a divisor of it.")
    heads = model.num_attention_heads
    if heads > 0 and heads % tp:
        valid = [str(size) for size in range(1, heads + 1) if heads % size == 0]
        found.append(f"--tensor-model-parallel-size {tp} does not divide --num-attention-heads {heads}; valid: "
                     f"{', '.join(valid)}.")
    elif 0 < heads < parallel.ulysses * tp:
        found.append(f"--ulysses-size {parallel.ulysses} x --tensor-model-parallel-size {tp} = "
                     f"{parallel.ulysses * tp} is more than --num-attention-heads {heads}, and every rank needs a "
                     f"head; the largest --ulysses-size here is {heads // tp}, and "
                     f"--sequence-split {parallel.sp} adds a --ring-size for the rest.")
    if model.ffn_hidden_size % tp:
        found.append(f"--ffn-hidden-size {model.ffn_hidden_size} does not divide over --tensor-model-parallel-size "
                     f"{tp}; choose {either(nearest_multiples(model.ffn_hidden_size, tp))}.")
    if model.padded_vocab_size % tp:
        found.append(f"--padded-vocab-size {model.padded_vocab_size} does not divide over "
                     f"--tensor-model-parallel-size {tp}; choose "
                     f"{either(nearest_multiples(model.padded_vocab_size, tp))}.")
    return found


def check_overlap(run: Run) -> list[str]:
    """Return flags that ``--ulysses-overlap-groups`` excludes, and a problem where there are too few heads."""
    parallel, count = run.parallel, run.parallel.ulysses_overlap_groups
    if count < 2 or min(parallel.tp, parallel.ulysses) < 1:
        return []
    flag = f"--ulysses-overlap-groups {count}"
    excluded = {"--ring-size": parallel.ring > 1, "--attention-head-groups": run.memory.attention_head_groups > 1}
    found = [f"{flag} and {other} exclude each other; leave one out." for other, is_used in excluded.items() if is_used]
    if parallel.ulysses == 1:
        found.append(f"{flag} needs --ulysses-size 2 or more: there is no exchange to overlap.")
    heads = run.model.num_attention_heads // parallel.tp
    if 0 < heads < parallel.ulysses * count:
        found.append(f"{flag}: each group needs a head for each of the --ulysses-size {parallel.ulysses} ranks, and a "
                     f"tensor-parallel rank has {counted(heads, 'head')}; "
                     f"{_at_most(flag, heads // parallel.ulysses)}.")
    return found


def _at_most(flag: str, count: int) -> str:
    """Return the cure for too many groups of heads: fewer groups, or no flag where only one is possible."""
    return f"use {count} or less" if count > 1 else f"leave {flag.partition(' ')[0]} out"


def _groups_text(run: Run) -> str:
    """Return the parallel degrees above 1 with their flags, for messages about the size of one replica."""
    parallel = run.parallel
    degrees = {"--tensor-model-parallel-size": parallel.tp, "--pipeline-model-parallel-size": parallel.pp,
               "--ulysses-size": parallel.ulysses, "--ring-size": parallel.ring}
    return " x ".join(f"{flag} {size}" for flag, size in degrees.items() if size > 1)


def check_sequence(run: Run) -> list[str]:
    """Return a problem, with valid lengths, where the ranks that share a sequence do not divide --seq-length."""
    parallel, length = run.parallel, run.data.seq_length
    shares = {"--ulysses-size": parallel.ulysses, "--ring-size": parallel.ring}
    step = parallel.sp
    if parallel.ring > 1:  # zigzag: every rank owns an early and a late piece
        shares["2 x --ring-size"] = shares.pop("--ring-size")
        step *= 2
    if parallel.megatron_sp and parallel.tp > 1:
        shares["--sequence-parallel: --tensor-model-parallel-size"] = parallel.tp
        step *= parallel.tp
    if step < 1 or length < 1 or length % step == 0:
        return []
    said = " x ".join(f"{flag} {size}" for flag, size in shares.items() if size > 1)
    lengths, positions = nearest_multiples(length, step), run.model.max_position_embeddings
    longest = f" (from {positions + 1} on also raise --max-position-embeddings {positions})"
    return [f"--seq-length {length} does not divide into {step} parts ({said}); {nearest(lengths, 'length')}"
            f"{longest if positions < min(length, max(lengths)) else ''}."]


def check_batch(run: Run) -> list[str]:
    """Return problems with the global batch, the microbatch and the data-parallel size, also in a ramp-up."""
    train, parallel = run.train, run.parallel
    if train.micro_batch_size < 1 or parallel.world_size % (parallel.tp * parallel.pp * parallel.sp or 1):
        return []
    dp = max(parallel.dp, 1)
    step = train.micro_batch_size * dp
    found: list[str] = []
    processes = counted(parallel.world_size, "process", "processes")
    spelled = (f"--micro-batch-size {train.micro_batch_size} x data-parallel size {dp} = {step} ({dp} = {processes} / "
               f"{parallel.tp * parallel.pp * parallel.sp} per replica"
               f"{': ' + _groups_text(run) if _groups_text(run) else ''})")
    rounding = train.decrease_batch_size_if_needed
    if train.step_batch_size_schedule:
        return _step_schedule(run, step, spelled)
    if train.global_batch_size < step and rounding:
        found.append(f"--global-batch-size {train.global_batch_size} is below {spelled}; choose {step} or more.")
    elif train.global_batch_size % step and not rounding:
        found.append(f"--global-batch-size {train.global_batch_size} is not a multiple of {spelled}; "
                     f"{nearest(nearest_multiples(train.global_batch_size, step))}.")
    steps = train.gradient_accumulation_steps
    if steps and not found and train.global_batch_size // step != steps:
        found.append(f"--gradient-accumulation-steps {steps} and --global-batch-size {train.global_batch_size} "
                     f"contradict each other: {spelled}, so there are {train.global_batch_size // step} microbatches "
                     "in a step; leave one of the two out.")
    return found + _rampup(run, step, spelled)


def _step_schedule(run: Run, step: int, spelled: str) -> list[str]:
    train = run.train
    flag = f"--step-batch-size-schedule {' '.join(train.step_batch_size_schedule)}"
    found = []
    try:
        steps = parse_batch_schedule(train.step_batch_size_schedule)
    except ValueError as error:
        return [f"--step-batch-size-schedule: {error}."]
    if train.global_batch_size != steps[-1][1]:
        found.append(f"{flag} and --global-batch-size {train.global_batch_size} exclude each other; keep one.")
    if train.rampup_batch_size:
        ramp = " ".join(map(str, train.rampup_batch_size))
        found.append(f"{flag} and --rampup-batch-size {ramp} exclude each other; keep one.")
    for size in dict.fromkeys(size for _, size in steps):
        if size < step and train.decrease_batch_size_if_needed:
            found.append(f"{flag}: {size} is below {spelled}; choose {step} or more.")
        elif size % step and not train.decrease_batch_size_if_needed:
            found.append(f"{flag}: {size} is not a multiple of {spelled}; "
                         f"{nearest(nearest_multiples(size, step))}.")
    return found


def _rampup(run: Run, step: int, spelled: str) -> list[str]:
    train = run.train
    if not train.rampup_batch_size:
        return []
    start, increment, samples = train.rampup_batch_size
    flag = f"--rampup-batch-size {start} {increment} {samples}"
    if min(start, increment, samples) < 1:
        return []  # the bounds say so
    found = []
    if not train.train_samples:
        found.append(f"{flag} needs --train-samples instead of --train-iters.")
    if start > train.global_batch_size:
        found.append(f"{flag} starts above --global-batch-size {train.global_batch_size}.")
    elif (train.global_batch_size - start) % increment:
        found.append(f"{flag}: --global-batch-size {train.global_batch_size} - {start} is not a multiple of the "
                     f"increment {increment}.")
    if train.decrease_batch_size_if_needed:
        if start < step:
            found.append(f"{flag} starts below {spelled}.")
        return found
    if start % step:
        found.append(f"{flag}: the start {start} is not a multiple of {spelled}.")
    if increment % step and start < train.global_batch_size:
        found.append(f"{flag}: the increment {increment} is not a multiple of {spelled}.")
    return found
