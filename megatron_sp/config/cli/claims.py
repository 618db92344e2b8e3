"""What a command line says so far, while it is read: values by field and spelling, notes, problems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_sp.config.cli.values import strip_quotes


@dataclass
class Claims:
    """Values that spellings claim for fields, and what was found wrong.

    Spellings that claim one field must agree. So a script that gives ``--swiglu --squared-relu``, or one number of
    heads twice in two dialects, is told so instead of getting the last one.

    Attributes:
        given: each flag on the command line (normalised) and the words after its last occurrence.
        values: ``section.field`` -> {spelling: value}.
        notes: sentences that the user should read once.
        problems: sentences about what is wrong.
        broken: flags that were given with a value that cannot be read.
        plan: the command line is only planned, not run: data, tokenizer and checkpoints do not matter.
    """

    given: dict[str, list[str]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    plan: bool = False

    def claim(self, key: str, value: Any, spelling: str) -> None:
        """Say that ``spelling`` sets the field ``key`` to ``value``."""
        self.values.setdefault(key, {})[spelling] = value

    def claim_alone(self, key: str, value: Any, spelling: str) -> None:
        """Say that ``spelling`` sets the field ``key``, whatever other spellings say."""
        self.values[key] = {spelling: value}

    def claimed(self, key: str, default: Any = None) -> Any:
        """Return the value that was claimed for ``key``, or ``default``."""
        return next(iter(self.values.get(key, {}).values()), default)

    def read(self, name: str, convert: Callable[[str], Any], default: Any = None) -> Any:
        """Return the converted value of a one-valued flag; a value that does not convert becomes a problem."""
        if name not in self.given or name in self.broken or not self.given[name]:
            return default
        try:
            return convert(strip_quotes(self.given[name][0]))
        except ValueError as error:
            self.problems.append(f"{name}: {error}.")
            self.broken.add(name)
            return default
