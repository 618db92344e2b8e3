"""The text of ``--help``: argparse renders it; the command line itself is read by ``flags.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_sp.config.cli.options import Option, schema_options, sections
from megatron_sp.config.cli.plan_flags import PLAN_FLAGS
from megatron_sp.config.cli.translation.foreign import foreign_flags

if TYPE_CHECKING:
    import argparse


def default_in_words(option: Option) -> str:
    """Return the default as help and documents show it; "" when the help text already says it."""
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
    """Return an argparse parser with every flag, grouped by dataclass; it renders ``--help`` and reads nothing."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="pretrain_gpt.py", usage="%(prog)s FLAGS", allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Pretrain a GPT or Llama type model on long sequences.\n"
                    "Underscores and hyphens are alike. The last value of a repeated flag is used. Whole numbers may\n"
                    "be written 1_000_000 or 1e6. docs/reference/flags.md also lists the accepted hints and the\n"
                    "refused flags.")
    groups = {}
    for section, cls in sections().items():
        groups[section] = parser.add_argument_group((cls.__doc__ or section).splitlines()[0].rstrip("."))
    for option in schema_options().values():
        _add_to_help(groups[option.key.partition(".")[0]], option)
    plans = parser.add_argument_group("Plan: print what a run will do and need, and start nothing")
    for name, (metavar, text) in PLAN_FLAGS.items():
        takes: dict[str, Any] = dict(metavar=metavar) if metavar else dict(action="store_true")
        plans.add_argument(name, help=text, **takes)
    others = parser.add_argument_group("Spellings of other frameworks")
    for name, entry in foreign_flags().items():
        kwargs: dict[str, Any] = dict(action="store_true") if entry.nargs == 0 else dict(
            nargs=None if entry.nargs == 1 else entry.nargs, metavar=entry.metavar)
        others.add_argument(name, help=entry.help.replace("%", "%%"), **kwargs)
    return parser


def _add_to_help(group: argparse._ArgumentGroup, option: Option) -> None:
    words = default_in_words(option)
    text = option.help + (f" (default: {words})" if words else "")
    kwargs: dict[str, Any] = dict(dest=option.key.replace(".", "_"), help=text.replace("%", "%%"))
    if option.kind == "bool":
        if option.off:
            group.add_argument(option.off, action="store_false", **kwargs)
        else:
            group.add_argument(*option.names, action="store_true", **kwargs)
        return
    kind = {"int": int, "ints": int, "float": float}.get(option.kind, str)
    kwargs["metavar"] = option.metavar or ("{" + ",".join(option.choices) + "}" if option.choices else
                                           {"int": "N", "float": "X"}.get(option.kind, "TEXT"))
    group.add_argument(*option.names, type=kind, nargs=None if option.nargs == 1 else option.nargs,
                       default=option.default, **kwargs)
