"""The command-line options that the schema declares, read off the fields of its dataclasses."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from megatron_sp.config.cli.values import parse_choice, parse_float, parse_int, parse_words, strip_quotes
from megatron_sp.config.schema import Run

#: Values of other frameworks (in lower case with hyphens) by field, each with the choice of the schema that it means.
#: For example, "rotary" for "model.position_embedding_type" means "rope".
SYNONYMS: dict[str, dict[str, str]] = {
    "model.position_embedding_type": {"rotary": "rope", "learned": "learned_absolute", "absolute": "learned_absolute"},
    "optimizer.optimizer": {"fusedadam": "adam", "fusedadamw": "adamw", "cpu-adam": "adam", "torch-adam": "adam",
                            "apex-adam": "adam"},
    "memory.recompute_method": {"chunk": "block"},
}

#: Choices of other frameworks that are not supported, by field, each with the reason and a cure. For example, "alibi"
#: of "model.position_embedding_type" has the entry "not supported here; use rope, learned_absolute or none".
REFUSED_CHOICES: dict[str, dict[str, str]] = {
    "model.position_embedding_type": dict.fromkeys(
        ("alibi", "mrope", "relative", "chunked_rope", "longrope"),
        "not supported here; use rope, learned_absolute or none"),
    "model.rope_scaling_type": {
        "llama3": "Llama-3.1's rule; say --use-rope-scaling instead",
        "linear": "linear scaling; say --rotary-seq-len-interpolation-factor F instead",
        "longrope": "not supported here; use ntk or yarn", "dynamic": "not supported here; use ntk or yarn"},
    "optimizer.optimizer": dict.fromkeys(
        ("muon", "dist_muon", "adaptive_muon", "lion", "soap"), "not supported here; use adam or sgd"),
    "data.dataloader_type": {"external": "not supported here; use single or cyclic"},
}


@dataclass(frozen=True)
class Option:
    """One field of the schema as a command-line option.

    Attributes:
        key: ``section.field``.
        names: spellings with hyphens, the one that messages use first.
        kind: type of the value: bool, int, float, str, ints or words (a tuple of str).
        choices: allowed values of a str.
        nargs: number of values, "?" or "*".
        off: the switch that turns a bool off, or "".
    """

    key: str
    names: tuple[str, ...]
    kind: str
    default: Any
    help: str
    choices: tuple[str, ...]
    nargs: int | str
    off: str
    metavar: str

    @property
    def flag(self) -> str:
        """Return the spelling that help and messages use."""
        return self.off or self.names[0]

    def convert(self, texts: list[str]) -> Any:
        """Return the field's value from the arguments after the flag.

        Raises:
            ValueError: with a sentence fragment saying what is wrong.
        """
        if self.kind == "bool":
            return True
        words = parse_words(texts)
        if self.nargs == "*" and not words:
            raise ValueError("no value is given, perhaps an unset shell variable; give one, or leave the flag out")
        if self.kind == "words":
            return words
        if self.kind == "ints":
            if isinstance(self.nargs, int) and len(words) != self.nargs:
                raise ValueError(f"{self.nargs} values are needed, {len(words)} given")
            return tuple(parse_int(word) for word in words)
        if self.nargs == "?" and not texts:     # a flag for a share, given without a number, means all
            return 1.0 if self.kind == "float" else self.default
        text = strip_quotes(texts[0])
        if not text and self.kind == "str":
            raise ValueError("the value is empty, perhaps an unset shell variable; give one, or leave the flag out")
        if self.kind == "int":
            return parse_int(text)
        if self.kind == "float":
            return parse_float(text)
        if self.choices:
            reason = REFUSED_CHOICES.get(self.key, {}).get(text.lower())
            if reason:
                raise ValueError(f"{text!r} is {reason}")
            return parse_choice(text, self.choices, SYNONYMS.get(self.key))
        return text


def normalise(name: str) -> str:
    """Return the one form of all spellings of a flag: underscores become hyphens."""
    return "--" + name[2:].replace("_", "-")


def sections() -> dict[str, type]:
    """Return the dataclass of each section by name, in the schema's order."""
    run = Run()
    return {field.name: type(getattr(run, field.name)) for field in dataclasses.fields(Run)}


def schema_options() -> dict[str, Option]:
    """Return the option of every field that is a flag, by ``section.field``, in the schema's order."""
    found: dict[str, Option] = {}
    for section, cls in sections().items():
        for field in dataclasses.fields(cls):
            if field.metadata.get("flag"):
                option = _option(section, field)
                found[option.key] = option
    return found


def _option(section: str, field: dataclasses.Field[Any]) -> Option:
    meta = field.metadata
    kind = type(field.default).__name__
    if kind == "tuple":
        kind = "ints" if "int" in str(field.type) else "words"
    names = meta["names"] or ("--" + field.name,)
    nargs = 0 if kind == "bool" else meta["nargs"] or 1
    return Option(key=f"{section}.{field.name}", names=tuple(normalise(name) for name in names), kind=kind,
                  default=field.default, help=meta["help"], choices=meta["choices"], nargs=nargs,
                  off=normalise(meta["off"]) if meta["off"] else "", metavar=meta["metavar"])


def flag_names() -> dict[str, str]:
    """Return the flag that messages name, by ``section.field``."""
    return {key: option.flag for key, option in schema_options().items()}
