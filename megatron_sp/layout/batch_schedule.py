"""``--step-batch-size-schedule "0:768 250B:1536"``: reading global batch sizes that depend on the tokens consumed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from megatron_sp.config.schema import Train

_ENTRY = re.compile(r"(\d[\d_]*(?:\.\d+)?[KMBT]?):(\d[\d_]*)", re.IGNORECASE)
_TOKENS = re.compile(r"(\d[\d_]*(?:\.\d+)?)([KMBT]?)", re.IGNORECASE)
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_batch_schedule(words: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Return ``(tokens, global batch size)`` of each step, in order.

    Raises:
        ValueError: with a sentence fragment saying what is wrong.
    """
    steps = [_entry(word) for word in words]
    if steps and steps[0][0] != 0:
        raise ValueError(f"the first step starts at {words[0].partition(':')[0]} tokens; start with 0:SIZE")
    for (before, _), (tokens, _), word in zip(steps, steps[1:], words[1:]):
        if tokens <= before:
            raise ValueError(f"{word!r} does not come after the step before it; tokens must grow")
    return tuple(steps)


def _entry(word: str) -> tuple[int, int]:
    match = _ENTRY.fullmatch(word.strip("'\""))  # a shell script may pass the quotes around the list on
    if match is None:
        raise ValueError(f"{word!r} is not TOKENS:SIZE, such as 0:768 or 250B:1536")
    size = int(match[2])
    if size < 1:
        raise ValueError(f"{word!r}: the batch size must be at least 1")
    return parse_tokens(match[1], word), size


def parse_tokens(text: str, word: str) -> int:
    """Return a number of tokens: ``0``, ``250B`` or ``1.5T`` (thousands to trillions).

    Args:
        word: what the user typed, for the message.

    Raises:
        ValueError: with a sentence fragment saying what is wrong.
    """
    match = _TOKENS.fullmatch(text)
    if match is None:
        raise ValueError(f"{word!r}: {text!r} is not a number of tokens, such as 0 or 250B")
    tokens = Fraction(match[1].replace("_", "")) * _FACTORS[match[2].upper()]
    if tokens.denominator != 1:
        raise ValueError(f"{word!r}: {text} is not a whole number of tokens")
    return int(tokens)


def last_batch_size(words: Sequence[str]) -> int:
    """Return the global batch size of the last step; 0 when there is no schedule, or none that can be read."""
    try:
        steps = parse_batch_schedule(words)
    except ValueError:
        return 0
    return steps[-1][1] if steps else 0


def batch_sizes(train: Train) -> list[int]:
    """Return every global batch size of a resolved run in order, before any rounding down."""
    if train.step_batch_size_schedule:
        try:
            return [size for _, size in parse_batch_schedule(train.step_batch_size_schedule)]
        except ValueError:
            return [train.global_batch_size]
    if len(train.rampup_batch_size) != 3 or train.rampup_batch_size[1] < 1:
        return [train.global_batch_size]
    start, increment, _ = train.rampup_batch_size
    return [*range(start, train.global_batch_size, increment), train.global_batch_size]
