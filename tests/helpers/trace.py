"""Trace what a training step of the real model allocates, with fake tensors: for any size and any number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_sp.config.schema import Run
from megatron_sp.data.batch import Microbatch
from megatron_sp.layout.masks.attention_mask import CAUSAL, AttentionMask
from megatron_sp.model import build
from megatron_sp.model.gpt import GPT
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.train.forward_backward import build_engine
from tests.helpers.storage import StorageTracker


@dataclass(frozen=True)
class Traced:
    """The bytes that one rank allocates.

    Attributes:
        weights: bytes of the rank's weights before the step.
        peak: most bytes during forward and backward, with weights and without optimizer states.
        end: bytes after the backward, with weights and gradients.
        largest: number of elements of the largest tensor, and the operator that returned it.
        report: what was live at the peak (if ``explain``).
    """

    weights: int
    peak: int
    end: int
    largest: tuple[int, str]
    report: str


@contextlib.contextmanager
def fake_world(world_size: int) -> Iterator[None]:
    """Form a process group in which only rank 0 exists; its collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    joined = DeviceMesh._concatenate

    def outside(meshes: list[DeviceMesh]) -> DeviceMesh:
        with unset_fake_temporarily():  # meshes compute with their tensors of ranks, so these must be real
            return joined(meshes)

    DeviceMesh._concatenate = staticmethod(outside)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        DeviceMesh._concatenate = joined  # type: ignore[method-assign]
        dist.destroy_process_group()


def trace_step(run: Run, *, explain: bool = False) -> Traced:
    """Trace forward and backward of one global batch on rank 0.

    The run must have no pipeline, whose stages would wait for tensors of other stages, and no shared memory.
    """
    assert run.parallel.pp == 1 and not run.parallel.shared_memory
    with fake_world(run.parallel.world_size):
        mesh = ParallelMesh.build(run.parallel)
        with mock.patch.object(build, "assemble", _assemble_really), FakeTensorMode(allow_non_fake_inputs=True):
            return trace_here(run, mesh, explain=explain)


def _assemble_really(*args: Any, assemble: Callable[..., GPT] = build.assemble) -> GPT:
    """Build the modules with real tensors on the meta device, because torch cannot move fake tensors from there."""
    with unset_fake_temporarily():
        return assemble(*args)


def trace_here(run: Run, mesh: ParallelMesh, *, explain: bool = False) -> Traced:
    """Trace a step as ``trace_step`` does, within a process group that exists already."""
    model = build.build_model(run, mesh)
    engine = build_engine(run, model, mesh)
    with StorageTracker(explain) as tracker:
        for parameter in model.parameters():
            tracker.add(parameter.detach(), "parameter")
        weights = tracker.live
        number = run.train.global_batch_size // (run.train.micro_batch_size * run.parallel.dp)
        engine.forward_backward([_microbatch(run) for _ in range(number)], 1.0)
        return Traced(weights, tracker.peak, tracker.live, tracker.largest, tracker.report())


def _microbatch(run: Run) -> Microbatch:
    size, tokens = run.train.micro_batch_size, run.data.seq_length // run.parallel.sp
    text, labels, positions = (torch.zeros(size, tokens, dtype=torch.int64) for _ in range(3))
    mask = CAUSAL
    if run.data.reset_attention_mask:  # documents of a quarter of the sequence, and one that begins a token later
        mask = AttentionMask(((0, run.data.seq_length // 4, run.data.seq_length // 2 + 1),) * size)
    return Microbatch(text, labels, positions, torch.arange(size), size * tokens, mask)
