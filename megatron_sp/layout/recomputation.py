"""Which layers ``--recompute-granularity`` computes again in backward, and how many of them together."""

from __future__ import annotations

from megatron_sp.config.schema import Memory


def recompute_unit(memory: Memory) -> int:
    """Return how many consecutive layers are recomputed together: they keep one input and run again as one."""
    is_uniform = memory.recompute_granularity and memory.recompute_method == "uniform"
    return memory.recompute_num_layers if is_uniform else 1


def recomputed_layers(memory: Memory, stage: range) -> range:
    """Return the recomputed layers of a pipeline stage, given the numbers of all its layers.

    The uniform method recomputes every layer, the block method the first ``--recompute-num-layers`` of each stage.
    """
    if not memory.recompute_granularity:
        return stage[:0]
    return stage if memory.recompute_method == "uniform" else stage[:memory.recompute_num_layers]
