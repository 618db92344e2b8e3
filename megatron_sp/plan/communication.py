"""Compute from a configuration how many bytes each kind of parallelism sends in one training step.

All figures are bytes that the busiest rank sends to other ranks. ``w`` is the number of ranks of a group: an all-gather
and a reduce-scatter of a tensor of B bytes send B (w-1)/w each, an all-reduce is one of each (the ring algorithm), and
an all-to-all sends the (w-1)/w of a rank's own part that other ranks need. Sources: DeepSpeed-Ulysses
(arXiv 2309.14509, section 3.1), Ring Attention (2310.01889), Megatron-LM (1909.08053), ZeRO (1910.02054).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_sp.config.schema import Run
from megatron_sp.layout.heads import HeadSplit
from megatron_sp.layout.recomputation import recompute_unit
from megatron_sp.layout.sharding import uses_fsdp
from megatron_sp.layout.stages import stage_layers
from megatron_sp.layout.tiles import num_chunks
from megatron_sp.plan.sizes import FP32, Sizes, Weights


@dataclass(frozen=True)
class Traffic:
    """What the ranks along one axis send in a step.

    Attributes:
        axis: name of the axis or view (``layout.grid``).
        size: ranks of the group.
        sent: bytes that the busiest rank sends in a step.
        what: the collectives, in words.
        hidden: whether the communication normally overlaps with computation.
    """

    axis: str
    size: int
    sent: float
    what: str
    hidden: bool


def step_traffic(run: Run) -> list[Traffic]:
    """Return the traffic of each axis that has more than one rank.

    Args:
        run: a resolved run with known vocabulary sizes.
    """
    parallel = run.parallel
    microbatches = max(1, run.train.global_batch_size // max(1, run.train.micro_batch_size * parallel.dp))
    microbatches *= num_chunks(run)  # every chunk communicates separately, and ``Sizes`` holds the tokens of one chunk
    layers = max(sum(len(stage) for stage in stages) for stages in _layers_of_ranks(run))
    per_layer = {"tp": _tensor(run), "ulysses": _ulysses(run), "ring": _ring(run)}
    found = [Traffic(axis, getattr(parallel, axis), sent * layers * microbatches, what, hidden)
             for axis, (sent, what, hidden) in per_layer.items() if getattr(parallel, axis) > 1]
    if parallel.pp > 1:
        sizes = Sizes.of(run)
        boundaries = 2 * parallel.stages_per_rank - (1 if parallel.pp == 2 and parallel.stages_per_rank == 1 else 0)
        sent = float((boundaries + _first_pass(run)) * sizes.outside * sizes.hidden * sizes.element * microbatches)
        found.append(Traffic("pp", parallel.pp, sent, "hidden states and their gradients to neighbouring stages", True))
    if parallel.fsdp > 1:
        sent, what = _states(run, layers, microbatches)
        found.append(Traffic("fsdp", parallel.fsdp, sent, what, True))
    return found


def _layers_of_ranks(run: Run) -> list[list[range]]:
    stages = stage_layers(run.model, run.parallel)
    return [stages[rank::run.parallel.pp] for rank in range(run.parallel.pp)]


def _forwards(run: Run) -> float:
    """Return how often a layer's forward communicates.

    Recomputation repeats it, unless the result of the exchange is kept, as in layers that are recomputed one by one.
    """
    again = (run.memory.recompute_granularity == "full" or run.memory.attention_head_groups > 1
             or recompute_unit(run.memory) > 1)
    return 1 + again + _first_pass(run)


def _first_pass(run: Run) -> float:
    """Return the share of the chunks whose forward runs once more, before any backward."""
    return 1 - 1 / num_chunks(run)


def _tensor(run: Run) -> tuple[float, str, bool]:
    sizes, tp = Sizes.of(run), run.parallel.tp
    one = 2 * (tp - 1) / tp * sizes.inside * sizes.hidden * sizes.element  # an all-reduce, or all-gather and -scatter
    repeats = 1 + bool(run.memory.recompute_granularity) + _first_pass(run)
    what = "all-gathers and reduce-scatters" if run.parallel.megatron_sp else "all-reduces"
    return (2 * repeats + 2) * one, f"{what} of activations around attention and feed-forward", False


def _ulysses(run: Run) -> tuple[float, str, bool]:
    model, parallel, sizes = run.model, run.parallel, Sizes.of(run)
    heads = HeadSplit.of(model.num_attention_heads, model.num_query_groups, tp=parallel.tp, ulysses=parallel.ulysses)
    # Heads that a rank exchanges for each of its tokens: those of q, k and v before attention, of the output after it.
    own = heads.heads_sent + (heads.query[1] - heads.query[0])
    forward = (parallel.ulysses - 1) / parallel.ulysses * sizes.inside * own * model.head_dim * sizes.element
    return (_forwards(run) + 1) * forward, "all-to-alls of query, key, value and attention's output", False


def _ring(run: Run) -> tuple[float, str, bool]:
    sizes, ring = Sizes.of(run), run.parallel.ring
    block = 2 * sizes.inside * sizes.core_kv
    forward = (ring - 1) * block * sizes.element
    backward = (ring - 1) * block * (sizes.element + FP32)
    return _forwards(run) * forward + backward, "keys and values, and their gradients, to the next rank", True


def _states(run: Run, layers: int, microbatches: int) -> tuple[float, str]:
    """Return the bytes of weights and gradients that a rank sends along the "fsdp" axis, and the collectives."""
    parallel, weights = run.parallel, Weights.of(run)
    parameters = float(layers * weights.layer + weights.embedding + weights.output)
    if parallel.zero_stage == 0 or not uses_fsdp(run):
        return 2 * _share(parallel.fsdp) * parameters * FP32, "one all-reduce of the gradients"
    shard = parallel.fsdp_size or parallel.fsdp
    reduce = 2 if run.precision.grad_reduce_in_bf16 else FP32
    reductions = microbatches if parallel.zero_stage >= 2 and parallel.pp == 1 else 1
    gathers = 1.0
    if parallel.zero_stage == 3:  # a pipeline keeps weights between a backward and the next forward
        gathers = microbatches * (2 + _first_pass(run)) if parallel.pp == 1 else microbatches + 1
    sent = _share(shard) * parameters * (reductions * reduce + gathers * Sizes.of(run).element)
    if parallel.fsdp > shard:
        sent += 2 * _share(parallel.fsdp // shard) * parameters / shard * reduce  # in the last backward
    return sent, "all-gathers of weights and reduce-scatters of gradients"


def _share(size: int) -> float:
    return (size - 1) / size
