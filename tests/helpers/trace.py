"""Allocation trace of a training step of the real model, on fake tensors: no memory, any size, any number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_sp.config.schema import Run
from megatron_sp.data.batch import Microbatch
from megatron_sp.model.build import build_model
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.pipeline import Stages
from megatron_sp.train.forward_backward import Engine
from tests.helpers.storage import StorageTracker


@dataclass(frozen=True)
class Traced:
    """Bytes of rank 0, or of the first rank of a pipeline stage.

    Attributes:
        weights: of the shards, before the step.
        peak: the most during forward and backward, weights included, optimizer states not.
        end: after them, gradients included.
        report: what was live at the peak (with ``explain``).
    """

    weights: int
    peak: int
    end: int
    report: str


@contextlib.contextmanager
def _fake_world(world_size: int, rank: int) -> Iterator[None]:
    """A process group whose other ranks do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    joined = DeviceMesh._concatenate

    def outside(meshes: list[DeviceMesh]) -> DeviceMesh:
        with unset_fake_temporarily():  # rank tables are computed with, so they must be real
            return joined(meshes)

    DeviceMesh._concatenate = staticmethod(outside)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        DeviceMesh._concatenate = joined  # type: ignore[method-assign]
        dist.destroy_process_group()


def trace_step(run: Run, *, stage: int = 0, explain: bool = False) -> Traced:
    """Forward and backward of one global batch of a resolved run."""
    parallel = run.parallel
    with _fake_world(parallel.world_size, stage * parallel.world_size // parallel.pp):
        mesh = ParallelMesh.build(parallel)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = build_model(run, mesh)
            with StorageTracker(explain) as tracker:
                for parameter in model.parameters():
                    tracker.add(parameter.detach(), "parameter")
                weights = tracker.live
                number = run.train.global_batch_size // (run.train.micro_batch_size * parallel.dp)
                if isinstance(model, Stages):
                    pipeline_step(run, model[0], stage, number, mesh)
                else:
                    batches = [_microbatch(run) for _ in range(number)]
                    Engine(model, mesh, zero_stage=parallel.zero_stage).forward_backward(batches, 1.0)
                return Traced(weights, tracker.peak, tracker.live, tracker.report())


def _microbatch(run: Run) -> Microbatch:
    size, tokens = run.train.micro_batch_size, run.data.seq_length // run.parallel.sp
    tensors = [torch.zeros(size, tokens, dtype=torch.int64) for _ in range(3)]
    with unset_fake_temporarily():
        ids = torch.arange(size)
    return Microbatch(*tensors, ids, size * tokens)


def pipeline_step(run: Run, model: nn.Module, stage: int, number: int, mesh: ParallelMesh) -> None:
    """What one stage of a 1F1B schedule computes, in its order, with what torch's schedule tells FSDP."""
    warm_up = min(number, run.parallel.pp - stage)
    outputs: list[tuple[torch.Tensor, torch.Tensor]] = []
    done = 0
    for step in range(number + warm_up):
        if step >= warm_up:
            _backward(model, *outputs.pop(0), is_last=(done := done + 1) == number)
        if step < number:
            outputs.append(_forward(run, model, stage, mesh))


def _forward(run: Run, model: nn.Module, stage: int, mesh: ParallelMesh) -> tuple[torch.Tensor, torch.Tensor]:
    batch, model_ = _microbatch(run), run.model
    x = batch.tokens
    if stage:
        tokens = x.shape[1] // (mesh.size("tp") if run.parallel.megatron_sp else 1)
        x = torch.zeros(x.shape[0], tokens, model_.hidden_size, dtype=getattr(torch, run.precision.dtype),
                        requires_grad=True)
    labels = batch.labels if stage == run.parallel.pp - 1 else None
    return x, model(x, batch.positions, batch.sample_ids, labels=labels)


def _backward(model: nn.Module, x: torch.Tensor, y: torch.Tensor, *, is_last: bool) -> None:
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(is_last)
        model.set_reshard_after_backward(is_last)
        model.set_requires_gradient_sync(is_last)
    y.backward(torch.ones_like(y))
