"""Which documents of a token set ``--split`` gives to training, validation and test. Pure arithmetic."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_sp.errors import DataError

SPLITS = ("train", "valid", "test")
LONG_NAMES = dict(train="training", valid="validation", test="test")
_SHARE = re.compile(r"\d+\.?\d*|\.\d+")


def parse_split(text: str) -> tuple[float, float, float]:
    """Return the shares of ``--split``, scaled to a sum of 1; "969, 30, 1", or "100" for training alone.

    Raises:
        DataError: not one to three numbers of at least 0 with a sum above 0.
    """
    words = [word.strip() for word in re.split(r"[,/]", text)]
    numbers = [float(word) for word in words if _SHARE.fullmatch(word)]
    total = sum(numbers)
    if len(numbers) < len(words) or len(words) > 3 or not 0 < total < float("inf"):
        raise DataError(f"--split {text!r} must be one to three shares of at least 0, not all of them 0, for training, "
                        "validation and test, for example 969,30,1.")
    train, valid, test = (number / total for number in numbers + [0.0] * (3 - len(numbers)))
    return train, valid, test


def split_bounds(shares: Sequence[float], num_documents: int) -> list[tuple[int, int] | None]:
    """Return documents ``[start, stop)`` of each split in order, rounded as Megatron does; None for a share of 0."""
    bounds: list[tuple[int, int] | None] = []
    begin = 0.0
    for share in shares:
        end = begin + share
        bounds.append((round(begin * float(num_documents)), round(end * float(num_documents))) if share > 0 else None)
        begin = end
    return bounds


def empty_split_problem(prefix: str, name: str, split: str, num_documents: int) -> str:
    """Return a sentence when a split with a share above 0 gets none of the documents of a token set, else "".

    Args:
        prefix: path of the token set, for the message.
        name: "train", "valid" or "test".
        split: value of ``--split``.
    """
    bounds = split_bounds(parse_split(split), num_documents)[SPLITS.index(name)]
    if bounds is None or bounds[0] < bounds[1]:
        return ""
    return (f"The {LONG_NAMES[name]} split of {prefix} is empty: --split {split!r} gives it none of the "
            f"{num_documents} documents. Give it a larger share or the share 0 (such as 98,2,0), use more documents, "
            "or set --eval-iters 0 for no validation and test.")
