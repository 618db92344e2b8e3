"""Collect what a command line sets while it is being read: a value for each field and spelling, notes, problems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_sp.config.cli.values import strip_quotes


class FileBatch(NamedTuple):
    """The batch sizes in DeepSpeed's file; 0 for a key that the file lacks."""

    file: str
    whole: int
    micro: int
    steps: int

    def problems(self, data_parallel: int) -> list[str]:
        """Return a problem where the keys contradict each other, which DeepSpeed refuses too.

        Args:
            data_parallel: data-parallel size.
        """
        if not self.whole or not self.micro:
            return []
        steps = self.steps or max(1, self.whole // (self.micro * data_parallel))
        if self.micro * steps * data_parallel == self.whole:
            return []
        times = f" x gradient_accumulation_steps {self.steps}" if self.steps else ""
        return [f"train_batch_size {self.whole} in {self.file} is not {'' if times else 'a multiple of '}"
                f"train_micro_batch_size_per_gpu {self.micro}{times} x data-parallel size {data_parallel}, and "
                "DeepSpeed refuses such a file; correct one of these keys, or leave them out and let the flags give "
                "the batch."]


@dataclass
class Claims:
    """The values that the command line gives to fields, and what was found wrong with it.

    To claim a field means to record that a spelling on the command line sets it to a value. All spellings that claim
    one field must give the same value. Otherwise the user gets an error, for example for ``--swiglu --squared-relu``,
    or for two different numbers of heads in two dialects. No spelling silently wins over another.

    Attributes:
        given: each flag on the command line (normalised) and its values, those of the last occurrence.
        values: ``section.field`` -> {spelling: value}.
        notes: sentences that the user should read once.
        problems: sentences about what is wrong.
        broken: flags that were given with a value that cannot be read.
        file_batch: the batch that DeepSpeed's file gives, for a check that needs the number of processes.
        plan: the command line is only planned, not run: data, tokenizer and checkpoints do not matter.
    """

    given: dict[str, list[str]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    file_batch: FileBatch | None = None
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
