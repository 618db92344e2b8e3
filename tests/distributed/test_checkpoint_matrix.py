"""Save in one layout, load in another: more than 30 pairs of layouts, precisions and micro-batch sizes.

Every pair must give the same full tensors bitwise, and the loss of the next step that the first layout would have had.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.helpers.configs import STYLES
from tests.helpers.spawn import run_ranks
from tests.helpers.training import copy_checkpoint, full_tensors, steps, train

FLAGS = f"{STYLES['eight_heads']} --num-layers 4 --hidden-size 32 " \
        "--global-batch-size 12 --lr 1e-2 --lr-decay-style constant --seq-length 48"

#: Seconds for a run of three steps. Half precision is slow on CPUs.
PATIENCE = 300
#: Name -> ranks and flags.
LAYOUTS: dict[str, tuple[int, str]] = {
    "one": (1, ""),
    "one, micro 3": (1, "--micro-batch-size 3"),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "tp2 sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 2"),
    "tp4": (4, "--tensor-model-parallel-size 4"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "pp2 vpp2": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "pp4": (4, "--pipeline-model-parallel-size 4 --micro-batch-size 2"),
    "ulysses2": (2, "--ulysses-size 2 --zero-stage 3"),
    "ring2": (2, "--ring-size 2 --zero-stage 1"),
    "dp2 zero0": (2, "--zero-stage 0"),
    "dp3 zero2": (3, "--zero-stage 2"),
    "dp4 fsdp2": (4, "--zero-stage 3 --fsdp-size 2"),
    "ulysses3 zero3": (3, "--ulysses-size 3 --zero-stage 3"),
    "tp2 ulysses2": (4, "--tensor-model-parallel-size 2 --ulysses-size 2 --zero-stage 2"),
    "bf16 tp2": (2, "--bf16 --tensor-model-parallel-size 2"),
    "fp16 dp2": (2, "--fp16 --initial-loss-scale 1024 --zero-stage 2"),
}
#: Pairs that run in the default suite; together they have each axis on one of the sides.
CHEAP = {("tp2", "pp2 vpp2"), ("ulysses2", "one, micro 3"), ("ring2", "dp2 zero0")}


def pairs() -> list[tuple[str, str]]:
    """Return for each layout two others that load what it saved, each layout loading two; the same ones every time."""
    order = list(LAYOUTS)
    random.Random(7).shuffle(order)
    size = len(order)
    others = [(order[i], order[(i + step) % size]) for step in (1, 5) for i in range(size)]
    return list(dict.fromkeys([*sorted(CHEAP), *others]))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Filled by ``source``: the directories of runs of three steps, with a checkpoint after step 2, by layout."""
    return {}


def source(sources: dict[str, Path], name: str, factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a layout's run. Its third step is what another layout must compute next."""
    if name not in sources:
        world, layout = LAYOUTS[name]
        directory = factory.mktemp("source")
        flags = f"{FLAGS} {layout} --save {directory} --save-interval 2 --exit-interval 3"
        assert run_ranks(train, world, flags, timeout=PATIENCE) == [""] * world
        sources[name] = directory
    return sources[name]


def load_and_step(flags: str, saved: str, copied: str, trained: str) -> tuple[bool, str]:
    """Save again what was loaded, then make the next step; whether padding is 0, and the error of the step."""
    padding_is_zero = copy_checkpoint(flags, f"{saved}/iter_0000002", copied)
    return padding_is_zero, train(f"{flags} --load {saved}/iter_0000002 --save {trained} --save-interval 9 "
                                  "--exit-interval 3")


@pytest.mark.parametrize("before, after", [
    pytest.param(*pair, marks=() if pair in CHEAP else pytest.mark.slow, id=" to ".join(pair)) for pair in pairs()])
def test_a_pair_of_layouts(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, tmp_path: Path,
                           before: str, after: str) -> None:
    saved = source(sources, before, tmp_path_factory)
    world, layout = LAYOUTS[after]
    copied, trained = tmp_path / "copied", tmp_path / "trained"
    outcomes = run_ranks(load_and_step, world, f"{FLAGS} {layout}", str(saved), str(copied), str(trained),
                         timeout=PATIENCE)
    assert outcomes == [(True, "")] * world
    expected, found = (full_tensors(place / "iter_0000002") for place in (saved, copied))
    assert found.keys() == expected.keys() and any(name.endswith("exp_avg_sq") for name in found)
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    (theirs,), (mine,) = steps(saved, "lm_loss", "first_sample")[2:], steps(trained, "lm_loss", "first_sample")
    half = {name.split()[0] for name in (before, after)} & {"bf16", "fp16"}
    assert mine[1] == theirs[1] and mine[0] == pytest.approx(theirs[0], rel=1e-2 if half else 1e-6)


def test_there_are_enough_pairs() -> None:
    found = pairs()
    assert len(set(found)) >= 30 and all(before != after for before, after in found)
    assert {before for before, _ in found} == {after for _, after in found} == set(LAYOUTS)
