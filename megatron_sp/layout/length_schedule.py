"""``--seq-length-schedule "0:8K 10B:32K 20B:128K"``: sequence lengths that grow with the tokens consumed.

A run counts in samples of ``--seq-length`` tokens, the longest length: global batch size, consumed samples and
learning-rate schedule. In a phase with shorter sequences each sample is cut into equal parts, and
each part is a sequence of its own. So a step has the same number of tokens in all phases. For the schedule "0:8K
64K:16K 128K:32K", each dot a sequence::

    samples of 32K  | 0             | 1             | 2             | 3             | 4             | ...
    phase 1, 8K     | .   .   .   . | .   .   .   . |              the parts of samples 0 and 1, in random order
    phase 2, 16K                                    | .       .     | .       .     |         those of samples 2 and 3
    phase 3, 32K                                                                    | .             | whole samples
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_sp.config.schema import Run
from megatron_sp.layout.batch_schedule import parse_batch_schedule, parse_tokens
from megatron_sp.layout.batch_size import BatchSize

_LENGTH = re.compile(r"(\d[\d_]*)([KM]?)", re.IGNORECASE)
#: More than any sequence has, and little enough for products of two such numbers to fit into 64 bits.
LONGEST = 10**9
_LENGTH_FACTORS = {"": 1, "K": 1024, "M": 1024**2}


def parse_length(word: str) -> int:
    """Return a sequence length: ``8192``, ``8K`` (8,192) or ``1M`` (1,048,576).

    Raises:
        ValueError: with a sentence fragment saying what is wrong.
    """
    match = _LENGTH.fullmatch(word.strip())
    if match is None or not int(match[1].replace("_", "")):
        raise ValueError(f"{word!r} is not a length in tokens, such as 8192 or 8K")
    length = int(match[1].replace("_", "")) * _LENGTH_FACTORS[match[2].upper()]
    if length > LONGEST:
        raise ValueError(f"{word!r} is more than {LONGEST:,} tokens")
    return length


def parse_length_schedule(words: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Return ``(tokens, sequence length)`` of each phase, in order.

    Raises:
        ValueError: with a sentence fragment saying what is wrong.
    """
    phases = [_entry(word.strip("'\"")) for word in words]
    if phases and phases[0][0] != 0:
        raise ValueError(f"the first phase starts at {words[0].partition(':')[0]} tokens; start with 0:LENGTH")
    for (tokens, length), (next_tokens, next_length), word in zip(phases, phases[1:], words[1:]):
        if next_tokens <= tokens:
            raise ValueError(f"{word!r} does not come after the phase before it; tokens must grow")
        if next_length <= length:
            raise ValueError(f"{word!r} does not lengthen the {length} tokens of the phase before it; lengths must "
                             "grow")
    longest = phases[-1][1] if phases else 0
    for word, (_, length) in zip(words, phases):
        if longest % length:
            raise ValueError(f"{word!r}: {length} does not divide the longest length {longest}, and samples of the "
                             "longest length are cut into equal parts")
    return tuple(phases)


def _entry(word: str) -> tuple[int, int]:
    tokens, colon, length = word.partition(":")
    if not colon:
        raise ValueError(f"{word!r} is not TOKENS:LENGTH, such as 0:8K or 10B:32K")
    return parse_tokens(tokens, word), parse_length(length)


def longest_length(words: Sequence[str]) -> int:
    """Return the length of the last phase; 0 when there is no schedule, or none that can be read."""
    try:
        phases = parse_length_schedule(words)
    except ValueError:
        return 0
    return phases[-1][1] if phases else 0


@dataclass(frozen=True)
class Phase:
    """A part of the training, with one sequence length.

    Attributes:
        number: number of the phase, from 1.
        length: tokens of its sequences.
        parts: sequences that a sample of ``--seq-length`` tokens is cut into.
        first: number of the first sample of the phase.
        stop: number of the first sample of the next phase; None in the last phase.
    """

    number: int
    length: int
    parts: int
    first: int
    stop: int | None

    @classmethod
    def of(cls, run: Run, number: int, first: int, consumed: int = 0) -> Phase:
        """Return a phase of a resolved and checked run, given the sample with which it begins.

        It ends before the first step that starts after the next phase's tokens.

        Args:
            consumed: samples consumed when the run, which may have other batch sizes now, is resumed.
        """
        schedule = parse_length_schedule(run.data.seq_length_schedule)
        length, unit = schedule[number - 1][1], run.data.seq_length
        stop = None
        if number < len(schedule):
            stop = first_step_after(BatchSize.of(run), -(-schedule[number][0] // unit), max(first, consumed))
        return cls(number, length, unit // length, first, stop)


def first_step_after(batch: BatchSize, samples: int, consumed: int) -> int:
    """Return the consumed samples at the first step that starts with ``samples`` samples consumed, or more.

    Args:
        consumed: samples consumed at the start of some earlier step.
    """
    consumed += batch.samples(batch.iterations(consumed, samples), consumed)
    return consumed + batch.at(consumed) if consumed < samples else consumed


def phases(run: Run) -> list[Phase]:
    """Return all phases of a resolved and checked run that trains from the start; none without a schedule."""
    found: list[Phase] = []
    for number in range(1, len(run.data.seq_length_schedule) + 1):
        found.append(Phase.of(run, number, found[-1].stop or 0 if found else 0))
    return found


def run_of_length(run: Run, length: int) -> Run:
    """Return the run as it is in a phase: with this sequence length, and batch sizes in sequences of this length.

    Chunks longer than a sequence become whole sequences.

    Args:
        length: tokens, a divisor of ``--seq-length``.
    """
    data = replace(run.data, seq_length=length, seq_length_schedule=(), seq_length_phase=0)
    parts, train = run.data.seq_length // length, run.train
    if parts == 1:
        return replace(run, data=data)
    scaled = tuple(f"{tokens}:{size * parts}" for tokens, size in parse_batch_schedule(train.step_batch_size_schedule))
    train = replace(
        train, global_batch_size=train.global_batch_size * parts, step_batch_size_schedule=scaled,
        rampup_batch_size=tuple(count * parts for count in train.rampup_batch_size),
        train_samples=train.train_samples * parts, gradient_accumulation_steps=0)
    memory = replace(run.memory, sequence_chunk_size=min(run.memory.sequence_chunk_size, length))
    return replace(run, train=train, memory=memory, data=data)
