"""Turn a command line into a run: parse the flags, derive open values, check the rules."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from megatron_sp.config.cli.flags import Parsed, parse
from megatron_sp.config.resolve import resolve
from megatron_sp.config.rules.checks import advice, check_problems
from megatron_sp.config.rules.data import source_problem
from megatron_sp.config.rules.files import file_problems
from megatron_sp.config.rules.sizes import check_batch, check_parallel
from megatron_sp.config.schema import Run
from megatron_sp.config.vocabulary import with_usual_vocabulary
from megatron_sp.errors import ConfigError

#: A flag of tools that look at a run of many processes.
WORLD_SIZE = "--world-size"


def load_run(argv: Sequence[str], world_size: int, files: bool = True, devices_per_node: int = 0,
             plan: bool = False) -> tuple[Run, list[str]]:
    """Parse, resolve and check a command line.

    Args:
        argv: the command-line arguments after the program's name.
        world_size: number of processes.
        files: whether to check that the files and packages which the run needs are on this machine.
        devices_per_node: number of devices per node, as the launcher reports it; 0: unknown.
        plan: the run is only planned: data, tokenizer, checkpoints and trackers are neither required nor looked at,
            and where no flag gives the size of the vocabulary, a usual one is taken.

    Returns:
        The resolved run, and notes that the user should see once. The vocabulary sizes are known in a plan, and else
        still open (see ``resolve.with_vocab``).

    Raises:
        ConfigError: with every problem found: unknown, unreadable, refused and contradicting
            flags, broken rules, missing files.
        SystemExit: after printing the help for ``--help``.
    """
    parsed = parse(argv, plan)
    run = resolve(_with_given(_on_nodes(parsed.run, devices_per_node), parsed), world_size)
    found = check_problems(run, plan) + (file_problems(run) if files and not plan else [])
    if parsed.file_batch and not check_parallel(run) and not check_batch(run):
        found += parsed.file_batch.problems(max(1, run.parallel.dp))
    problems = parsed.problems + [_in_users_words(problem, parsed) for problem in found
                                  if not _already_reported(problem, parsed)]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)), parsed.notes)
    notes = parsed.notes + [_in_users_words(note, parsed) for note in advice(run)]
    if plan and (problem := source_problem(run)):
        notes.append(f"No part of a plan, but refused in a run: {problem}")
    return with_usual_vocabulary(run, parsed.tokenizer, notes) if plan else (run, notes)


def load_run_of_world(argv: Sequence[str], announced: int, files: bool = True) -> tuple[Run, list[str]]:
    """Load the run that a tool, which is one process itself, is asked about: with ``--world-size N`` among its flags.

    Args:
        argv: the flags of ``pretrain_gpt.py``, and ``--world-size N`` or not.
        announced: number of processes where the flag is not given; 0: as many as one copy of the model needs.
        files: see ``load_run``.

    Raises:
        ConfigError: as ``load_run``, or the number of processes is not a whole number of at least 1.
    """
    argv, given = [part for word in argv
                   for part in (word.split("=", 1) if word.startswith(f"{WORLD_SIZE}=") else [word])], "0"
    if WORLD_SIZE in argv:
        index = argv.index(WORLD_SIZE)
        given = argv[index + 1] if index + 1 < len(argv) else ""
        del argv[index:index + 2]
        if not given.isdigit() or int(given) < 1:
            raise ConfigError(f"{WORLD_SIZE} {given}: give the number of processes of the real run, at least 1")
    return load_run(argv, int(given) or announced or smallest_world(argv), files)


def smallest_world(argv: Sequence[str]) -> int:
    """Return the number of processes of one replica: the product of the parallel degrees, without data parallelism."""
    parallel = resolve(parse(argv).run, 1).parallel
    return max(1, parallel.tp * parallel.pp * parallel.sp)


def _on_nodes(run: Run, devices_per_node: int) -> Run:
    """Return the run with the launcher's node size, where the command line names none."""
    if run.parallel.devices_per_node or not devices_per_node:
        return run
    return replace(run, parallel=replace(run.parallel, devices_per_node=devices_per_node))


def _with_given(run: Run, parsed: Parsed) -> Run:
    """Return the run with the names of the memory flags that were given, where the others are to be chosen."""
    if not run.memory.memory_efficiency:
        return run
    given = sorted(key.partition(".")[2] for key in parsed.given if key.startswith("memory."))
    return replace(run, memory=replace(run.memory, given=tuple(given)))


def _already_reported(problem: str, parsed: Parsed) -> bool:
    """Return whether ``problem`` is about a flag whose value cannot be read, which the parser has reported already."""
    return any(_names(flag, problem) for flag in parsed.broken)


def _names(flag: str, text: str) -> bool:
    return re.search(re.escape(flag) + r"(?![\w-])", text) is not None


def _in_users_words(text: str, parsed: Parsed) -> str:
    """Return a message with each flag in the spelling that the user typed, for example DeepSpeed's."""
    for flag_and_value, typed in parsed.switched.items():
        text = re.sub(re.escape(flag_and_value) + r"(?![\w.-])", typed, text)
    origins = {preset for flag, preset in parsed.filled.items() if _names(flag, text)}
    text = re.sub(r"--[A-Za-z][\w-]*", lambda match: parsed.spelled.get(match[0], match[0]), text)
    return text + "".join(f" ({preset} fills in values that are named here.)" for preset in sorted(origins))
