"""Errors that are meant for the user, not for the programmer.

Each is one clear message that names the flag or file, the value, the rule and a cure. Programs
print it without a traceback and exit with code 2 (see ``runtime.run_program``). Mistakes of
*our* code are asserts and ordinary exceptions.
"""

from __future__ import annotations

from collections.abc import Sequence


class UserError(Exception):
    """A mistake that the user can cure. Its text says all the user needs; no traceback is printed."""

    exit_code = 2


class ConfigError(UserError):
    """One or more problems in the command line, all reported together.

    Args:
        problems: sentences about what is wrong.
        notes: what a user should know about the rest of the command line; shown below the problems.
    """

    def __init__(self, problems: str | Sequence[str], notes: Sequence[str] = ()):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        self.notes = list(notes)
        count = len(self.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        said = "".join(f"\n  - {note}" for note in self.notes)
        more = f"\nNotes on the rest of it:{said}" if said else ""
        super().__init__(f"{head} in the command line:\n{lines}{more}")


class DataError(UserError):
    """A data file that is missing, damaged, or does not fit the run."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, or does not fit the run."""


class TrainingError(UserError):
    """Training cannot go on (for example a loss that is not a number)."""


class PeerLostError(TrainingError):
    """Another rank ended or does not answer; this one is not at fault."""

    exit_code = 1


class InstallationError(UserError):
    """A package that is missing or whose version does not fit."""
