"""Norms of weights and moments over the whole model: the same in every layout, and what they say they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_sp.model.build import build_model
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.proof.reference import random_weights
from megatron_sp.proof.steps import load_full
from megatron_sp.train.optimizer import build_optimizer
from megatron_sp.train.report.metrics_file import read_metrics
from megatron_sp.train.report.optimizer_states import optimizer_statistics
from tests.helpers.configs import STYLES, tiny_run
from tests.helpers.spawn import run_ranks
from tests.helpers.training import train

LAYOUTS = [(2, "--ulysses-size 2 --zero-stage 3"), (2, "--tensor-model-parallel-size 2"),
           (2, "--pipeline-model-parallel-size 2"), (2, "--ulysses-size 2")]


def statistics(flags: str) -> dict[str, float]:
    """Return the statistics after one AdamW step whose gradients are the weights themselves."""
    run = tiny_run(flags.split(), dist.get_world_size())
    mesh = ParallelMesh.build(run.parallel)
    model = build_model(run, mesh)
    load_full(model, random_weights(run))
    optimizer = build_optimizer(run, model)
    for p in model.parameters():
        p.grad = p.detach().clone()
    optimizer.step()
    return optimizer_statistics(model, optimizer, mesh)


def test_the_numbers_by_hand_and_in_every_layout() -> None:
    flags = STYLES["gpt2"]
    run = tiny_run(flags.split())
    weights = torch.cat([value.flatten() for value in random_weights(run).values()]).double()
    (one,) = run_ranks(statistics, 1, flags)
    momentum, variance = 0.1 * weights, (1 - run.optimizer.adam_beta2) * weights**2
    for kind, values in (("momentum", momentum), ("variance", variance), ("variance_sqrt", variance.sqrt())):
        expected = (values.abs().sum(), values.norm(), values.abs().max())
        got = (one[f"optimizer/{kind}_{form}"] for form in ("l1", "l2", "abs_max"))
        assert list(got) == pytest.approx([float(value) for value in expected], rel=1e-5), kind
    assert len(one) == 12
    for world, layout in LAYOUTS:
        for found in run_ranks(statistics, world, f"{flags} {layout}"):
            assert found == pytest.approx(one, rel=1e-6), layout


def test_an_optimizer_without_moments_shows_the_weights_alone() -> None:
    (found,) = run_ranks(statistics, 1, f"{STYLES['gpt2']} --optimizer sgd")
    assert sorted(found) == ["optimizer/weight_abs_max", "optimizer/weight_l1", "optimizer/weight_l2"]


def test_a_run_logs_them_when_due(tmp_path: Path) -> None:
    flags = (f"{STYLES['gpt2']} --log-optimizer-states-to-tensorboard --tensorboard-log-interval 2 --train-iters 4 "
             f"--save-interval 10 --save {tmp_path}")
    assert run_ranks(train, 1, flags) == [""]
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "lm_loss" in row]
    assert [row["iteration"] for row in rows if row.get("optimizer/variance_l2", 0) > 0] == [2, 4]
