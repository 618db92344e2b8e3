"""Gradients that several ranks hold parts of are summed in fp32, whatever the computation's type."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_sp.model.build import build_model
from megatron_sp.parallel import gradients
from megatron_sp.parallel.collectives import copy_heads
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.proof.data import batch, local_microbatches
from megatron_sp.proof.reference import random_weights
from megatron_sp.proof.steps import load_full
from megatron_sp.train.forward_backward import build_engine
from tests.helpers.configs import STYLES, tiny_run
from tests.helpers.spawn import RunRanks


def largest_errors(layouts: list[str]) -> list[dict[str, float]]:
    """For each layout and each parameter that is partial over tp: how far its gradient is from the fp32 sum."""
    found = []
    for layout in layouts:
        run = tiny_run([*STYLES["mixed"].split(), "--num-key-value-heads", "1", "--tensor-model-parallel-size", "2",
                        "--sequence-parallel", *layout.split()], dist.get_world_size())
        mesh = ParallelMesh.build(run.parallel)
        model = build_model(run, mesh)
        load_full(model, {name: weight.float() for name, weight in random_weights(run).items()})
        engine = build_engine(run, model, mesh)
        before: dict[int, torch.Tensor] = {}

        def note(model: torch.nn.Module, mesh: ParallelMesh, before: dict[int, torch.Tensor] = before) -> None:
            """Keep this rank's part of each sum, and make the sum."""
            for parameter in gradients.partial_parameters(model):
                assert isinstance(parameter.grad, DTensor) and parameter.grad.placements == parameter.placements  # type: ignore[attr-defined]
                before[id(parameter)] = parameter.grad.to_local().clone()
            gradients.sum_over_tensor_ranks(model, mesh)

        from megatron_sp.train import forward_backward
        forward_backward.sum_over_tensor_ranks = note
        engine.forward_backward(local_microbatches(run, mesh, *batch(run)), 1.0)
        forward_backward.sum_over_tensor_ranks = gradients.sum_over_tensor_ranks
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        errors = {}
        for parameter in gradients.partial_parameters(model):
            assert isinstance(parameter.grad, DTensor)
            parts = [torch.empty_like(before[id(parameter)]) for _ in range(2)]
            dist.all_gather(parts, before[id(parameter)], group=mesh.group("tp"))
            wanted = parts[0].double() + parts[1].double()
            error = (parameter.grad.to_local().double() - wanted).norm() / wanted.norm().clamp(min=1e-30)
            errors[names[id(parameter)]] = float(error)
        found.append(errors)
    return found


def test_weights_replicated_over_tp_are_summed_in_fp32(ranks: RunRanks) -> None:
    for on_rank in ranks(largest_errors, 4, [f"--bf16 --zero-stage {stage} --ulysses-size 2 --micro-batch-size "
                                             f"{size}" for stage, size in ((0, 4), (1, 2), (3, 1))]):
        for errors in on_rank:
            assert max(errors.values()) < 1e-6, errors
            for words in ("norm.weight", "key.weight", "value.bias", "query_norm.weight"):
                assert any(name.endswith(words) for name in errors), (words, list(errors))


def test_copies_of_a_head_are_summed_in_fp32() -> None:
    """1 + 256 * 2^-9 is 1.5; added one by one in bf16 it stays 1."""
    x = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    copies = copy_heads(x, torch.zeros(257, dtype=torch.int64))
    weight = torch.full_like(copies, 2.0**-9)
    weight[:, :, 0] = 1.0
    (copies * weight).sum().backward()
    assert x.grad is not None and x.grad.item() == 1.5
