"""From the command line to a checked, resolved run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from megatron_sp.config.cli.flags import Parsed, parse
from megatron_sp.config.resolve import resolve
from megatron_sp.config.rules.checks import advice, check_problems
from megatron_sp.config.rules.files import file_problems
from megatron_sp.config.schema import Run
from megatron_sp.errors import ConfigError


def load_run(argv: Sequence[str], world_size: int, files: bool = True,
             devices_per_node: int = 0) -> tuple[Run, list[str]]:
    """Parse, resolve and check a command line.

    Args:
        argv: the words after the program's name.
        world_size: number of processes.
        files: whether files and packages that the run needs must be on this machine.
        devices_per_node: what the launcher knows of it; 0: nothing.

    Returns:
        The resolved run (vocabulary sizes still open, see ``resolve.with_vocab``), and notes that
        the user should see once.

    Raises:
        ConfigError: with every problem found: unknown, unreadable, refused and contradicting
            flags, broken rules, missing files.
        SystemExit: after printing the help for ``--help``.
    """
    parsed = parse(argv)
    run = resolve(_on_nodes(parsed.run, devices_per_node), world_size)
    found = check_problems(run) + (file_problems(run) if files else [])
    problems = parsed.problems + [_in_users_words(problem, parsed) for problem in found
                                  if not _already_reported(problem, parsed)]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return run, parsed.notes + [_in_users_words(note, parsed) for note in advice(run)]


def _on_nodes(run: Run, devices_per_node: int) -> Run:
    """The run with the launcher's node size, where the command line names none."""
    if run.parallel.devices_per_node or not devices_per_node:
        return run
    return replace(run, parallel=replace(run.parallel, devices_per_node=devices_per_node))


def _already_reported(problem: str, parsed: Parsed) -> bool:
    """Whether ``problem`` calls a flag missing that was given, but could not be read."""
    return " required" in problem and any(_names(flag, problem) for flag in parsed.broken)


def _names(flag: str, text: str) -> bool:
    return re.search(re.escape(flag) + r"(?![\w-])", text) is not None


def _in_users_words(text: str, parsed: Parsed) -> str:
    """``text`` with each flag in the spelling of the command line."""
    for said, switch in parsed.switched.items():
        text = re.sub(re.escape(said) + r"(?![\w.-])", switch, text)
    origins = {preset for flag, preset in parsed.filled.items() if _names(flag, text)}
    text = re.sub(r"--[A-Za-z][\w-]*", lambda match: parsed.spelled.get(match[0], match[0]), text)
    return text + "".join(f" ({preset} fills in values that are named here.)" for preset in sorted(origins))
