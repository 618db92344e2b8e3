"""A pattern of the user's: ``--attention-pattern FILE.py:FUNCTION``.

The function says which blocks a block of queries sees::

    def pattern(block):                 # the same for all heads
        return [0, block // 2]

    def pattern(head, block):           # different for each query head
        return [head % max(1, block)]

It returns whole numbers from 0 to ``block``, in any order. The own block belongs to them whether it is named or not.
The function must return the same blocks whenever it is asked for them: every rank, every layer and both passes ask
anew.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from megatron_sp.errors import ConfigError
from megatron_sp.layout.patterns.blocks import Own
from megatron_sp.user_function import FAILURES, in_words, load_function, parts

#: Numbers that a function may return at most, with repetitions; so that an endless generator is an error.
MOST_NUMBERS = 10**6


def names_function(name: str) -> bool:
    """Return whether the value of the flag has the form ``FILE.py:FUNCTION``."""
    place, function = parts(name)
    return place.endswith(".py") and function.isidentifier()


def own_pattern(flag: str, spec: str, block: int) -> Own:
    """Return the pattern of a user's function.

    Args:
        flag: name of the flag, for messages.
        spec: ``FILE.py:FUNCTION``.
        block: tokens of a block.

    Raises:
        ConfigError: the function cannot be loaded, or takes other arguments than (block) or (head, block).
    """
    function = load_function(flag, spec, ConfigError)
    try:
        taken = [count for count in (1, 2) if _takes(function, count)]
    except (TypeError, ValueError):
        taken = []
    if not taken:
        raise ConfigError(f"{flag} {spec}: {parts(spec)[1]} must take the number of a block of queries, or that of a "
                          "head and that of a block.")
    return Own(block, by_head=taken[-1] == 2, function=CheckedFunction(f"{flag} {spec}", function))


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    return True


@dataclass(frozen=True)
class CheckedFunction:
    """A user's function, whose result is checked and brought into the form that ``blocks.Own`` needs.

    Attributes:
        said: flag and value that name the function, for messages.
        function: the user's.
    """

    said: str
    function: Callable[..., Any]

    def __call__(self, *where: int) -> list[int]:
        """Return the numbers of the blocks before the last argument, ascending."""
        block = where[-1]
        try:
            returned = self.function(*where)
            given = list(islice(returned, MOST_NUMBERS + 1)) if isinstance(returned, Iterable) else None
        except FAILURES as error:
            raise ConfigError(f"{self._asked(where)}: {in_words(error)}.") from error
        if given is None or len(given) > MOST_NUMBERS:
            wrong = f"more than {MOST_NUMBERS:,} numbers" if given else reprlib.repr(returned)
            raise ConfigError(f"{self._asked(where)} returns {wrong}; it must return a list of the numbers of blocks, "
                              f"from 0 to {block}.")
        for number in given:
            if not _is_block(number, block):
                raise ConfigError(f"{self._asked(where)} returns {reprlib.repr(number)}; blocks that a query may see "
                                  f"have the whole numbers 0 to {block}.")
        return sorted({int(number) for number in given} - {block})

    def _asked(self, where: tuple[int, ...]) -> str:
        return f"{self.said} for " + " and ".join(
            f"{name} {number}" for name, number in zip(("head", "block")[-len(where):], where))


def _is_block(number: Any, block: int) -> bool:
    """Return whether a user's value is a whole number from 0 to ``block``."""
    try:
        return bool(0 <= number <= block and int(number) == number)
    except (TypeError, ValueError, RuntimeError):
        return False


def problems_of(pattern: Own, heads: int, blocks: int) -> list[str]:
    """Return what is wrong with a user's pattern in the blocks of a sequence, at most one sentence.

    Args:
        heads: query heads of the model.
        blocks: blocks of a sequence.
    """
    try:
        for head in range(heads if pattern.by_head else 1):
            for block in range(blocks):
                if pattern.earlier(head, block) != pattern.earlier(head, block):
                    said = pattern.function.said if isinstance(pattern.function, CheckedFunction) else ""
                    return [f"{said} returns other blocks when it is asked again for block {block}; it must "
                            "return the same ones always. Draw random blocks from random.Random(f\"{head} {block}\")."]
    except ConfigError as error:
        return error.problems
    return []
