"""The parser of the programs in ``tools/``: mistakes become a ``ConfigError``, with a guess at what was meant."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from megatron_sp.config.cli.translation.answers import nearest_flag
from megatron_sp.errors import ConfigError


class ToolParser(argparse.ArgumentParser):
    """A parser that raises ConfigError at a mistake, where argparse would print a message of its own and exit."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._words: list[str] = []

    def parse_known_args(self, args: Sequence[str] | None = None,  # type: ignore[override]
                         namespace: Any = None) -> Any:
        """Parse as ``argparse`` does, and remember the arguments, among which ``error`` looks for typing mistakes."""
        self._words = list(args or ())
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError with argparse's message, preceded by each flag that is likely misspelled."""
        known = self._option_string_actions
        _, _, extra = message.partition("unrecognized arguments: ")
        if unknown := [word for word in extra.split() if word.startswith("--")]:
            raise ConfigError([unknown_flag(word, known) for word in unknown])
        slips = [word for word in self._words if word.startswith("--") and word.partition("=")[0] not in known
                 and nearest_flag(word.partition("=")[0], known)]
        if slips and "required" in message:  # the required flag is probably one of the misspelled ones
            raise ConfigError([unknown_flag(word, known) for word in slips])
        raise ConfigError([*(unknown_flag(word, known) for word in slips), message])


def unknown_flag(word: str, known: Iterable[str]) -> str:
    """Return a sentence about an unknown flag, with the known flag that is one typing mistake away, if there is one."""
    name = word.partition("=")[0]
    near = nearest_flag(name, known) if name.startswith("--") else ""
    return f"{name} is not known" + (f"; did you mean {near}?" if near else "; --help lists all flags.")
