"""Answers to flags that set no field: one line for those without effect, a refusal by name, or a guess at a typo."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron_sp.config.cli.claims import Claims
from megatron_sp.config.cli.translation import tables
from megatron_sp.config.cli.values import parse_words, strip_quotes

#: Largest number of values that a message shows of one flag.
WORDS_SHOWN = 4


def answer_tables(claims: Claims) -> None:
    """Answer every flag of ``tables``: one note for hints, one for ignored flags, one problem for each refused rule."""
    given = claims.given
    hints = [name for name in given if name in tables.HINTS and name != "--local-rank"]
    if hints:
        claims.notes.append(f"Accepted as hints, without effect here: {', '.join(hints)}.")
    ignored = _grouped({name: reason for name, (_, reason) in tables.IGNORED.items() if name in given}, given)
    if ignored:
        claims.notes.append(f"Ignored: {'; '.join(f'{flags} ({reason})' for flags, reason in ignored)}.")
    refused = {name: entry.reason for name, entry in tables.REFUSED.items() if _is_refused(name, entry, given)}
    claims.problems += [f"{flags}: {reason}." for flags, reason in _grouped(refused, given)]
    run_only = {name: entry.reason for name, entry in tables.RUN_ONLY.items() if _is_refused(name, entry, given)}
    if claims.plan and run_only:
        claims.notes.append("No part of a plan, but refused in a run: "
                            + "; ".join(f"{flags} ({reason})" for flags, reason in _grouped(run_only, given)) + ".")
    elif run_only:
        claims.problems += [f"{flags}: {reason}." for flags, reason in _grouped(run_only, given)]


def accepts_value(key: str, name: str, claims: Claims) -> bool:
    """Return whether a value that is not among the field's choices is handled elsewhere: by a note or a replacement."""
    value = strip_quotes(claims.given[name][0]) if claims.given[name] else ""
    if key == "data.tokenizer_type":
        return _accepts_tokenizer(name, claims)
    if key == "data.dataloader_type" and claims.plan:
        claims.notes.append(f"{name} {value}: no part of a plan, but refused in a run; use single or cyclic.")
        return True
    if key == "parallel.distributed_backend" and value.lower() in tables.OTHER_BACKENDS:
        claims.notes.append(f"{name} {value}: ranks communicate by nccl on GPUs and by gloo on CPUs; which one follows "
                            "from the devices found.")
        return True
    if key.startswith("logging.") and not value and claims.given[name]:
        claims.notes.append(f"{name} is empty, which is as good as without it.")
        return True
    return False


def _accepts_tokenizer(name: str, claims: Claims) -> bool:
    """Return whether an unknown tokenizer is handled: a plan notes it, a run refuses it and names a replacement."""
    kind = strip_quotes(claims.given[name][0])
    instead = {word.lower(): cure for word, cure in tables.FOREIGN_TOKENIZERS.items()}.get(kind.lower(), "")
    if claims.plan:
        claims.notes.append(f"{name} {kind}: no part of a plan, but refused in a run"
                            + (f"; use {instead}." if instead else "."))
        return True
    if instead:
        claims.problems.append(f"{name} {kind} is not supported; use {name} {instead}.")
    return bool(instead)


def _grouped(reasons: Mapping[str, str], given: Mapping[str, list[str]]) -> list[tuple[str, str]]:
    """Return pairs (flags with their values, reason), with one pair for each reason."""
    flags: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        flags.setdefault(reason, []).append(" ".join([name, *parse_words(given[name])[:WORDS_SHOWN]]))
    return [(", ".join(names), reason) for reason, names in flags.items()]


def _is_refused(name: str, refusal: tables.Refusal, given: Mapping[str, list[str]]) -> bool:
    """Return whether a flag has an effect here: its value changes something, and the flag that it needs is given."""
    if name not in given or refusal.not_beside in given or (refusal.only_with and refusal.only_with not in given):
        return False
    values = given[name]
    return not (refusal.harmless and len(values) == 1
                and _folded(strip_quotes(values[0])) in {_folded(value) for value in refusal.harmless})


def _folded(text: str) -> str:
    """Return one form for all spellings of a number or word."""
    try:
        return repr(float(text))
    except ValueError:
        return text.lower()


# --- unknown flags ------------------------------------------------------------------------------------------------

def report_unknown(written: str, name: str, known: Iterable[str], claims: Claims) -> None:
    """Report an unknown flag, with the accepted flag that is one typing mistake away."""
    useless = {*tables.REFUSED, *tables.RUN_ONLY, *tables.PARTLY_REFUSED, *tables.EXPERT_COMPANIONS}
    near = nearest_flag(name, (flag for flag in known if flag not in useless))
    if near:
        claims.broken.add(near)
    hint = f"; did you mean {near}?" if near else "; --help lists all flags."
    claims.problems.append(f"Unknown flag {written}{hint}")


def nearest_flag(name: str, known: Iterable[str]) -> str:
    """Return the known flag that differs from ``name`` only by typing mistakes or one missing word; else ""."""
    best, best_score = "", 0.0
    words = name[2:].lower().split("-")
    for flag in known:
        score = _likeness(words, flag[2:].lower().split("-"))
        if score > best_score:
            best, best_score = flag, score
    return best


def _likeness(words: list[str], others: list[str]) -> float:
    """Return how similar two flags are; above 0 only if one is probably a misspelling of the other."""
    import difflib

    if len(words) == len(others):
        ratios = [difflib.SequenceMatcher(None, word, other).ratio() for word, other in zip(words, others, strict=True)]
        return sum(ratios) / len(ratios) if min(ratios) >= 0.75 else 0.0
    longer, shorter = sorted((words, others), key=len, reverse=True)
    if len(longer) == len(shorter) + 1 and len(shorter) >= 2 and any(
            longer[:place] + longer[place + 1:] == shorter for place in range(len(longer))):
        return len(shorter) / len(longer)
    joined = difflib.SequenceMatcher(None, "".join(words), "".join(others)).ratio()
    return joined * 0.5 if joined >= 0.95 else 0.0
