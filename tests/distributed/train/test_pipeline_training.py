"""Training under a pipeline or a ring as a whole: steps, evaluation, checkpoints, failures, sampling."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_sp.parallel.pipeline import PipelineRunner
from megatron_sp.train.report.metrics_file import read_metrics
from tests.helpers.configs import STYLES, tiny_run
from tests.helpers.spawn import run_ranks
from tests.helpers.training import copy_checkpoint, full_tensors, steps, train
from tests.integration.programs import ROOT, run_program

PP2 = "--pipeline-model-parallel-size 2"
TIED = f"{STYLES['gpt2']} --num-layers 4"
UNTIED = f"{STYLES['llama']} --num-layers 4"
#: ranks, flags
LAYOUTS = {
    "pp 2": (2, PP2),
    "pp 2, zbv": (2, f"{PP2} --pipeline-schedule zbv"),
    "pp 4": (4, "--pipeline-model-parallel-size 4"),
    "pp 2, two stages, dp 2, zero 2": (4, f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --zero-stage 2"),
    "pp 2, tp 2": (4, f"{PP2} --tensor-model-parallel-size 2 --sequence-parallel"),
    "ring 2, ulysses 2, zero 3": (4, "--ring-size 2 --ulysses-size 2 --zero-stage 3"),
}


@pytest.mark.parametrize("model", [TIED, UNTIED], ids=["tied", "untied"])
def test_training_and_evaluation_equal_one_process(model: str, tmp_path: Path) -> None:
    common = f"{model} --lr 1e-3 --train-iters 4 --eval-iters 2 --eval-interval 2 --save-interval 4"
    found = {}
    for name, (world, layout) in {"one process": (1, ""), **LAYOUTS}.items():
        found[name] = tmp_path / name.replace(" ", "")
        assert run_ranks(train, world, f"{common} {layout} --save {found[name]}") == [""] * world, name
    expected = steps(found["one process"], "lm_loss", "grad_norm")
    losses = [row["valid_loss"] for row in read_metrics(found["one process"] / "metrics.jsonl") if "valid_loss" in row]
    weights = full_tensors(found["one process"] / "iter_0000004")
    assert len(losses) == 2
    for name, directory in found.items():
        for ours, theirs in zip(steps(directory, "lm_loss", "grad_norm"), expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5), name
        rows = [row["valid_loss"] for row in read_metrics(directory / "metrics.jsonl") if "valid_loss" in row]
        assert rows == pytest.approx(losses, rel=1e-5), name
        saved = full_tensors(directory / "iter_0000004")
        assert saved.keys() == weights.keys(), name
        assert sum(tensor.numel() for tensor in saved.values()) == sum(tensor.numel() for tensor in weights.values())


@pytest.mark.parametrize("model", [TIED, UNTIED], ids=["tied", "untied"])
def test_checkpoints_move_between_pipelines(model: str, tmp_path: Path) -> None:
    """Saving and loading through every layout keeps weights and moments bitwise, and training continues equally."""
    common = f"{model} --lr 1e-2 --save-interval 3"
    assert run_ranks(train, 2, f"{common} {PP2} --train-iters 3 --lr-decay-iters 6 --save {tmp_path / 'first'}"
                     ) == [""] * 2
    source = tmp_path / "first"
    original = full_tensors(source / "iter_0000003")
    for number, (world, layout) in enumerate([*LAYOUTS.values(), (1, "")]):
        target = tmp_path / f"copy{number}"
        assert all(run_ranks(copy_checkpoint, world, f"{common} {layout}", str(source), str(target)))
        copy = full_tensors(target / "iter_0000003")
        assert copy.keys() == original.keys() and all(torch.equal(copy[name], original[name]) for name in copy), layout
        source = target
    ends = {}
    for name, (world, layout) in {"one process": (1, ""), "pp 2": LAYOUTS["pp 2"], "zbv": LAYOUTS["pp 2, zbv"]}.items():
        directory = tmp_path / name.replace(" ", "")
        flags = f"{common} {layout} --train-iters 6 --lr-decay-iters 6 --load {tmp_path / 'first'} --save {directory}"
        assert run_ranks(train, world, flags) == [""] * world
        ends[name] = steps(directory, "iteration", "lm_loss", "grad_norm")
    for name, rows in ends.items():
        assert [row[0] for row in rows] == [4, 5, 6]
        for ours, theirs in zip(rows, ends["one process"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5), name


def train_with_a_nan(flags: str, call: int) -> str:
    """Train with one call of the loss function (counted from 0) returning NaN. Only the last stage calls it."""
    original, count = PipelineRunner.__init__, [0]

    def with_spoiled_loss(self: PipelineRunner, stages: Any, schedule: str, mesh: Any, loss: Any) -> None:
        def spoiled(*arguments: torch.Tensor) -> torch.Tensor:
            count[0] += 1
            return loss(*arguments) * (float("nan") if count[0] - 1 == call else 1.0)

        original(self, stages, schedule, mesh, spoiled)

    PipelineRunner.__init__ = with_spoiled_loss  # type: ignore[method-assign]
    return train(flags)


def test_a_nan_on_the_last_stage_stops_all(tmp_path: Path) -> None:
    flags = f"{UNTIED} {PP2} --save {tmp_path} --save-interval 1"
    # The last stage computes 4 losses a step, after one trial call. So call 9 belongs to step 3.
    errors = run_ranks(train_with_a_nan, 2, flags, 9)
    assert errors[0] == errors[1]
    for words in ("TrainingError", "iteration 3", "not finite on rank 1 (microbatch"):
        assert words in errors[0]


def test_text_from_a_pipeline_checkpoint_equals_text_from_one_process(tmp_path: Path) -> None:
    texts = []
    for world, layout in ((2, PP2), (1, "")):
        directory = tmp_path / f"{world}"
        flags = f"{TIED} {layout} --lr 1e-2 --train-iters 4 --save-interval 4 --save {directory}"
        assert run_ranks(train, world, flags) == [""] * world
        done = run_program(sys.executable, ROOT / "tools" / "generate_text.py", "--load", directory, "--prompt",
                           "1 2 3", "--max-new-tokens", 12, "--greedy")
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
    assert texts[0] == texts[1] and len(texts[0].split()) > 3


def number_of_parameters(flags: str) -> tuple[int, list[str]]:
    """Return the number of elements of this rank's own parameters as full tensors, and this rank's layers."""
    from megatron_sp.model.build import build_model
    from megatron_sp.parallel.mesh import ParallelMesh
    from megatron_sp.parallel.pipeline import own_parameters

    run = tiny_run(flags.split(), torch.distributed.get_world_size())
    model = build_model(run, ParallelMesh.build(run.parallel))
    names = [name for name, _ in own_parameters(model)]
    return sum(math.prod(p.shape) for _, p in own_parameters(model)), names


@pytest.mark.parametrize("model", [STYLES["gpt2"], STYLES["llama"]], ids=["tied", "untied"])
@pytest.mark.parametrize(("world", "layout", "layers"), [
    (2, PP2, 5), (4, "--pipeline-model-parallel-size 4", 7), (2, f"{PP2} --num-virtual-stages-per-pipeline-rank 2", 10),
    (2, f"{PP2} --pipeline-schedule dualpipev --global-batch-size 8", 5), (2, f"{PP2} --pipeline-layers 1 4", 5)])
def test_no_layer_is_ever_dropped(model: str, world: int, layout: str, layers: int) -> None:
    model = f"{model} --num-layers {layers}"
    [(whole, names)] = run_ranks(number_of_parameters, 1, model)
    parts = run_ranks(number_of_parameters, world, f"{model} {layout}")
    assert sum(count for count, _ in parts) == whole
    assert sorted(name for _, part in parts for name in part) == sorted(names)
