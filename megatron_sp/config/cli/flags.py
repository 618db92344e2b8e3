"""The command line: every flag of the schema, other people's spellings, and what becomes of the rest.

The schema's fields are the options. ``argparse`` renders ``--help``; reading is done here, since
argparse stops at the first mistake and a user wants to see all of them.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_sp.config.cli import tables
from megatron_sp.config.cli.foreign import PRESET, Claims, foreign_flags, translate
from megatron_sp.config.cli.options import Option, normalise, schema_options, sections
from megatron_sp.config.cli.values import parse_words, strip_quotes
from megatron_sp.config.rules.bounds import bound_problem
from megatron_sp.config.schema import Run
from megatron_sp.errors import ConfigError

if TYPE_CHECKING:
    import argparse

_FLAG = re.compile(r"--[A-Za-z]")


@dataclasses.dataclass
class Parsed:
    """A command line as read: the run with holes, notes for the user, and every problem found.

    ``spelled`` maps our name of a flag to the spelling the user chose, ``switched`` our flag and
    value (``--num-query-groups 1``) to the bare switch that means it; ``filled`` our name of a flag to
    the preset that filled it in; ``broken`` holds flags (our names) that were given but could not be
    read, so that nobody calls them missing.
    """

    run: Run
    notes: list[str]
    problems: list[str]
    spelled: dict[str, str]
    switched: dict[str, str]
    filled: dict[str, str]
    broken: set[str]


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
        raise ConfigError(parsed.problems)
    return parsed.run, parsed.notes


def parse(argv: Sequence[str]) -> Parsed:
    """Read a command line and keep the problems, so that later checks can add theirs."""
    if any(word in ("-h", "--help") for word in argv):
        build_parser().print_help()
        raise SystemExit(0)
    options = schema_options()
    claims = Claims()
    _scan(argv, _arities(options), claims)
    _claim_schema(options, claims)
    translate(claims)
    _answer_tables(claims)
    return _build(options, claims)


# --- reading -----------------------------------------------------------------------------------

def _arities(options: dict[str, Option]) -> dict[str, int | str]:
    """Every known flag -> how many values it takes (a number, "?" or "*")."""
    known: dict[str, int | str] = {}
    known.update(tables.HINTS)
    known.update(tables.EXPERT_COMPANIONS)
    known.update({name: nargs for name, (nargs, _) in tables.IGNORED.items()})
    known.update({name: refusal.nargs for name, refusal in (tables.REFUSED | tables.NOT_YET).items()})
    known.update(dict.fromkeys(tables.RENAMED, 1))
    known.update({name: entry.nargs for name, entry in foreign_flags().items()})
    for option in options.values():
        known.update(dict.fromkeys(option.names, option.nargs))
        if option.off:
            known[option.off] = 0
    return known


def _scan(argv: Sequence[str], known: dict[str, int | str], claims: Claims) -> None:
    """Cut ``argv`` into flags and their values; the last occurrence of a flag counts."""
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
            _unknown(written, name, known, claims)
            index = stop
            continue
        nargs = known[name]
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


def _unknown(written: str, name: str, known: dict[str, int | str], claims: Claims) -> None:
    import difflib

    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if near:
        claims.broken.add(near[0])
    hint = f"; did you mean {near[0]}?" if near else "; --help lists all flags."
    claims.problems.append(f"Unknown flag {written}{hint}")


def _claim_schema(options: dict[str, Option], claims: Claims) -> None:
    for option in options.values():
        for name in option.names:
            if name not in claims.given:
                continue
            try:
                value = option.convert(claims.given[name])
            except ValueError as error:
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


# --- flags that are not fields -------------------------------------------------------------------

def _answer_tables(claims: Claims) -> None:
    """Hints, ignored, renamed, refused and not-yet flags: one line for each answer."""
    given = claims.given
    hints = [name for name in given if name in tables.HINTS and name != "--local-rank"]
    if hints:
        claims.notes.append(f"Accepted as hints, without effect here: {', '.join(hints)}.")
    for name, (_, reason) in tables.IGNORED.items():
        if name in given:
            claims.notes.append(f"{_said(name, given)} is ignored: {reason}.")
    for name, replacement in tables.RENAMED.items():
        if name in given:
            claims.problems.append(f"{name} is an old name; use {replacement}.")
            claims.broken.add(replacement)
    for name, refusal in tables.REFUSED.items():
        if name in given and not _harmless(refusal, given[name]):
            claims.problems.append(f"{_said(name, given)}: {refusal.reason}.")
    for name, refusal in tables.NOT_YET.items():
        if name in given and not _harmless(refusal, given[name]):
            cure = f"; {refusal.cure}" if refusal.cure else ""
            claims.problems.append(f"{_said(name, given)}: {refusal.reason} is not available yet{cure}.")


def _said(name: str, given: dict[str, list[str]]) -> str:
    return " ".join([name, *parse_words(given[name])[:4]])


def _harmless(refusal: tables.Refusal, values: list[str]) -> bool:
    """Whether the values given mean what happens anyway."""
    def fold(text: str) -> str:
        try:
            return repr(float(text))
        except ValueError:
            return text.lower()

    return bool(refusal.harmless) and len(values) == 1 and (
        fold(strip_quotes(values[0])) in {fold(value) for value in refusal.harmless})


# --- the run -------------------------------------------------------------------------------------

def _build(options: dict[str, Option], claims: Claims) -> Parsed:
    """The run from all claims; spellings that say different things become a problem."""
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
        if spellings[-1] == PRESET:
            filled[options[key].flag] = f"{PRESET} {claims.given[PRESET][-1]}"
        elif claims.given.get(spellings[-1]):
            spelled[options[key].flag] = spellings[-1]
        else:
            switched[f"{options[key].flag} {_show(values[-1])}"] = spellings[-1]
    run = Run(**{section: cls(**chosen[section]) for section, cls in sections().items()})
    return Parsed(run, claims.notes, claims.problems, spelled, switched, filled, claims.broken)


def _claim_text(name: str, value: Any, claims: Claims) -> str:
    return f"{name} {_show(value)}" if claims.given.get(name) else name


def _show(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


# --- help ----------------------------------------------------------------------------------------

def default_in_words(option: Option) -> str:
    """The default as help and docs show it; "" when the help text already says it."""
    if "default:" in option.help or "(required)" in option.help:
        return ""
    if option.kind == "bool":
        return "" if option.off else "on" if option.default else "off"
    if option.default in ("", ()):
        return "none"
    if isinstance(option.default, (int, float)) and not option.default:
        return "0"
    return str(option.default)


def build_parser() -> argparse.ArgumentParser:
    """An argparse parser with every flag of the schema, grouped by dataclass; it renders ``--help``."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="pretrain_gpt.py", usage="%(prog)s FLAGS", allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Pretrain a GPT or Llama type model on long sequences.\n"
                    "Underscores and hyphens are alike, a repeated flag's last value counts, whole numbers may be\n"
                    "written 1_000_000 or 1e6. docs/reference/flags.md also lists the accepted hints and the refused "
                    "flags.")
    groups = {}
    for section, cls in sections().items():
        groups[section] = parser.add_argument_group((cls.__doc__ or section).splitlines()[0].rstrip("."))
    for option in schema_options().values():
        _add_to_help(groups[option.key.partition(".")[0]], option)
    others = parser.add_argument_group("Spellings of other frameworks")
    for name, entry in foreign_flags().items():
        kwargs: dict[str, Any] = dict(action="store_true") if entry.nargs == 0 else dict(
            nargs=None if entry.nargs == 1 else "*", metavar="VALUE")
        others.add_argument(name, help=entry.help.replace("%", "%%"), **kwargs)
    return parser


def _add_to_help(group: argparse._ArgumentGroup, option: Option) -> None:
    words = default_in_words(option)
    text = option.help + (f" (default: {words})" if words else "")
    kwargs: dict[str, Any] = dict(dest=option.key.replace(".", "_"), help=text.replace("%", "%%"))
    if option.kind == "bool":
        if option.off:
            group.add_argument(option.off, action="store_false", **{
                **kwargs, "help": f"Switch off: {option.help[0].lower()}{option.help[1:]}"})
        else:
            group.add_argument(*option.names, action="store_true", **kwargs)
        return
    kind = {"int": int, "ints": int, "float": float}.get(option.kind, str)
    kwargs["metavar"] = option.metavar or ("{" + ",".join(option.choices) + "}" if option.choices else
                                           {"int": "N", "float": "X"}.get(option.kind, "TEXT"))
    group.add_argument(*option.names, type=kind, nargs=None if option.nargs == 1 else option.nargs,
                       default=option.default, **kwargs)


if __name__ == "__main__":
    parse_args(sys.argv[1:])
