"""Perform a step's operations on this rank: forward and backward of chunks of microbatches, sends and receives.

``layout.transfers`` makes the list of operations, for a whole model as for a pipeline whose sequences are cut into
chunks. A model without a pipeline sends nothing; a sequence that is not cut is one chunk.

What flows from stage to stage is a chunk of a microbatch. So a step of one long sequence fills the pipeline, and every
rank holds the activations of a few chunks. In the first pass a chunk's hidden states flow through all stages, each of
which keeps the keys and values of its layers. In the second pass they flow again, now with autograd, and the gradients
of the hidden states flow back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from megatron_sp.config.schema import Run
from megatron_sp.data.batch import Microbatch
from megatron_sp.layout.transfers import Transfer, Work, operations
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.pipeline import Stages
from megatron_sp.parallel.stage_links import StageLinks
from megatron_sp.parallel.zero import prepare_backward
from megatron_sp.train.chunk_recurrence import ChunkRecurrence, Part, Passes
from megatron_sp.train.device_copies import DeviceCopies, one_ahead
from megatron_sp.train.report.timers import Timers


@dataclass
class _Microbatch:
    """A microbatch in progress.

    Attributes:
        batch: its tokens, on the device.
        inputs, outputs: input of this stage, and its output or divided loss, of chunks between forward and backward.
        loss: sum of the losses of its chunks so far, detached; None where this rank does not hold the last stage.
    """

    batch: Microbatch
    passes: Passes
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    loss: torch.Tensor | None = None


@dataclass
class _Step:
    """A step or an evaluation in progress.

    Attributes:
        microbatches: those that the step was given, of which ``copies`` are on the device.
        begun: the microbatches that have begun and not ended, by number.
        arriving: handle and buffer of each receive that has started, by the work that needs it.
        leaving: results that are still to be sent.
    """

    microbatches: Sequence[Microbatch]
    copies: Iterator[Microbatch]
    chunks: int
    denominator: torch.Tensor | float
    losses: list[torch.Tensor] = field(default_factory=list)
    begun: dict[int, _Microbatch] = field(default_factory=dict)
    arriving: dict[Work, tuple[dist.Work, torch.Tensor]] = field(default_factory=dict)
    leaving: dict[Work, torch.Tensor] = field(default_factory=dict)


class OperationRunner:
    """Runs training steps and evaluations of this rank's stage, or of the whole model where there is no pipeline.

    Args:
        model: a GPT, or one stage of it; its FSDP modules, if any, sum gradients over the ranks and do not average.
        recurrence: how sequences are cut into chunks.
        zero_stage: with 0 and 1, FSDP sums gradients over the ranks in the last backward, with 2 and 3 in each.
        width: elements of a token's hidden state.
        shards: ranks over which the tokens of a rank are split between tensor-parallel regions.
        dtype: type of hidden states that stages send.
        timers: measure forward and backward.
    """

    def __init__(self, model: nn.Module, mesh: ParallelMesh, recurrence: ChunkRecurrence, *, zero_stage: int,
                 width: int, shards: int, dtype: torch.dtype, timers: Timers):
        self.model, self.recurrence, self.timers, self.dtype = model, recurrence, timers, dtype
        self.rank, self.size = mesh.rank("pp"), mesh.size("pp")
        self.links = StageLinks(mesh.group("pp"), mesh.device) if self.size > 1 else None
        # In a pipeline the weights stay gathered for the whole step, as in stage 0. Else each of the chunks that are in
        # flight would gather them again.
        self.zero_stage = 0 if self.links else zero_stage
        self.copies, self.width, self.shards = DeviceCopies.of(mesh.device), width, shards

    @classmethod
    def of(cls, run: Run, model: nn.Module, mesh: ParallelMesh, timers: Timers) -> OperationRunner:
        """Return the runner of a run, for this rank's stage or the whole model."""
        if isinstance(model, Stages):
            (model,) = model
        half = run.precision.dtype != "float32"
        dtype = getattr(torch, run.precision.dtype) if half else next(model.parameters()).dtype
        return cls(model, mesh, ChunkRecurrence.of(run), zero_stage=run.parallel.zero_stage,
                   width=run.model.hidden_size, shards=run.parallel.tp if run.parallel.megatron_sp else 1, dtype=dtype,
                   timers=timers)

    def train(self, microbatches: Sequence[Microbatch], denominator: torch.Tensor | float) -> list[torch.Tensor]:
        """Run forward and backward of all microbatches.

        Args:
            microbatches: on the device or in host memory. While one of them is computed, the next is copied.
            denominator: divides the losses.

        Returns:
            the divided losses of the microbatches, detached; empty where this rank does not hold the last stage
        """
        return self._perform(microbatches, denominator, training=True)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch]) -> list[torch.Tensor]:
        """Run forward of all microbatches and return their losses, as ``train`` does, without dividing them."""
        return self._perform(microbatches, 1.0, training=False)

    def _perform(self, microbatches: Sequence[Microbatch], denominator: torch.Tensor | float, *,
                 training: bool) -> list[torch.Tensor]:
        if not microbatches:
            return []
        chunks = self.recurrence.chunks_of(microbatches[0])
        step = _Step(microbatches, one_ahead(microbatches, self.copies), chunks, denominator)
        own = operations(self.size, len(microbatches), chunks, training=training)[self.rank]
        last = max(place for place, each in enumerate(own) if isinstance(each, Work))
        for place, each in enumerate(own):
            if isinstance(each, Transfer):
                self._transfer(step, each)
            elif each.kind == "B":
                self._backward(step, each, is_last=place == last)
            else:
                self._forward(step, each)
        if self.links is not None:
            self.links.finish()
        return step.losses

    def _transfer(self, step: _Step, transfer: Transfer) -> None:
        """Start to send what a piece of work has left, or to receive what one needs: hidden states or a gradient."""
        assert self.links is not None
        if transfer.action == "send":
            self.links.start_send(step.leaving.pop(transfer.work), transfer.peer)
            return
        rows = len(step.microbatches[transfer.work.unit // step.chunks].tokens)
        shape = rows, self.recurrence.own_tokens // self.shards, self.width  # [b, t(/tp), h]
        step.arriving[transfer.work] = self.links.start_receive(shape, self.dtype, transfer.peer)

    def _forward(self, step: _Step, work: Work) -> None:
        """Run the forward of a chunk of a microbatch."""
        number, chunk = divmod(work.unit, step.chunks)
        if number not in step.begun:
            batch = next(step.copies)
            passes = self.recurrence.evaluation(batch) if work.kind == "E" else self.recurrence.training(batch)
            step.begun[number] = _Microbatch(batch, passes)
        microbatch = step.begun[number]
        part = microbatch.passes.first[chunk] if work.kind == "K" else microbatch.passes.second[chunk]
        # An evaluation is no part of a step, so its time is not the step's.
        timed = contextlib.nullcontext() if work.kind == "E" else self.timers("forward", level=2)
        with timed, torch.set_grad_enabled(work.kind == "F"):
            with torch.no_grad():
                for again in part.before:
                    self._call(microbatch.batch, again)
            received = self._received(step, work)
            if work.kind == "F" and received is not None:
                microbatch.inputs[chunk] = received.requires_grad_()
            y = self._call(microbatch.batch, part, received)
            if self.rank < self.size - 1:
                step.leaving[work] = y.detach()
            elif work.kind != "K":
                y = y.squeeze(0) / step.denominator
                microbatch.loss = y.detach() if microbatch.loss is None else microbatch.loss + y.detach()
        if work.kind == "F":
            microbatch.outputs[chunk] = y
        elif work.kind == "E" and chunk == step.chunks - 1:
            self._end(step, number)

    def _call(self, batch: Microbatch, part: Part, received: torch.Tensor | None = None) -> torch.Tensor:
        """Call the model with a part of a microbatch; return the sum of its losses [1], or hidden states.

        Args:
            received: hidden states of the stage before; None on the first stage, which takes the tokens.
        """
        tokens, labels, context = part.of(batch)
        return self.model(tokens if received is None else received, context, labels=labels)

    def _backward(self, step: _Step, work: Work, *, is_last: bool) -> None:
        """Run the backward of a chunk; in a pipeline keep the gradient of this stage's input for the stage before."""
        number, chunk = divmod(work.unit, step.chunks)
        microbatch = step.begun[number]
        y, gradient = microbatch.outputs.pop(chunk), self._received(step, work)
        if self.links is not None and isinstance(self.model, FSDPModule):
            self.model.set_is_last_backward(is_last)
        prepare_backward(self.model, self.zero_stage, is_last=is_last)
        with self.timers("backward", level=2):
            y.backward(gradient)
        if (x := microbatch.inputs.pop(chunk, None)) is not None:
            assert x.grad is not None
            step.leaving[work] = x.grad
        if chunk == 0:
            self._end(step, number)

    def _received(self, step: _Step, work: Work) -> torch.Tensor | None:
        """Wait for the tensor that a neighbouring stage sends for a piece of work; None where it needs none."""
        if work not in step.arriving:
            return None
        handle, tensor = step.arriving.pop(work)
        handle.wait()
        return tensor

    def _end(self, step: _Step, number: int) -> None:
        """Let go of a microbatch whose last chunk is done, and note its loss."""
        microbatch = step.begun.pop(number)
        if microbatch.loss is not None:
            step.losses.append(microbatch.loss)
