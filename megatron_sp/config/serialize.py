"""The configuration as plain JSON and back."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_sp.config.cli.options import sections
from megatron_sp.config.schema import Run


def to_dict(run: Run) -> dict[str, Any]:
    """Return the sections of a run as dictionaries of plain JSON values; tuples become lists."""
    return {section: {field.name: _plain(getattr(getattr(run, section), field.name))
                      for field in dataclasses.fields(cls)} for section, cls in sections().items()}


def from_dict(stored: dict[str, Any]) -> Run:
    """Return the run that ``to_dict`` wrote.

    Fields that did not exist when it was written get their defaults; fields that no longer exist
    are dropped.
    """
    chosen = {}
    for section, cls in sections().items():
        known = {field.name: field for field in dataclasses.fields(cls)}
        values = stored.get(section, {})
        chosen[section] = cls(**{name: _typed(value, known[name].default) for name, value in values.items()
                                 if name in known})
    return Run(**chosen)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _typed(value: Any, default: Any) -> Any:
    if isinstance(default, tuple):
        return tuple(value)
    if isinstance(default, float):
        return float(value)
    return value
