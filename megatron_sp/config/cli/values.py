"""Convert command-line arguments to values: numbers, choices, paths."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence

QUOTES = "'\""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(K|M|G|T)?(i?)B?", re.IGNORECASE)
#: Smallest memory size, in bytes, that a flag may give.
LEAST_MEMORY = 10**6
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def strip_quotes(text: str) -> str:
    """Return a value without literal quotes around it, which shell scripts leave behind (``--split '99,1,0'``)."""
    text = text.strip()
    while len(text) >= 2 and text[0] == text[-1] and text[0] in QUOTES:
        text = text[1:-1].strip()
    return text


def parse_int(text: str) -> int:
    """Return a whole number: ``64``, ``220_000_000``, ``1e6`` or ``1.0``.

    Raises:
        ValueError: with a sentence fragment saying what is expected.
    """
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None
    if not math.isfinite(number) or number != int(number):
        raise ValueError(f"{text!r} is not a whole number")
    return int(number)


def parse_float(text: str) -> float:
    """Return a finite number.

    Raises:
        ValueError: with a sentence fragment saying what is expected.
    """
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is not a finite number")
    return number


def parse_size(text: str, least: int = 1) -> int:
    """Return the bytes that a text such as ``80GB`` (10^9), ``40GiB`` (2^30) or ``512MiB`` names.

    Args:
        least: smallest number of bytes that is accepted. For memories it is ``LEAST_MEMORY``, so that "80" is refused
            and not read as 80 bytes.

    Raises:
        ValueError: with a sentence fragment saying what is expected.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"{text!r} is not a size above 0 such as 80GB or 40GiB")
    base = 1024 if match[3] else 1000
    size = int(float(match[1]) * base ** _POWERS[(match[2] or "").upper()])
    if size < least:
        raise ValueError(f"{text!r} is less than {least:,} bytes; give the unit too, such as 80GB or 40GiB")
    return size


def is_number(text: str) -> bool:
    """Return whether a word is a number, as the weight of a data set is."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _fold(text: str) -> str:
    return text.lower().replace("_", "-")


def parse_choice(text: str, choices: Sequence[str], synonyms: dict[str, str] | None = None) -> str:
    """Return the schema's spelling of a choice. Case is ignored, and hyphens and underscores are equivalent.

    Args:
        synonyms: values of other frameworks (in lower case with hyphens) that mean one of ``choices``.

    Raises:
        ValueError: with a sentence fragment listing the choices.
    """
    word = (synonyms or {}).get(_fold(text), text)
    for choice in choices:
        if _fold(choice) == _fold(word):
            return choice
    raise ValueError(f"{text!r} is not one of {', '.join(choices)}")


def parse_words(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the values of a list-valued flag; an argument that holds several values (a quoted "1.0 P") is split.

    An argument that names an existing token file (``TEXT.idx`` exists) is one value, even with blanks in it.
    """
    words: list[str] = []
    for text in texts:
        whole = strip_quotes(text)
        words += [whole] if os.path.exists(whole + ".idx") else [strip_quotes(word) for word in whole.split()]
    return tuple(word for word in words if word)


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun: ``1 process``, ``2 processes``; ``many`` is ``one`` with an s where not given."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def nearest(numbers: Sequence[int], noun: str = "value") -> str:
    """Return the end of a sentence: ``the nearest valid values are 8 or 16``, ``the nearest valid value is 4``."""
    return f"the nearest valid {noun} is {numbers[0]}" if len(numbers) == 1 else (
        f"the nearest valid {noun}s are {either(numbers)}")


def nearest_multiples(value: int, step: int) -> tuple[int, ...]:
    """Return the multiples of ``step`` just below (if positive) and just above ``value``."""
    below = value // step * step
    return tuple(number for number in (below, below + step) if number > 0)


def either(numbers: Sequence[int]) -> str:
    """Return numbers as a choice: ``8 or 16``."""
    return " or ".join(str(number) for number in numbers)
