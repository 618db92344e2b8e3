"""Checkpoints across layouts, exact resume, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from megatron_sp.checkpoint import files
from tests.helpers.configs import STYLES
from tests.helpers.spawn import run_ranks
from tests.helpers.training import copy_checkpoint, full_tensors, steps, train

LLAMA = STYLES["llama"].replace("--num-query-groups", "--num-key-value-heads")

GPT2 = STYLES["gpt2"]      # tied embeddings, learned positions, biases

#: (ranks, layout), each loads what the one before it saved.
LAYOUTS = [
    (2, "--tensor-model-parallel-size 2"),
    (2, "--ulysses-size 2 --zero-stage 3"),
    (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    (2, "--zero-stage 1"),
    (4, "--tensor-model-parallel-size 2 --ulysses-size 2 --zero-stage 2"),
    (4, "--tensor-model-parallel-size 4"),
    (4, "--ulysses-size 2 --zero-stage 3 --fsdp-size 2"),
    (2, "--zero-stage 0"),
    (3, "--zero-stage 3 --global-batch-size 3"),
    (4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"),
    (1, ""),
]
TIED_LAYOUTS = [
    (2, "--pipeline-model-parallel-size 2"),
    (4, "--pipeline-model-parallel-size 2 --zero-stage 1"),
    (2, "--tensor-model-parallel-size 2 --zero-stage 3"),
    (2, "--zero-stage 3"),
    (1, ""),
]

SCHEDULE = "--hidden-dropout 0.1 --lr 1e-2 --min-lr 1e-4 --lr-warmup-iters 2 --lr-decay-style cosine --save-interval 4"


def name_of(layout: str) -> str:
    return layout.replace("--", "").replace(" ", "_") or "one"


def four_steps(style: str, directory: Path) -> Path:
    """Train four steps on one process."""
    assert run_ranks(train, 1, f"{style} {SCHEDULE} --save {directory} --exit-interval 4") == [""]
    return directory


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return four_steps(LLAMA, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def tied_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return four_steps(GPT2, tmp_path_factory.mktemp("gpt2"))


@pytest.mark.parametrize("style, name, layouts", [
    (LLAMA, "source", LAYOUTS), (GPT2, "tied_source", TIED_LAYOUTS)], ids=["llama", "tied"])
def test_any_layout_loads_any_layout(request: pytest.FixtureRequest, tmp_path: Path, style: str, name: str,
                                     layouts: list[tuple[int, str]]) -> None:
    """Weights, moments and steps survive a chain of layouts bitwise; padding is zero in each."""
    source = request.getfixturevalue(name)
    expected = full_tensors(source / "iter_0000004")
    assert expected["model.embedding.word.weight"].shape[0] == 97
    assert expected["optimizer.embedding.word.weight.exp_avg"].shape[0] == 97
    assert not any(tensor.isnan().any() for tensor in expected.values())
    assert ("model.output.weight" in expected) == (style == LLAMA)
    before = source
    for world, layout in layouts:
        target = tmp_path / name_of(layout)
        assert all(run_ranks(copy_checkpoint, world, f"{style} {layout}", str(before), str(target))), layout
        found = full_tensors(target / "iter_0000004")
        assert found.keys() == expected.keys(), layout
        assert [name for name in found if not torch.equal(found[name], expected[name])] == [], layout
        before = target


@pytest.mark.parametrize("style, name, layouts", [
    (LLAMA, "source", [LAYOUTS[0], LAYOUTS[4], LAYOUTS[6]]), (GPT2, "tied_source", TIED_LAYOUTS[:1])],
    ids=["llama", "tied"])
def test_training_goes_on_in_another_layout(request: pytest.FixtureRequest, tmp_path: Path, style: str, name: str,
                                            layouts: list[tuple[int, str]]) -> None:
    """Steps 5 to 8 are those of one process, whatever the layout: loss and norm to rounding, the rest exactly."""
    source = request.getfixturevalue(name)

    def finish(world: int, layout: str) -> Path:
        directory = tmp_path / name_of(layout)
        shutil.copytree(source, directory)
        flags = f"{style} {SCHEDULE} {layout} --load {directory} --save {directory}"
        assert run_ranks(train, world, flags) == [""] * world
        return directory

    straight = finish(1, "")
    for world, layout in layouts:
        there = finish(world, layout)
        exact = ("iteration", "learning_rate", "first_sample", "last_sample", "consumed_tokens")
        assert steps(there, *exact) == steps(straight, *exact)
        for found, expected in zip(steps(there, "lm_loss", "grad_norm"), steps(straight, "lm_loss", "grad_norm")):
            assert found == pytest.approx(expected, rel=2e-5), layout


@pytest.mark.parametrize("world, layout", [
    (1, ""), (2, "--ulysses-size 2"), (2, "--tensor-model-parallel-size 2"), (2, "--zero-stage 3 --micro-batch-size 2"),
    (2, "--pipeline-model-parallel-size 2")])
def test_eight_steps_are_four_and_four_bitwise(tmp_path: Path, world: int, layout: str) -> None:
    style = f"{LLAMA} {layout} {SCHEDULE} --weight-decay-incr-style linear --weight-decay 0.1 " \
            "--start-weight-decay 0.0 --end-weight-decay 0.2 --eval-iters 1 --eval-interval 3"
    straight, halves = tmp_path / "straight", tmp_path / "halves"
    assert run_ranks(train, world, f"{style} --save {straight}") == [""] * world
    assert run_ranks(train, world, f"{style} --save {halves} --exit-interval 4") == [""] * world
    assert run_ranks(train, world, f"{style} --save {halves} --load {halves}") == [""] * world
    names = ("iteration", "lm_loss", "grad_norm", "learning_rate", "first_sample", "last_sample", "consumed_tokens")
    assert len(steps(straight, *names)) == 8
    assert steps(halves, *names) == steps(straight, *names)
    ends = [full_tensors(directory / "iter_0000008") for directory in (straight, halves)]
    assert [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])] == []


def load_error(directory: Path, flags: str, world: int = 1) -> str:
    """Return the error with which every rank refuses to resume from a directory."""
    errors = run_ranks(train, world, f"{flags} --load {directory}")
    assert len(set(errors)) == 1, errors
    return errors[0]


def test_damage_and_mismatch_are_refused(source: Path, tmp_path: Path) -> None:
    flags = f"{LLAMA} {SCHEDULE}"
    directory = tmp_path / "copy"

    def fresh() -> Path:
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(source, directory)
        return directory / "iter_0000004"

    for name in ("__0_0.distcp", ".metadata", "state.json"):
        path = fresh() / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes(data))
        message = load_error(directory, flags, world=2)
        assert message.startswith("CheckpointError") and name in message, message
    for name in ("__0_0.distcp", "manifest.json"):
        (fresh() / name).unlink()
        message = load_error(directory, flags)
        assert message.startswith("CheckpointError") and "iter_0000004" in message and name in message, message
    fresh()
    message = load_error(directory, flags.replace("--num-layers 2", "--num-layers 3"))
    assert "--num-layers is 3 here and 2 in the checkpoint" in message
    message = load_error(directory, f"{flags} --optimizer sgd")
    assert "--optimizer" in message
    message = load_error(directory, flags.replace("--lr 1e-2", "--lr 2e-2"))
    assert "(--lr 0.02) and 0.01 in the checkpoint" in message and "--override-opt_param-scheduler" in message
    message = load_error(directory, f"{flags} --ckpt-step 3")
    assert "--ckpt-step 3" in message and "complete checkpoints here: 4" in message
    message = load_error(tmp_path / "nothing", f"{flags} --exit-on-missing-checkpoint")
    assert "--exit-on-missing-checkpoint" in message


def test_what_the_manifest_cannot_see_is_found_too(source: Path, tmp_path: Path) -> None:
    """A checkpoint whose files are sound but whose state lies about the model."""
    directory = tmp_path / "copy"
    shutil.copytree(source, directory)
    path = directory / "iter_0000004"
    state = json.loads((path / "state.json").read_text())
    state["config"]["model"] |= {"num_layers": 3, "ffn_hidden_size": 192}
    (path / "state.json").write_text(json.dumps(state))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["state.json"] = files.manifest_entry(path / "state.json")
    (path / "manifest.json").write_text(json.dumps(manifest))
    message = load_error(directory, f"{LLAMA} {SCHEDULE} --ffn-hidden-size 192".replace(
        "--num-layers 2", "--num-layers 3"))
    assert "model.layers.2" in message and "is not in the checkpoint" in message


def test_schedule_flags_on_resume(source: Path, tmp_path: Path) -> None:
    other = f"{LLAMA} {SCHEDULE}".replace("--lr 1e-2", "--lr 2e-2")
    rates = {}
    for flag in ("--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"):
        directory = tmp_path / flag
        shutil.copytree(source, directory)
        assert run_ranks(train, 1, f"{other} {flag} --load {directory} --save {directory} --exit-interval 5") == [""]
        rates[flag] = steps(directory, "learning_rate")[-1][0]
    assert rates["--override-opt_param-scheduler"] > 1.5 * rates["--use-checkpoint-opt_param-scheduler"]
    assert rates["--use-checkpoint-opt_param-scheduler"] < 1e-2
