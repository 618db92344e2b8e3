"""Several data sets by name: ``--valid-data-path code=P1 books=0.3 P2 0.7 P3``. Looks at no files."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: A name, "=", and the first value of the set. A path that looks like this must be written ./a=b.
_NAMED = re.compile(r"([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)


def named_sets(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the values of each set by its name; without names, one set with the name "".

    Raises:
        ValueError: with a sentence fragment saying what is wrong.
    """
    sets: dict[str, list[str]] = {}
    current = ""
    for word in words:
        match = _NAMED.fullmatch(word)
        if match is None:
            sets.setdefault(current, []).append(word)
            continue
        if "" in sets:
            raise ValueError(f"{word!r} names a set, but {sets[''][0]!r} before it has no name; name all sets or none")
        current = match[1]
        if current in sets:
            raise ValueError(f"the name {current!r} is given twice; each set needs a name of its own (a set of several "
                             f"prefixes is {current}=W1 P1 W2 P2)")
        sets[current] = [match[2]] if match[2] else []
    for name, rest in sets.items():
        if not rest:
            raise ValueError(f"{name}= has no prefix")
    return {name: tuple(rest) for name, rest in sets.items()}
