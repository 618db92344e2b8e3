"""Read the command line: split it into flags and values, and set the fields of a run from them.

``argparse`` renders ``--help`` (``help.py``), but reading is done here: argparse stops at the first mistake, and a
user wants to see all of them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from megatron_sp.config.cli.claims import Claims, FileBatch
from megatron_sp.config.cli.load_hf import LOAD_HF
from megatron_sp.config.cli.options import Option, normalise, schema_options, sections
from megatron_sp.config.cli.translation import tables
from megatron_sp.config.cli.translation.answers import accepts_value, answer_tables, report_unknown
from megatron_sp.config.cli.translation.foreign import PRESET, foreign_flags, translate
from megatron_sp.config.cli.translation.windows import read_windows
from megatron_sp.config.cli.values import parse_words, strip_quotes
from megatron_sp.config.rules.bounds import bound_problem
from megatron_sp.config.schema import Run
from megatron_sp.errors import ConfigError

_FLAG = re.compile(r"--[A-Za-z]")
#: This flag takes no value here. In Megatron-DeepSpeed it takes the kind of profiler.
PROFILE, PROFILERS = "--profile", ("pt", "pt-full")


@dataclasses.dataclass
class Parsed:
    """A command line as read.

    Attributes:
        run: fields that the command line does not name have their declared defaults; ``resolve`` derives more.
        notes: sentences that the user should read once.
        problems: sentences about what is wrong.
        spelled: this package's name of a flag -> the spelling on the command line.
        switched: this package's flag and value (``--num-query-groups 1``) -> the arguments on the command line that
            mean the same (``--group-query-attention``).
        filled: this package's name of a flag -> the preset that filled it in.
        broken: flags that were given and could not be read; later checks say nothing about them.
        file_batch: the batch that DeepSpeed's file gives.
        tokenizer: the ``--tokenizer-type`` on the command line, also one of another framework.
        given: fields that the command line sets, as ``section.field``.
    """

    run: Run
    notes: list[str]
    problems: list[str]
    spelled: dict[str, str]
    switched: dict[str, str]
    filled: dict[str, str]
    broken: set[str]
    file_batch: FileBatch | None
    tokenizer: str
    given: set[str]


def parse_args(argv: Sequence[str]) -> tuple[Run, list[str]]:
    """Read a command line.

    Returns:
        The run as given (derived values still missing, see ``resolve``), and notes for the user.

    Raises:
        ConfigError: listing every unknown, unreadable, contradicting and refused flag.
        SystemExit: after printing the help for ``--help``.
    """
    parsed = parse(argv)
    if parsed.problems:
        raise ConfigError(parsed.problems, parsed.notes)
    return parsed.run, parsed.notes


def parse(argv: Sequence[str], plan: bool = False) -> Parsed:
    """Read a command line and keep the problems, so that later checks can add theirs.

    Args:
        plan: the command line is only planned: flags about data, tokenizer and checkpoints that a run refuses are
            accepted.

    Raises:
        SystemExit: after printing the help for ``--help``.
    """
    if any(word in ("-h", "--help") for word in argv):
        from megatron_sp.config.cli.help import build_parser

        build_parser().print_help()
        raise SystemExit(0)
    options = schema_options()
    claims = Claims(plan=plan)
    _scan(argv, _arities(options), claims)
    read_windows(claims)
    _claim_schema(options, claims)
    translate(claims)
    answer_tables(claims)
    return _build(options, claims)


# --- reading -----------------------------------------------------------------------------------

def _arities(options: dict[str, Option]) -> dict[str, int | str]:
    """Return every known flag and how many values it takes (a number, "?" or "*")."""
    known: dict[str, int | str] = {}
    known.update(tables.HINTS)
    known.update(tables.EXPERT_COMPANIONS)
    known.update({name: nargs for name, (nargs, _) in tables.IGNORED.items()})
    known.update({name: refusal.nargs for name, refusal in (tables.REFUSED | tables.RUN_ONLY).items()})
    known.update({name: entry.nargs for name, entry in foreign_flags().items()})
    for option in options.values():
        known.update(dict.fromkeys(option.names, option.nargs))
        if option.off:
            known[option.off] = 0
    known[PROFILE] = "?"
    return known


def _scan(argv: Sequence[str], known: dict[str, int | str], claims: Claims) -> None:
    """Split ``argv`` into flags and their values; the last occurrence of a flag gives its values."""
    words = list(argv)
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not _FLAG.match(word):
            claims.problems.append(f"{word!r} belongs to no flag.")
            continue
        written, equals, attached = word.partition("=")
        name = normalise(written)
        stop = index
        while stop < len(words) and not _FLAG.match(words[stop]):
            stop += 1
        if name not in known:
            report_unknown(written, name, known, claims)
            index = stop
            continue
        nargs = known[name]
        if name == PROFILE and (attached if equals else "".join(words[index:stop][:1])) not in PROFILERS:
            nargs = 0
        most = nargs if isinstance(nargs, int) else 1 if nargs == "?" else len(words)
        if equals:
            values = [attached]
        else:
            values = words[index:min(stop, index + most)]
            index += len(values)
        _store(written, name, nargs, values, bool(equals), claims)


def _store(written: str, name: str, nargs: int | str, values: list[str], attached: bool, claims: Claims) -> None:
    if nargs == 0 and attached:
        claims.problems.append(f"{written} is a switch and takes no value; given: {values[0]!r}.")
        claims.broken.add(name)
        return
    if nargs == 1 and not values:
        claims.problems.append(f"{written} needs a value.")
        claims.broken.add(name)
        return
    claims.given.pop(name, None)  # keep the order of last occurrences
    claims.given[name] = values


def _claim_schema(options: dict[str, Option], claims: Claims) -> None:
    for option in options.values():
        for name in option.names:
            if name not in claims.given:
                continue
            try:
                value = option.convert(claims.given[name])
            except ValueError as error:
                if not accepts_value(option.key, name, claims):
                    claims.problems.append(f"{name}: {error}.")
                claims.broken |= {name, option.flag}
                continue
            problem = bound_problem(option.key, value)
            if problem:
                claims.problems.append(f"{name} {_show(value)}: {problem}.")
                claims.broken |= {name, option.flag}
                continue
            claims.claim(option.key, value, name)
        if option.off in claims.given:
            claims.claim(option.key, False, option.off)


# --- the run -------------------------------------------------------------------------------------

def _build(options: dict[str, Option], claims: Claims) -> Parsed:
    """Return the run from all claims; spellings that give one field different values become a problem."""
    chosen: dict[str, dict[str, Any]] = {section: {} for section in sections()}
    spelled: dict[str, str] = {}
    switched: dict[str, str] = {}
    filled: dict[str, str] = {}
    for key, by_spelling in claims.values.items():
        if not by_spelling:
            continue
        spellings = list(by_spelling)
        values = list(by_spelling.values())
        if any(value != values[0] for value in values):
            said = " and ".join(_claim_text(name, by_spelling[name], claims) for name in spellings)
            claims.problems.append(f"{said} contradict each other; keep one of them.")
        section, _, name = key.partition(".")
        chosen[section][name] = values[-1]
        if key not in options or options[key].kind == "bool":
            continue
        if spellings[-1] in (PRESET, LOAD_HF) and key != "checkpoint.load_hf":
            filled[options[key].flag] = f"{spellings[-1]} {claims.given[spellings[-1]][-1]}"
        elif spellings[-1] in options[key].names or _is_one_word(claims.given.get(spellings[-1])):
            spelled[options[key].flag] = spellings[-1]
        else:
            words = parse_words(claims.given.get(spellings[-1], []))
            switched[f"{options[key].flag} {_show(values[-1])}"] = " ".join([spellings[-1], *words])
    run = Run(**{section: cls(**chosen[section]) for section, cls in sections().items()})
    kind = claims.given.get("--tokenizer-type") or claims.given.get("--patch-tokenizer-type")
    return Parsed(run, claims.notes, claims.problems, spelled, switched, filled, claims.broken,
                  claims.file_batch, strip_quotes(kind[0]) if kind else run.data.tokenizer_type,
                  {key for key, by_spelling in claims.values.items() if by_spelling})


def _is_one_word(words: list[str] | None) -> bool:
    """Return whether a flag has one value, so that messages may name it and not this package's own flag."""
    return words is not None and len(parse_words(words)) == 1


def _claim_text(name: str, value: Any, claims: Claims) -> str:
    return f"{name} {_show(value)}" if claims.given.get(name) else name


def _show(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
