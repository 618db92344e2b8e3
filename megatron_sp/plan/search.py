"""Find a layout and memory techniques for a model on given devices: the fastest step, or the longest sequence.

The search tries every tensor-parallel size inside a node, every pipeline and sequence-parallel size that divides the
ranks, ZeRO stages, and a list of memory techniques from the fastest to the one that needs the least memory. The rules
of the command line check each candidate, ``plan.memory`` predicts its peak memory, and ``plan.step_time`` estimates its
step time. Nothing is started.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_sp.config.resolve import resolve, with_vocab
from megatron_sp.config.rules.checks import check_problems
from megatron_sp.config.schema import Memory, Parallel, Run
from megatron_sp.layout.sequence_split import split_sequence
from megatron_sp.plan.devices import GIB, Device
from megatron_sp.plan.memory import MemoryPlan, predict
from megatron_sp.plan.report import longest_sequence, with_length
from megatron_sp.plan.step_time import StepTime, predict_step_time

#: Tokens of a tile of the feed-forward layer in the ladder below.
MLP_TILE = 8192
#: Share of a device's memory that a plan may use: the rest is left to fragmentation and libraries.
USABLE = 0.92

#: Name -> fields of ``schema.Memory``, from the fastest to the most sparing. Each row keeps what the one before saves.
LADDER: dict[str, Memory] = {
    "keep everything": Memory(),
    "selective recomputation": Memory(recompute_granularity="selective"),
    "full recomputation": Memory(recompute_granularity="full"),
    "+ tiled feed-forward": Memory(recompute_granularity="full", mlp_tile_size=MLP_TILE),
    "+ layer inputs on the host": Memory(recompute_granularity="full", mlp_tile_size=MLP_TILE, offload_activations=1.0),
    "+ attention in 2 head groups": Memory(recompute_granularity="full", mlp_tile_size=MLP_TILE,
                                           offload_activations=1.0, attention_head_groups=2),
    "+ optimizer on the host": Memory(recompute_granularity="full", mlp_tile_size=MLP_TILE, offload_activations=1.0,
                                      attention_head_groups=2, offload_optimizer=True),
}


@dataclass(frozen=True)
class Candidate:
    """A layout with the memory techniques it uses, and what is predicted for it.

    Attributes:
        techniques: the row of ``LADDER``.
        length: tokens of a sequence.
    """

    run: Run
    techniques: str
    memory: MemoryPlan
    time: StepTime
    length: int

    @property
    def flags(self) -> list[str]:
        """Return the flags for the layout and the memory techniques, without those of model and training."""
        parallel, memory = self.run.parallel, self.run.memory
        values: dict[str, object] = {
            "--tensor-model-parallel-size": parallel.tp if parallel.tp > 1 else "",
            "--sequence-parallel": parallel.megatron_sp and parallel.tp > 1,
            "--pipeline-model-parallel-size": parallel.pp if parallel.pp > 1 else "",
            "--ulysses-size": parallel.ulysses if parallel.ulysses > 1 else "",
            "--ring-size": parallel.ring if parallel.ring > 1 else "",
            "--zero-stage": parallel.zero_stage or "",
            "--recompute-granularity": memory.recompute_granularity,
            "--mlp-tile-size": memory.mlp_tile_size or "",
            "--attention-head-groups": memory.attention_head_groups if memory.attention_head_groups > 1 else "",
            "--offload-activations": memory.offload_activations > 0, "--offload-optimizer": memory.offload_optimizer}
        words: list[str] = []
        for flag, value in values.items():
            if value is True:
                words.append(flag)
            elif value not in ("", False):
                words += [flag, str(value)]
        return words


def search(base: Run, world_size: int, device: Device, devices_per_node: int, *, longest: bool) -> list[Candidate]:
    """Return the candidates that fit, best first.

    Args:
        base: a resolved run with vocabulary sizes: model, sequence length, batch and precision. Its layout and memory
            techniques are ignored.
        longest: the best is the one with the longest sequence (of equal ones the faster); else the one with the
            shortest step at the base's length.
    """
    limited = replace(device, memory=int(device.memory * USABLE))
    found: list[Candidate] = []
    for layout in layouts(base, world_size, devices_per_node):
        for name, memory in LADDER.items():
            run = _run(base, layout, memory, world_size)
            if run is None:
                continue
            length = longest_sequence(run, limited) if longest else base.data.seq_length
            if length < 1:
                continue
            run = with_length(run, length)
            peak = predict(run, device=device.kind)
            if peak.total <= limited.memory:
                found.append(Candidate(run, name, peak, predict_step_time(run, device, devices_per_node), length))
                if not longest:
                    break  # further rows of the ladder are slower
    if longest:
        return sorted(found, key=lambda each: (-each.length, each.time.total))
    return sorted(found, key=lambda each: (each.time.total, each.memory.total))


def layouts(base: Run, world_size: int, devices_per_node: int) -> Iterator[Parallel]:
    """Yield the layouts to try. Some of them break rules of the command line; ``_run`` leaves these out."""
    model = base.model
    for tp in _divisors(min(devices_per_node, model.num_attention_heads)):
        if world_size % tp or model.num_attention_heads % tp:
            continue
        for pp in _divisors(world_size // tp):
            if pp > model.num_layers:
                continue
            for sp in _divisors(world_size // (tp * pp)):
                split = split_sequence(sp, heads=model.num_attention_heads, kv_heads=model.num_query_groups, tp=tp,
                                       devices_per_node=devices_per_node)
                for stage in (1, 3) if pp == 1 else (1,):
                    yield Parallel(tp=tp, pp=pp, ulysses=split.ulysses, ring=split.ring, megatron_sp=tp > 1,
                                   zero_stage=stage if world_size > tp * pp else 0)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _run(base: Run, parallel: Parallel, memory: Memory, world_size: int) -> Run | None:
    """Return the base in this layout with these techniques, or None where a rule forbids it."""
    vocab = base.model.vocab_size
    model = replace(base.model, padded_vocab_size=0)
    run = resolve(replace(base, model=model, parallel=parallel, memory=memory), world_size)
    if check_problems(run):
        return None
    return with_vocab(run, vocab)


def reason(best: Candidate, others: list[Candidate], *, longest: bool) -> str:
    """Return one sentence on why the first candidate is before the others."""
    rival = next((other for other in others if other.run.parallel != best.run.parallel), None)
    if rival is None:
        return "It is the only layout of those tried that fits."
    if longest:
        gain = best.length / rival.length
        how = f"{100 * (gain - 1):.0f}% longer" if gain > 1.005 else "as long, in a shorter step"
        return f"Its longest sequence is {how} than that of the next layout ({' '.join(rival.flags) or 'no flags'})."
    if rival.time.total < 1.01 * best.time.total:
        less = (rival.memory.total - best.memory.total) / GIB
        return (f"Its step is as fast as that of the next layout ({' '.join(rival.flags) or 'no flags'}) within 1%"
                + (f", and it needs {less:.1f} GiB less." if less > 0.05 else "."))
    parts = {"compute": (best.time.compute, rival.time.compute),
             "communication": (sum(best.time.exposed.values()), sum(rival.time.exposed.values())),
             "transfers to the host": (best.time.host, rival.time.host)}
    name, (ours, theirs) = max(parts.items(), key=lambda item: item[1][1] - item[1][0])
    if theirs - ours < 0.01 * best.time.total and rival.time.bubble > best.time.bubble:
        name = "the pipeline bubble"
    return (f"Its step takes {best.time.total:.3g} s; the next layout ({' '.join(rival.flags) or 'no flags'}) needs "
            f"{rival.time.total:.3g} s, mostly because of {name}.")
