"""Every layout of the matrix agrees with the plain model: fp64 gradients to 1e-9, two fp32 training steps to 1e-5.

The trainings use SGD with momentum, which shows a wrong scale of the gradients that Adam would hide, and Adam, which
shows wrong moments and signs. Gradients are clipped, so that a wrong norm changes the result. Several layouts share one
set of processes, because starting processes takes most of the time.

``--long N`` (``bash tests/run.sh parity-all``) tests N random layouts instead of the chosen ones.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from megatron_sp.config.schema import Parallel, Run
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.proof.data import END, batch
from megatron_sp.proof.reference import Step, documents_after, keyed_dropout, random_weights, reference_training
from megatron_sp.proof.steps import differences, step_in_layout, tensor_differences, train_in_layout
from tests.helpers.configs import Case
from tests.helpers.spawn import run_ranks
from tests.parity import matrix

GRADIENTS, TRAINING = 1e-9, 1e-5  # tolerances
STEPS = 2
#: How many layouts share a set of processes, by the number of ranks; 2 for all other numbers.
PACK = {1: 4, 2: 5, 4: 5, 8: 3}
#: A resolved run has the weight decay three times: its value now, at the start and at the end.
DECAY = dict(weight_decay=0.1, start_weight_decay=0.1, end_weight_decay=0.1)
OPTIMIZERS = {"sgd": dict(optimizer="sgd", sgd_momentum=0.9, clip_grad=0.5, **DECAY),
              # With epsilon 1e-5, rounding of gradients near 0 makes fp32 steps differ by 1.7e-5 (fp64: 1e-14).
              "adam": dict(optimizer="adam", adam_eps=1e-4, clip_grad=0.5, **DECAY)}
LEARNING_RATE = {"sgd": 0.1, "adam": 3e-3}

Expected = tuple[Step, dict[str, list[Step]]]


def with_optimizer(run: Run, name: str) -> Run:
    """Return the run with one of the ``OPTIMIZERS``."""
    return replace(run, optimizer=replace(run.optimizer, **OPTIMIZERS[name]),  # type: ignore[arg-type]
                   schedule=replace(run.schedule, lr=LEARNING_RATE[name]))


def expect(case: Case) -> Expected:
    """Return the plain model's step in fp64, and its training in fp32 with each optimizer."""
    run = Case("reference", 1, "", case.style, case.model, case.masked).run()
    weights = random_weights(run)
    batches = [batch(run, case.masked, seed) for seed in range(STEPS)]
    single = {name: weight.float() for name, weight in weights.items()}
    how = partial(keyed_dropout, run), documents_after(END)
    return (reference_training(weights, run, batches[:1], *how)[0],
            {name: reference_training(single, with_optimizer(run, name), batches, *how) for name in OPTIMIZERS})


def compare(cases: Sequence[Case], expected: Sequence[Expected]) -> dict[str, dict[str, float]]:
    """On a rank: return the differences of each layout that are beyond the tolerance."""
    wrong: dict[str, dict[str, float]] = {}
    meshes: dict[Parallel, ParallelMesh] = {}
    for case, (gradients, trained) in zip(cases, expected):
        run = case.run()
        if run.parallel not in meshes:
            meshes[run.parallel] = ParallelMesh.build(run.parallel)
        mesh = meshes[run.parallel]
        weights = random_weights(run)
        batches = [batch(run, case.masked, seed) for seed in range(STEPS)]
        step = step_in_layout(run, weights, *batches[0], mesh=mesh)
        found = {name: value for name, value in differences(step, gradients).items() if not value <= GRADIENTS}
        single = {name: weight.float() for name, weight in weights.items()}
        for name, steps in trained.items():
            ours = train_in_layout(with_optimizer(run, name), single, batches, mesh=mesh, details=False)
            numbers = {f"{name}, step {number}, {what}": abs(getattr(mine, what) / getattr(theirs, what) - 1)
                       for number, (mine, theirs) in enumerate(zip(ours, steps), start=1)
                       for what in ("loss", "grad_norm")}
            after = tensor_differences(ours[-1].weights, steps[-1].weights)
            numbers |= {f"{name}, {weight}": value for weight, value in after.items()}
            found |= {what: value for what, value in numbers.items() if not value <= TRAINING}
        if found:
            wrong[f"{case.name} ({' '.join(case.flags())})"] = found
    return wrong


def packs(cases: Sequence[Case]) -> list[list[Case]]:
    """Divide the cases into groups that share processes."""
    found = []
    for world in sorted({case.world for case in cases}):
        same = [case for case in cases if case.world == world]
        found += [same[start:start + PACK.get(world, 2)] for start in range(0, len(same), PACK.get(world, 2))]
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give ``test_matrix`` the chosen layouts, or with ``--long N`` so many random ones."""
    if "pack" not in metafunc.fixturenames:
        return
    count = metafunc.config.getoption("--long")
    cases = matrix.sample(count, metafunc.config.getoption("--long-seed")) if count else \
        [*(matrix.case(layout) for layout in matrix.chosen()), *matrix.chosen_of_size()]
    found = packs(cases)
    metafunc.parametrize("pack", found, ids=[f"{pack[0].world} ranks, {index}" for index, pack in enumerate(found)])


@pytest.mark.timeout(1000)
def test_matrix(pack: list[Case]) -> None:
    for rank, wrong in enumerate(run_ranks(compare, pack[0].world, pack, [expect(case) for case in pack],
                                           timeout=900)):  # twelve ranks on two busy cores
        assert not wrong, f"rank {rank}"


def test_the_matrix_is_what_it_should_be() -> None:
    layouts = matrix.chosen()
    assert len(set(layouts)) >= 48
    worlds = [matrix.world_size(layout) for layout in layouts]
    assert worlds.count(8) >= 8 and sum(world <= 4 for world in worlds) > len(worlds) / 2
    for index, (axis, values) in enumerate(matrix.AXES.items()):
        for value in values:
            assert sum(layout[index] == value for layout in layouts) >= 4, f"{axis} {value} is hardly there"
    met = {pair for layout in layouts for pair in matrix.pairs(layout)}
    possible = {pair for layout in map(matrix.layout_of, range(3000)) for pair in matrix.pairs(layout)}
    assert len(possible - met) < 0.03 * len(possible), possible - met


def test_groups_of_all_sizes_are_drawn() -> None:
    """A long run has every group size on every axis; the default run has sizes that are no powers of two."""
    for count in (100, 300):
        drawn = [case.name.split(",")[0] for case in matrix.sample(count, seed=1)]
        assert len(drawn) == count
        for axis in ("tp", "pp", "ulysses", "ring", "dp"):
            assert all(f"{axis} {size}" in drawn for size in (3, 4, 5, 6, 7, 8, 9, 10, 12)), axis
    assert {3, 5, 6, 7} <= {case.world for case in matrix.chosen_of_size()}
    generator = random.Random(0)
    for axis in matrix.SIZED_AXES:
        for size in matrix.SIZES:
            assert matrix.of_size(axis, size, generator).run().parallel.world_size == size


def test_different_numbers_are_seen() -> None:
    """The comparison finds one element that differs by a little more than the tolerance."""
    ours, theirs = ({"weight": torch.ones(10, dtype=torch.float64)} for _ in range(2))
    ours["weight"][3] += 2e-9
    assert tensor_differences(ours, theirs)["weight"] == pytest.approx(2e-9)
