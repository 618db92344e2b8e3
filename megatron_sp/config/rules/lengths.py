"""Rules about ``--seq-length-schedule``: the schedule itself, and what must hold in each of its phases."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_sp.config.schema import Run
from megatron_sp.layout.batch_schedule import parse_batch_schedule
from megatron_sp.layout.batch_size import BatchSize
from megatron_sp.layout.length_schedule import parse_length_schedule, phases, run_of_length

Rule = Callable[[Run], list[str]]


def check_length_schedule(run: Run) -> list[str]:
    """Return what is wrong with the schedule of sequence lengths."""
    data, train = run.data, run.train
    flag = f"--seq-length-schedule {' '.join(data.seq_length_schedule)}"
    if not data.seq_length_schedule:
        return [f"--seq-length-phase {data.seq_length_phase} needs --seq-length-schedule."
                ] if data.seq_length_phase else []
    try:
        schedule = parse_length_schedule(data.seq_length_schedule)
    except ValueError as error:
        return [f"--seq-length-schedule: {error}."]
    found = []
    if data.seq_length != schedule[-1][1]:
        found.append(f"--seq-length {data.seq_length} is not {schedule[-1][1]}, the last length of {flag}; leave it "
                     "out.")
    if data.seq_length_phase > len(schedule):
        found.append(f"--seq-length-phase {data.seq_length_phase}: {flag} has {len(schedule)} phases.")
    if data.pack_documents and len(schedule) > 1:
        found.append(f"--pack-documents {data.pack_documents} and {flag} exclude each other: phases cut samples into "
                     "parts, and packed samples hold whole documents. Leave one out.")
    if train.decrease_batch_size_if_needed:
        found.append(f"--decrease-batch-size-if-needed and {flag} exclude each other: give a --global-batch-size that "
                     "divides.")
    return found or _empty_phases(run, flag)


def _empty_phases(run: Run, flag: str) -> list[str]:
    """Return the phases that would end before their first step."""
    sizes = (run.train.global_batch_size, run.train.micro_batch_size, *run.train.rampup_batch_size)
    if min(sizes) < 1 or run.data.seq_length < 1:
        return []  # the bounds say so
    try:
        found = phases(run)
    except ValueError:      # --step-batch-size-schedule cannot be read, which another rule reports
        return []
    return [f"{flag}: phase {phase.number} is shorter than one step, which has {run.train.global_batch_size} x "
            f"{run.data.seq_length} tokens; move the next phase's start further away."
            for phase in found if phase.stop == phase.first]


def check_phases(run: Run, rules: Sequence[Rule]) -> list[str]:
    """Return what rules find that depend on the sequence length, for each length that the run trains with.

    Args:
        rules: return the problems of a run of one length.
    """
    if not run.data.seq_length_schedule or check_length_schedule(run) or not _can_be_scaled(run):
        return [problem for rule in rules for problem in rule(run)]
    lengths = [length for _, length in parse_length_schedule(run.data.seq_length_schedule)]
    chosen = run.data.seq_length_phase or len(lengths)
    others = [] if run.data.seq_length_phase else range(1, len(lengths))
    found = []
    for rule in rules:
        problems = _of_phase(run, chosen, lengths, rule)
        for number in others:
            problems = problems or _of_phase(run, number, lengths, rule)
        found += problems
    return found


def _can_be_scaled(run: Run) -> bool:
    """Return whether batch sizes can be counted in shorter sequences: whether their schedule can be read."""
    try:
        parse_batch_schedule(run.train.step_batch_size_schedule)
    except ValueError:
        return False
    return True


def _of_phase(run: Run, number: int, lengths: Sequence[int], rule: Rule) -> list[str]:
    problems = rule(run_of_length(run, lengths[number - 1]))
    if number == len(lengths):
        return problems
    return [f"Phase {number} of --seq-length-schedule, with {lengths[-1] // lengths[number - 1]} sequences in the "
            f"place of each sample: {problem}" for problem in problems]


def length_notes(run: Run) -> list[str]:
    """Return notes on phases that the run does not reach."""
    schedule, train = run.data.seq_length_schedule, run.train
    if not schedule:
        return []
    samples = train.train_samples or BatchSize.of(run).samples(train.train_iters)
    return [f"The run ends after {samples * run.data.seq_length:,} tokens and does not reach phase {phase.number} of "
            f"--seq-length-schedule ({schedule[phase.number - 1]})." for phase in phases(run) if phase.first >= samples]
