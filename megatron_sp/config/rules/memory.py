"""Rules about recomputation, tiling and offload."""

from __future__ import annotations

from megatron_sp.config.cli.values import counted
from megatron_sp.config.schema import Run
from megatron_sp.layout.schedules import SCHEDULES


def check_memory(run: Run) -> list[str]:
    """Techniques that need or exclude each other."""
    memory, parallel = run.memory, run.parallel
    found = []
    if memory.offload_activations > 0 and not memory.recompute_granularity:
        found.append(f"--offload-activations {memory.offload_activations:g} moves the inputs of recomputed layers; add "
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
