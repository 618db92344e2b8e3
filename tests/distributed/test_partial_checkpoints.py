"""Checkpoints of which only the weights are loaded or saved: ``--finetune``, ``--no-load-optim`` and others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.configs import STYLES
from tests.helpers.spawn import run_ranks
from tests.helpers.training import full_tensors, steps, train

LLAMA = STYLES["llama"].replace("--num-query-groups", "--num-key-value-heads")
FLAGS = f"{LLAMA} --lr 1e-2 --lr-decay-style constant --save-interval 1"
#: So small a rate that a step leaves every weight as it is.
STILL = FLAGS.replace("--lr 1e-2", "--lr 1e-40")
BETA1 = 0.9


def errors_of(world: int, lines: list[str]) -> list[str]:
    """Train with each command line in turn; the text of each user's mistake, which all ranks share."""
    found = [set(run_ranks(train, world, line)) for line in lines]
    assert all(len(texts) == 1 for texts in found)
    return [texts.pop() for texts in found]


def state(directory: Path, iteration: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and plain state of one checkpoint."""
    path = directory / f"iter_{iteration:07d}"
    return full_tensors(path), json.loads((path / "state.json").read_text())


def weights(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps, each saved; then one more with the optimizer's state, as the reference of step 3."""
    directory = tmp_path_factory.mktemp("source")
    assert run_ranks(train, 1, f"{FLAGS} --save {directory} --exit-interval 2") == [""]
    return directory


def test_weights_only(source: Path, tmp_path: Path) -> None:
    whole, fresh, tuned, pretrained, bare = (tmp_path / name for name in (
        "whole", "fresh", "tuned", "pretrained", "bare"))
    other = "--seed 5 --zero-stage 3 --exit-interval 1"
    lines = [f"{FLAGS} --load {source} --save {whole} --exit-interval 3",
             f"{FLAGS} --load {source} --no-load-optim --no-save-optim --save {fresh} --exit-interval 3",
             f"{STILL} --load {source} --finetune --save {tuned} {other}",
             f"{STILL} --load {tmp_path}/none --pretrained-checkpoint {source} --save {pretrained} {other}",
             f"{FLAGS} --load {fresh} --save {bare} --exit-interval 4",
             f"{FLAGS} --load {fresh} --no-load-optim --save {bare} --exit-interval 4",
             f"{FLAGS} --pretrained-checkpoint {tmp_path}/none --save {bare}2"]
    errors = errors_of(2, lines)
    assert errors[:4] == [""] * 4 and errors[5] == ""
    assert "was saved with --no-save-optim" in errors[4] and "--no-load-optim" in errors[4]
    assert "--pretrained-checkpoint" in errors[6] and "holds no checkpoint" in errors[6]
    saved, _ = state(source, 2)
    for directory in (tuned, pretrained):
        tensors, plain = state(directory, 1)
        assert (plain["iteration"], plain["train"]["consumed_samples"]) == (1, 4)
        for name, tensor in weights(saved).items():
            assert torch.equal(tensors[name], tensor), name
    assert [step[0] for step in steps(fresh, "iteration")] == [3]
    assert steps(fresh, "lm_loss")[0] == pytest.approx(steps(whole, "lm_loss")[0], rel=1e-5)
    assert not any(name for name in state(fresh, 3)[0] if not name.startswith("model."))
    assert state(bare, 4)[1]["iteration"] == 4


def test_the_optimizer_that_is_not_loaded_starts_afresh(source: Path, tmp_path: Path) -> None:
    """Adam's mean after step 3 is b m + (1 - b) g with the state of step 2, and (1 - b) g without it."""
    lines = [f"{FLAGS} --load {source} {flag} --save {tmp_path}/{name} --exit-interval 3"
             for name, flag in (("whole", ""), ("fresh", "--no-load-optim"))]
    assert errors_of(1, lines) == ["", ""]
    before, whole, fresh = (state(directory, iteration)[0] for directory, iteration in (
        (source, 2), (tmp_path / "whole", 3), (tmp_path / "fresh", 3)))
    means = [name for name in before if name.endswith("exp_avg")]
    assert means
    for name in means:
        torch.testing.assert_close(whole[name] - BETA1 * before[name], fresh[name], rtol=1e-5, atol=1e-8)
