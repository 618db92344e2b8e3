"""--check-replicas: equal copies pass, one flipped bit on one rank is named on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_sp.errors import TrainingError
from megatron_sp.model.build import build_model
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.pipeline import Stages
from megatron_sp.train.health.replicas import check_replicas
from megatron_sp.train.optimizer import AdamW, build_optimizer, local_part
from tests.helpers.configs import STYLES, tiny_run
from tests.helpers.spawn import run_ranks
from tests.helpers.training import steps, train

LLAMA = STYLES["llama"].replace("--num-query-groups", "--num-key-value-heads")


def verdicts(flags: str, spoiled: list[tuple[str, int]]) -> list[str]:
    """Return this rank's errors: for an intact model, then for each weight with one bit flipped on one rank."""
    run = tiny_run(flags.split(), dist.get_world_size())
    mesh = ParallelMesh.build(run.parallel)
    model = build_model(run, mesh)
    found = [_verdict(model, mesh)]
    for name, rank in spoiled:
        undo = None
        if dist.get_rank() == rank:
            weights = dict(model.named_parameters())
            if name == "tied copy":
                assert isinstance(model, Stages) and model.tied is not None and model.tied.last is not None
                weights[name] = model.tied.last
            bits = local_part(weights[name]).view(torch.int32).view(-1)
            bits[-1] ^= 1
            undo = bits
        found.append(_verdict(model, mesh))
        if undo is not None:
            undo[-1] ^= 1
    assert _verdict(model, mesh) == ""
    return found


def moments_verdict() -> str:
    """Return the error for an optimizer moment that differs on rank 1."""
    run = tiny_run(LLAMA.split(), dist.get_world_size())
    mesh = ParallelMesh.build(run.parallel)
    model = build_model(run, mesh)
    optimizer = build_optimizer(run, model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    check_replicas(model, mesh, 8, optimizer)
    weight = dict(model.named_parameters())["layers.0.mlp.up.weight"]
    if dist.get_rank() == 1:
        optimizer.state[weight]["exp_avg"].view(-1)[3] *= 2
    with pytest.raises(TrainingError) as error:
        check_replicas(model, mesh, 8, optimizer)
    return str(error.value)


def test_moments_are_compared_too() -> None:
    for said in run_ranks(moments_verdict, 2):
        assert "layers.0.mlp.up.weight (exp_avg): rank" in said


def _verdict(model: torch.nn.Module, mesh: ParallelMesh) -> str:
    try:
        check_replicas(model, mesh, 8)
    except TrainingError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("world, flags, spoiled, words", [
    (2, f"{LLAMA} --tensor-model-parallel-size 2 --sequence-parallel", [("layers.0.input_norm.weight", 1)],
     ["layers.0.input_norm.weight: rank 1 differs from rank 0 (copies over tensor-parallel ranks)"]),
    (3, f"{LLAMA} --global-batch-size 3", [("layers.1.mlp.up.weight", 2), ("final_norm.weight", 0)],
     ["layers.1.mlp.up.weight: rank 2 differs from ranks 0, 1 (copies over data- and sequence-parallel ranks)",
      "final_norm.weight: rank 0 differs from ranks 1, 2"]),
    (4, f"{LLAMA} --ulysses-size 2 --fsdp-size 2 --zero-stage 3", [("layers.1.mlp.up.weight", 2)],
     ["layers.1.mlp.up.weight: rank 2 differs from rank 0 (copies over data"]),
    (2, f"{STYLES['gpt2']} --pipeline-model-parallel-size 2", [("tied copy", 1)],
     ["embedding.word.weight: rank 1 differs from rank 0 (tied copies at both ends of the pipeline)"]),
], ids=["tp", "dp", "hybrid", "tied"])
def test_a_flipped_bit_is_named_on_all_ranks(world: int, flags: str, spoiled: list[tuple[str, int]],
                                             words: list[str]) -> None:
    found = run_ranks(verdicts, world, flags, spoiled)
    assert all(of_rank == found[0] for of_rank in found)
    intact, *errors = found[0]
    assert intact == ""
    for error, expected in zip(errors, words, strict=True):
        assert expected in error and "iteration 8: --check-replicas" in error and "--ckpt-step" in error


def train_with_a_fault(flags: str, iteration: int, rank: int) -> str:
    """Flip a bit of a norm's weight on one rank after an optimizer step."""
    original, count = AdamW.step, [0]

    def step(self: AdamW, **scale: Any) -> None:
        original(self, **scale)
        count[0] += 1
        if count[0] == iteration and dist.get_rank() == rank:
            norm = next(p for group in self.param_groups for p in group["params"] if p.ndim == 1)
            local_part(norm).view(torch.int32)[0] ^= 1

    AdamW.step = step  # type: ignore[method-assign, assignment]
    return train(flags)


def test_training_stops_at_the_next_check_before_it_is_saved(tmp_path: Path) -> None:
    """The check of iteration 2 passes, the fault comes in iteration 3."""
    flags = (f"{LLAMA} --tensor-model-parallel-size 2 --ulysses-size 1 --check-replicas 2 --save {tmp_path} "
             "--save-interval 1")
    errors = run_ranks(train_with_a_fault, 2, flags, 3, 1)
    assert errors[0] == errors[1]
    assert "TrainingError: iteration 4: --check-replicas" in errors[0] and "rank 1 differs from rank 0" in errors[0]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "3"
    assert steps(tmp_path, "iteration")[-1] == (4,)
