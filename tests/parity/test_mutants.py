"""The proof finds faults of one line in the reader, trainer, exchanges, heads and dropout keys (``mutants.py``)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.spawn import run_ranks
from tests.parity.mutants import MODEL, MUTANTS, PACKAGE, QUICK, Mutant, prove_mutant

#: The layouts of all mutants. Without a fault they must pass, so that a mutant fails because of its fault.
LAYOUTS = sorted({(mutant.world, mutant.flags) for mutant in MUTANTS.values()})


def found_wrong(mutant: Mutant, directory: Path) -> list[str]:
    """Return the names of the values that the proof finds wrong, or the error message if the mutant does not run."""
    mutant.write(directory)
    flags = [*MODEL.split(), *mutant.flags.split()]
    try:
        return run_ranks(prove_mutant, mutant.world, str(directory), flags, mutant.world, timeout=120)[0]
    except AssertionError as error:
        assert not mutant.seen_in, error
        return [str(error)]


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
                                  for name in MUTANTS])
def test_a_fault_is_seen(name: str, tmp_path: Path) -> None:
    wrong = found_wrong(MUTANTS[name], tmp_path)
    assert any(MUTANTS[name].seen_in in value for value in wrong), wrong


@pytest.mark.slow
@pytest.mark.parametrize(("world", "flags"), LAYOUTS, ids=[flags or "one process" for _, flags in LAYOUTS])
def test_the_right_package_passes(world: int, flags: str, tmp_path: Path) -> None:
    unchanged = Mutant("errors.py", "class UserError", "class UserError", world, flags, "")
    assert found_wrong(replace(unchanged, seen_in="-"), tmp_path) == []


def test_all_mutants_change_a_line_that_exists() -> None:
    for name, mutant in MUTANTS.items():
        assert (PACKAGE / mutant.file).read_text().count(mutant.right) == 1, name
