"""Find a layout and memory techniques for a model on given devices: the fastest step, or the longest sequence.

The search tries every tensor-parallel size inside a node, every pipeline and sequence-parallel size that divides the
ranks, ZeRO stages, and combinations of memory techniques (``plan.techniques``), chunks of the sequence among them. The
rules of the command line check each candidate, ``plan.memory`` predicts its peak on the device and on the host, and
``plan.step_time`` estimates its step time. Nothing is started.
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
from megatron_sp.plan.step_time import StepTime, bytes_between_nodes, predict_step_time
from megatron_sp.plan.techniques import USABLE, Fit, cheapest, combinations, technique_flags

#: Plans whose step times differ by at most this factor count as equally fast.
NEAR = 1.01


@dataclass(frozen=True)
class Candidate:
    """A layout with the memory techniques it uses, and what is predicted for it."""

    run: Run
    memory: MemoryPlan
    time: StepTime

    @property
    def length(self) -> int:
        """Return the tokens of a sequence."""
        return self.run.data.seq_length

    @property
    def flags(self) -> list[str]:
        """Return the flags for the layout and the memory techniques, without those of model and training."""
        parallel = self.run.parallel
        values: dict[str, object] = {
            "--tensor-model-parallel-size": parallel.tp if parallel.tp > 1 else "",
            "--sequence-parallel": parallel.megatron_sp and parallel.tp > 1,
            "--pipeline-model-parallel-size": parallel.pp if parallel.pp > 1 else "",
            "--ulysses-size": parallel.ulysses if parallel.ulysses > 1 else "",
            "--ring-size": parallel.ring if parallel.ring > 1 else "",
            "--zero-stage": parallel.zero_stage or ""}
        words: list[str] = []
        for flag, value in values.items():
            if value is True:
                words.append(flag)
            elif value not in ("", False):
                words += [flag, str(value)]
        return words + technique_flags(self.run.memory)


def search(base: Run, world_size: int, device: Device, devices_per_node: int, *, longest: bool) -> list[Candidate]:
    """Return the candidates that fit, best first.

    Args:
        base: a resolved run with vocabulary sizes: model, sequence length, batch and precision. Its layout and memory
            techniques are ignored.
        longest: rank candidates by their longest sequence, and candidates of equal length by step time. Otherwise rank
            them by step time at the base's length, see ``by_step_time``.
    """
    found: list[Candidate] = []
    for layout in layouts(base, world_size, devices_per_node):
        run = _run(base, layout, world_size)
        if run is None:
            continue
        fit = _longest(run, device, devices_per_node) if longest else cheapest(run, device, devices_per_node)
        if fit is not None:
            found.append(Candidate(fit.run, fit.memory, fit.time))
    if longest:
        return sorted(found, key=lambda each: (-each.length, each.time.total))
    return by_step_time(found, device, devices_per_node)


def by_step_time(plans: list[Candidate], device: Device, devices_per_node: int) -> list[Candidate]:
    """Return plans by step time; of those within ``NEAR`` of the fastest, one that needs less memory comes first.

    Predictions are not exact enough to tell such plans apart, while memory that is left over and groups that stay
    inside a node are of use. Memory is compared in GiB, and equal memory by the bytes that a rank sends between nodes.
    """
    left, ordered = sorted(plans, key=lambda each: each.time.total), []
    while left:
        near = [each for each in left if each.time.total <= NEAR * left[0].time.total]
        ordered += sorted(near, key=lambda each: (
            round(each.memory.total / GIB), bytes_between_nodes(each.run, device, devices_per_node), each.time.total))
        left = left[len(near):]
    return ordered


def _longest(run: Run, device: Device, devices_per_node: int) -> Fit | None:
    """Return the run with the techniques and at the length at which its sequence is longest; None where none fits.

    Of techniques that reach the same length, the one with the shorter step is taken.
    """
    best: Fit | None = None
    for tried in combinations(run, device.kind, any_length=True):
        reached = best.run.data.seq_length if best else 1
        start = with_length(tried, reached)
        if best and not device.holds(predict(start, device=device.kind), USABLE):
            continue
        length = longest_sequence(tried, device, USABLE)
        if length < reached:
            continue
        at_length = with_length(tried, length)
        if check_problems(at_length):
            continue
        fit = Fit(at_length, predict(at_length, device=device.kind),
                  predict_step_time(at_length, device, devices_per_node))
        if best is None or length > reached or fit.time.total < best.time.total:
            best = fit
    return best


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
                for stage in (0,) if world_size == tp * pp else (1, 3) if pp == 1 else (1,):
                    yield Parallel(tp=tp, pp=pp, ulysses=split.ulysses, ring=split.ring, megatron_sp=tp > 1,
                                   zero_stage=stage)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _run(base: Run, parallel: Parallel, world_size: int) -> Run | None:
    """Return the base in this layout without memory techniques, or None where a rule forbids it."""
    vocab = base.model.vocab_size
    model = replace(base.model, padded_vocab_size=0)
    run = resolve(replace(base, model=model, parallel=parallel, memory=Memory()), world_size)
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
    if rival.time.total <= NEAR * best.time.total:
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
