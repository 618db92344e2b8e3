"""Rules about recomputation, tiling, chunks and offload."""

from __future__ import annotations

from megatron_sp.config.cli.values import LEAST_MEMORY, counted, nearest, nearest_multiples, parse_size
from megatron_sp.config.schema import Run
from megatron_sp.layout.schedules import SCHEDULES


def check_memory(run: Run) -> list[str]:
    """Return problems with memory techniques that need or exclude each other."""
    memory, parallel = run.memory, run.parallel
    found = []
    if memory.offload_activations > 0 and not memory.recompute_granularity:
        found.append(f"--offload-activations {memory.offload_activations:g} moves what recomputed layers keep; add "
                     "--recompute-granularity full or selective.")
    tied = not run.model.untie_embeddings_and_output_weights
    if memory.offload_optimizer and parallel.pp > 1 and tied:
        found.append("--offload-optimizer keeps gradients in host memory, where the two copies of a tied embedding of "
                     f"--pipeline-model-parallel-size {parallel.pp} cannot be summed; add "
                     "--untie-embeddings-and-output-weights or leave --offload-optimizer out.")
    groups, heads = memory.attention_head_groups, run.model.num_attention_heads // max(parallel.tp, 1)
    if groups > 1 and parallel.ulysses * groups > heads > 0:
        found.append(f"--attention-head-groups {groups}: each group needs a head for each of the --ulysses-size "
                     f"{parallel.ulysses} ranks, and a tensor-parallel rank has {counted(heads, 'head')}; use "
                     f"{max(1, heads // parallel.ulysses)} or less.")
    if SCHEDULES[parallel.pipeline_schedule].splits_backward and parallel.pp > 1:
        used = {"--mlp-tile-size": memory.mlp_tile_size > 0, "--attention-head-groups": groups > 1}
        found += [f"{flag} recomputes inside backward, which --pipeline-schedule {parallel.pipeline_schedule} splits "
                  "in two; leave it out, or use another schedule." for flag, is_used in used.items() if is_used]
    return found


def check_sizes(run: Run) -> list[str]:
    """Return the values of --device-memory and --host-memory that are not a size."""
    found = []
    for flag, text in _sizes(run).items():
        try:
            if text:
                parse_size(text, LEAST_MEMORY)
        except ValueError as error:
            found.append(f"{flag}: {error}.")
    return found


def check_use_of_sizes(run: Run) -> list[str]:
    """Return --device-memory and --host-memory where a run, unlike a plan, would not use them."""
    if run.memory.memory_efficiency:
        return []
    return [f"{flag} {text} needs --memory-efficiency auto or --dry-run, which look at it." for flag, text in
            _sizes(run).items() if text]


def _sizes(run: Run) -> dict[str, str]:
    return {"--device-memory": run.memory.device_memory, "--host-memory": run.memory.host_memory}


def check_chunks(run: Run) -> list[str]:
    """Return what ``--sequence-chunk-size`` still needs, and which flags it excludes."""
    memory, parallel, length = run.memory, run.parallel, run.data.seq_length
    size = memory.sequence_chunk_size
    if size < 1:
        return ["--offload-key-values keeps the keys and values of chunks in host memory; add --sequence-chunk-size."
                ] if memory.offload_key_values else []
    flag = f"--sequence-chunk-size {size}"
    found = []
    if parallel.ring > 1:
        found.append(f"{flag} and --ring-size {parallel.ring} exclude each other: the ranks of a ring hold different "
                     "parts of the sequence at a time. Use --ulysses-size, whose ranks share every chunk.")
    if parallel.pp > 1 and parallel.pipeline_schedule != "1f1b":
        found.append(f"{flag} has a pipeline schedule of its own, with one stage per rank; leave --pipeline-schedule "
                     f"{parallel.pipeline_schedule} and the number of stages per rank out.")
    ranks = {"--ulysses-size": parallel.ulysses,
             "--tensor-model-parallel-size": parallel.tp if parallel.megatron_sp else 1}
    step = parallel.ulysses * ranks["--tensor-model-parallel-size"]
    if parallel.ring > 1 or step < 1 or length < 1:
        return found
    if size % step:
        said = " x ".join(f"{name} {count}" for name, count in ranks.items() if count > 1)
        found.append(f"{flag} does not divide over the {step} ranks that share a chunk ({said}); "
                     f"{nearest(nearest_multiples(size, step))}.")
    if size > length:
        found.append(f"{flag} is more than --seq-length {length}; leave it out, or choose a part of the sequence.")
    elif length % size:
        found.append(f"--seq-length {length} does not divide into chunks of {size} tokens (--sequence-chunk-size); "
                     f"{nearest(nearest_multiples(length, size), 'length')}.")
    return found
