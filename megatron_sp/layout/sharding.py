"""Which runs need FSDP at all."""

from __future__ import annotations

from megatron_sp.config.schema import Run

#: Bytes of whole gradients that are summed together over the ranks.
GRADIENT_BUCKET = 32 << 20


def uses_fsdp(run: Run) -> bool:
    """Whether there is something to shard, to cast or to keep on the host.

    Otherwise every data- and sequence-parallel rank holds whole fp32 weights (ZeRO stage 0), and their gradients
    are summed without FSDP (``parallel.gradients``).
    """
    shards = run.parallel.fsdp > 1 and run.parallel.zero_stage > 0
    return shards or run.precision.dtype != "float32" or run.memory.offload_optimizer
