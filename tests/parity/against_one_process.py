"""Compare a gradient step of several layouts with the plain model; for the files of this directory."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_sp.proof.data import batch
from megatron_sp.proof.reference import keyed_dropout, random_weights
from megatron_sp.proof.steps import differences, reference_step, step_in_layout
from tests.helpers.configs import Case
from tests.helpers.spawn import run_ranks

TOLERANCE = 1e-9


def worst(some: Sequence[Case]) -> dict[str, float]:
    """On a rank: return the largest difference of loss, norm and gradients of each case from the plain model."""
    found: dict[str, float] = {}
    for case in some:
        run = case.run()
        weights, data = random_weights(run), batch(run, case.masked)
        expected = reference_step(run, weights, *data, keyed_dropout(run))
        found[case.name] = max(differences(step_in_layout(run, weights, *data), expected).values())
    return found


def check_gradients(world: int, some: Sequence[Case]) -> None:
    """Assert that every rank finds every case equal to the plain model, in fp64."""
    for rank, found in enumerate(run_ranks(worst, world, some, timeout=280)):
        assert len(found) == len(some)
        assert not {name: value for name, value in found.items() if not value <= TOLERANCE}, rank
