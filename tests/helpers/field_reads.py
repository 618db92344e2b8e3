"""Find the configuration fields that the code reads, in its source text."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from megatron_sp.config.schema import Run

SECTIONS = {field.name for field in dataclasses.fields(Run)}
#: The section that each class stands for, by the class name in annotations.
CLASSES = {str(field.type): field.name for field in dataclasses.fields(Run)}


def reads(path: Path) -> set[str]:
    """Return ``section.field`` for every field of a section of the configuration that a module reads.

    An expression is taken for a section if it is ``anything.section``, a name to which such an expression was assigned,
    or a parameter annotated with the section's class.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    names = _names_of_sections(tree)
    return {f"{section}.{node.attr}" for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
            for section in _sections_of(node.value, names)}


def _names_of_sections(tree: ast.AST) -> dict[str, set[str]]:
    """Return the sections that each name of a module stands for, which may differ between its functions."""
    names: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            section = CLASSES.get(ast.unparse(node.annotation))
            if section:
                names.setdefault(node.arg, set()).add(section)
    before = -1  # repeat until nothing changes, since a name may be assigned to another name
    while before != (before := sum(map(len, names.values()))):
        for target, value in _assignments(tree):
            for section in _sections_of(value, names):
                names.setdefault(ast.unparse(target), set()).add(section)
    return names


def _assignments(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from zip(target.elts, node.value.elts)
                else:
                    yield target, node.value


def _sections_of(node: ast.expr, names: dict[str, set[str]]) -> set[str]:
    found = set(names.get(ast.unparse(node), ()))
    if isinstance(node, ast.Attribute) and node.attr in SECTIONS:
        found.add(node.attr)
    return found
