"""Every memory technique, alone and in pairs, computes the plain model's gradients, in fp64 to 1e-9."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.proof.data import batch
from megatron_sp.proof.reference import Step, keyed_dropout, random_weights
from megatron_sp.proof.steps import differences, reference_step, step_in_layout
from tests.helpers.configs import Case
from tests.helpers.spawn import run_ranks

TOLERANCE = 1e-9
DROPOUT = "--hidden-dropout 0.1"
TECHNIQUES = {
    "tiled loss": "--loss-tile-size 24",
    "tiled mlp": "--mlp-tile-size 24",
    "head groups": "--attention-head-groups 2",
    "recompute": "--recompute-granularity full",
    "selective": "--recompute-granularity selective",
    "units of 2": "--recompute-granularity full --recompute-num-layers 2",
    "first layer": "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    "offload": "--recompute-granularity full --offload-activations",
    "offload optimizer": "--offload-optimizer",
    "half offload": "--recompute-granularity selective --offload-activations 0.5",
}
LAYOUTS = {
    "one process": (1, ""),
    "ulysses 2": (2, "--ulysses-size 2"),
    "tp 2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp 2": (2, "--pipeline-model-parallel-size 2"),
    "zero 3": (2, "--zero-stage 3"),
    "ring 2": (2, "--ring-size 2"),
}


def combinations() -> list[tuple[str, str]]:
    """Return names and flags of every technique, and of every pair of techniques that set different flags."""
    singles = list(TECHNIQUES.items())
    pairs = [(f"{a}, {b}", f"{x} {y}") for (a, x), (b, y) in itertools.combinations(singles, 2)
             if not {word for word in x.split() if word[:2] == "--"} & set(y.split())]
    return singles + pairs


def cases(world: int, layout: str) -> list[Case]:
    """Return all combinations in one layout; every second one has GPT-2's biases, tied embeddings and LayerNorm."""
    def style(index: int, flags: str) -> str:
        untied_only = "offload-optimizer" in flags and "pipeline" in layout
        return "llama" if untied_only else ("llama", "gpt2")[index % 2]

    return [Case(name, world, f"{layout} {flags}", style(index, flags), DROPOUT, masked="ragged")
            for index, (name, flags) in enumerate(combinations())]


def compare(some: Sequence[Case], expected: dict[str, Step]) -> dict[str, dict[str, float]]:
    """Run on one rank; return what differs by more than the tolerance, by combination."""
    found, mesh = {}, ParallelMesh.build(some[0].run().parallel)
    for case in some:
        run = case.run()
        step = step_in_layout(run, random_weights(run), *batch(run, case.masked), mesh=mesh)
        wrong = {name: value for name, value in differences(step, expected[case.style]).items()
                 if not value <= TOLERANCE}
        if wrong:
            found[case.name] = wrong
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, Step]:
    steps = {}
    for style in ("llama", "gpt2"):
        run = Case("reference", 1, "", style, DROPOUT, masked="ragged").run()
        steps[style] = reference_step(run, random_weights(run), *batch(run, "ragged"), keyed_dropout(run))
    return steps


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(layout: str, expected: dict[str, Step]) -> None:
    world, flags = LAYOUTS[layout]
    for wrong in run_ranks(compare, world, cases(world, flags), expected, timeout=120):
        assert not wrong
