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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_sp.errors import ConfigError
from megatron_sp.layout.patterns.blocks import Own
from megatron_sp.user_function import in_words, load_function, parts

FLAG = "--attention-pattern"


def names_function(name: str) -> bool:
    """Return whether the value of the flag has the form ``FILE.py:FUNCTION``."""
    place, function = parts(name)
    return place.endswith(".py") and function.isidentifier()


def own_pattern(spec: str, block: int) -> Own:
    """Return the pattern of a user's function.

    Args:
        spec: ``FILE.py:FUNCTION``.
        block: tokens of a block.

    Raises:
        ConfigError: the function cannot be loaded, or takes other arguments than (block) or (head, block).
    """
    function = load_function(FLAG, spec, ConfigError)
    try:
        taken = [count for count in (1, 2) if _takes(function, count)]
    except (TypeError, ValueError):
        taken = []
    if not taken:
        raise ConfigError(f"{FLAG} {spec}: {parts(spec)[1]} must take the number of a block of queries, or that of a "
                          "head and that of a block.")
    return Own(block, by_head=taken[-1] == 2, function=CheckedFunction(spec, function))


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    return True


@dataclass(frozen=True)
class CheckedFunction:
    """A user's function, whose result is checked and brought into the form that ``blocks.Own`` needs."""

    spec: str
    function: Callable[..., Any]

    def __call__(self, *where: int) -> list[int]:
        """Return the numbers of the blocks before the last argument, ascending."""
        said = f"{FLAG} {self.spec} for " + " and ".join(
            f"{name} {number}" for name, number in zip(("head", "block")[-len(where):], where))
        try:
            found = sorted({_whole(number) for number in self.function(*where)})
        except Exception as error:
            raise ConfigError(f"{said}: {in_words(error)}.") from error
        if found and not 0 <= found[0] <= found[-1] <= where[-1]:
            wrong = found[0] if found[0] < 0 else found[-1]
            raise ConfigError(f"{said} returns {wrong}; blocks that a query may see have the numbers 0 to {where[-1]}.")
        return [number for number in found if number < where[-1]]


def _whole(number: Any) -> int:
    if int(number) != number:
        raise ValueError(f"{number!r} is not a whole number")
    return int(number)


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
                    spec = pattern.function.spec if isinstance(pattern.function, CheckedFunction) else ""
                    return [f"{FLAG} {spec} returns other blocks when it is asked again for block {block}; it must "
                            "return the same ones always. Draw random blocks from random.Random(f\"{head} {block}\")."]
    except ConfigError as error:
        return error.problems
    return []
