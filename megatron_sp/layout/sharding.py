"""How weights are sharded, which runs use FSDP2, and how large the buckets of summed gradients are without it."""

from __future__ import annotations

from megatron_sp.config.schema import Parallel, Run

#: Bytes of gradients that one all-reduce sums where FSDP2 is not used.
GRADIENT_BUCKET = 32 << 20

#: Largest gathered weights of a layer, in bytes, for which stage 3 gathers two layers ahead.
SMALL_LAYER = 32 << 20


def layers_ahead(layer_bytes: int) -> int:
    """Return how many layers ahead ZeRO stage 3 gathers weights, in forward and in backward.

    One is enough where a layer computes longer than the next one takes to arrive. Gathering a small layer takes as long
    as its first bytes need to arrive, and that may be longer than the layer before it computes.

    Args:
        layer_bytes: bytes of the gathered weights of a layer in the compute type.
    """
    return 2 if layer_bytes <= SMALL_LAYER else 1


def num_weight_shards(parallel: Parallel) -> int:
    """Return into how many shards each weight is cut over the data- and sequence-parallel ranks."""
    return 1 if parallel.zero_stage == 0 else parallel.fsdp_size or parallel.fsdp


def uses_fsdp(run: Run) -> bool:
    """Return whether a run uses FSDP2: something is sharded, computed in half precision, or kept in host memory.

    Otherwise every data- and sequence-parallel rank holds whole fp32 weights (ZeRO stage 0), and their gradients
    are summed without FSDP (``parallel.gradients``).
    """
    shards = run.parallel.fsdp > 1 and run.parallel.zero_stage > 0
    return shards or run.precision.dtype != "float32" or run.memory.offload_optimizer


def may_overlap_tensor(run: Run) -> bool:
    """Return whether ``--tp-comm-overlap`` is given together with what it needs, apart from the hardware."""
    parallel = run.parallel
    return parallel.tp_comm_overlap and parallel.megatron_sp and parallel.tp > 1 and run.train.compile
