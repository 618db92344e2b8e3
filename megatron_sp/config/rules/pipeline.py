"""Rules about the pipeline: stages, layers, schedules, microbatches; and about the ring."""

from __future__ import annotations

from megatron_sp.config.cli.values import counted, nearest
from megatron_sp.config.schema import Run
from megatron_sp.layout.batch_schedule import batch_sizes
from megatron_sp.layout.schedules import SCHEDULES, takes_microbatches
from megatron_sp.layout.sequence_split import split_problem


def check_pipeline(run: Run) -> list[str]:
    """Return problems with the number of pipeline stages and with the layers of each stage."""
    model, parallel = run.model, run.parallel
    per_rank, num_stages = parallel.stages_per_rank, parallel.pp * parallel.stages_per_rank
    if parallel.pp < 1 or per_rank < 1 or model.num_layers < 1:
        return []
    if parallel.pp == 1:
        schedule = parallel.pipeline_schedule
        used = {f"--pipeline-schedule {schedule}": schedule not in ("1f1b", "interleaved"),
                "--num-virtual-stages-per-pipeline-rank": per_rank > 1 and schedule in ("1f1b", "interleaved") and (
                    not parallel.layers_per_virtual_stage),
                "--num-layers-per-virtual-pipeline-stage": parallel.layers_per_virtual_stage,
                "--pipeline-layers": parallel.pipeline_layers}
        return [f"{flag} needs --pipeline-model-parallel-size 2 or more." for flag, is_used in used.items() if is_used]
    found = []
    virtual = parallel.layers_per_virtual_stage
    if virtual and model.num_layers % (parallel.pp * virtual) and not parallel.pipeline_layers:
        found.append(f"--num-layers {model.num_layers} is not a multiple of --pipeline-model-parallel-size "
                     f"{parallel.pp} x --num-layers-per-virtual-pipeline-stage {virtual} = {parallel.pp * virtual}; "
                     "give the layers of each stage with --pipeline-layers, or change one of the three.")
    elif num_stages > model.num_layers:
        found.append(f"{num_stages} pipeline stages (--pipeline-model-parallel-size {parallel.pp} x {per_rank} per "
                     f"rank) are more than --num-layers {model.num_layers}; every stage needs a layer.")
    layers = parallel.pipeline_layers
    if layers and (len(layers) != num_stages or sum(layers) != model.num_layers or min(layers) < 1):
        found.append(f"--pipeline-layers {' '.join(map(str, layers))}: give {num_stages} numbers above 0 (one per "
                     f"stage) that sum to --num-layers {model.num_layers}; these are {len(layers)} with sum "
                     f"{sum(layers)}.")
    return found + _schedule_rules(run)


def _schedule_rules(run: Run) -> list[str]:
    parallel = run.parallel
    name, per_rank = parallel.pipeline_schedule, parallel.stages_per_rank
    found = []
    if name == "1f1b" and per_rank != 1:
        found.append(f"--pipeline-schedule 1f1b has one stage per rank, not {per_rank}; use "
                     "--pipeline-schedule interleaved.")
    if name == "interleaved" and per_rank < 2:
        found.append("--pipeline-schedule interleaved needs 2 or more stages per rank; use --pipeline-schedule 1f1b, "
                     "or --num-virtual-stages-per-pipeline-rank 2.")
    if SCHEDULES[name].is_v_shaped and per_rank != SCHEDULES[name].only_stages_per_rank:
        found.append(f"--pipeline-schedule {name} has exactly {SCHEDULES[name].only_stages_per_rank} stages per rank, "
                     f"not {per_rank}.")
    if SCHEDULES[name].splits_backward and parallel.zero_stage == 3:
        found.append(f"--pipeline-schedule {name} with --zero-stage 3 would give wrong gradients (weights are dropped "
                     "between the two halves of backward); use --zero-stage 2 or less, or another schedule.")
    if SCHEDULES[name].splits_backward and run.memory.recompute_granularity:
        found.append(f"--pipeline-schedule {name} splits backward in two and cannot recompute a layer for each half; "
                     "leave recomputation out, or use another schedule.")
    return found + [problem for batch in batch_sizes(run.train) for problem in _microbatch_rules(run, batch)]


def _microbatch_rules(run: Run, global_batch_size: int) -> list[str]:
    """Return a problem, with valid batch sizes, where the schedule cannot take this number of microbatches."""
    parallel, train = run.parallel, run.train
    step = train.micro_batch_size * max(parallel.dp, 1)
    if train.decrease_batch_size_if_needed and step > 0:
        global_batch_size = global_batch_size // step * step
    if step < 1 or not global_batch_size or global_batch_size % step:
        return []  # ``check_batch`` reports this
    number, name, pp = global_batch_size // step, parallel.pipeline_schedule, parallel.pp
    if takes_microbatches(name, number, pp):
        return []
    candidates = [other for other in range(1, 4 * max(number, 2 * pp) + 1) if takes_microbatches(name, other, pp)]
    closest = sorted(sorted(candidates, key=lambda other: abs(other - number))[:2])
    rule = f"at least {2 * pp} microbatches" if name == "dualpipev" else \
        f"fewer microbatches than twice the {pp} pipeline ranks, or a number that makes equal rounds of at least {pp}"
    made = counted(number, "microbatch", "microbatches")
    return [f"--global-batch-size {global_batch_size} makes {made} (--micro-batch-size "
            f"{train.micro_batch_size} x data-parallel size {parallel.dp} each), but --pipeline-schedule {name} needs "
            f"{rule}; {nearest([other * step for other in closest])}."]


def check_ring(run: Run) -> list[str]:
    """Return flags that a ring excludes, and contradictions of ``--sequence-split``."""
    if problem := split_problem(run.parallel):
        return [problem]
    if run.parallel.ring > 1 and run.model.attention_dropout > 0:
        return [f"--attention-dropout {run.model.attention_dropout:g} is not possible with --ring-size "
                f"{run.parallel.ring}: a ring merges partial results, so no rank has the attention probabilities to "
                "drop; give --attention-dropout 0, or use --ulysses-size."]
    return []
