"""Compute gradients and loss of a list of microbatches, with and without a pipeline.

The trainer calls ``forward_backward`` and ``evaluate`` and does not know which of the two classes it holds: ``Engine``
loops over the microbatches and accumulates gradients, ``PipelineEngine`` runs a pipeline schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from megatron_sp.config.schema import Run
from megatron_sp.data.batch import Microbatch
from megatron_sp.layout.sharding import uses_fsdp
from megatron_sp.parallel.gradients import sum_over_copies, sum_over_tensor_ranks
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.pipeline import PipelineRunner, Stages
from megatron_sp.parallel.zero import prepare_backward
from megatron_sp.train.chunk_pipeline import ChunkPipeline
from megatron_sp.train.chunk_recurrence import ChunkRecurrence, Part
from megatron_sp.train.report.timers import Timers


class Engine:
    """Runs one microbatch after another and accumulates their gradients; for models without a pipeline.

    Args:
        model: a GPT; its FSDP modules, if any, sum gradients over the ranks and do not average them.
        mesh: the mesh that the model is built on.
        timers: measure forward, backward and the sum of gradients.
        zero_stage: with 0 and 1, FSDP sums gradients over the ranks in the last backward, with 2 and 3 in each.
        sum_copies: whether every rank holds a whole copy of the weights outside FSDP. Then this class sums the
            gradients over the ranks after the last microbatch.
        recurrence: says into which chunks sequences are cut.
    """

    def __init__(self, model: nn.Module, mesh: ParallelMesh, timers: Timers, *, zero_stage: int, sum_copies: bool,
                 recurrence: ChunkRecurrence):
        self.model, self.mesh, self.timers, self.recurrence = model, mesh, timers, recurrence
        self.zero_stage, self.sum_copies, self.copies = zero_stage, sum_copies, DeviceCopies.of(mesh.device)
        self.microbatch_losses: list[torch.Tensor] = []

    def forward_backward(self, microbatches: Sequence[Microbatch], denominator: torch.Tensor | float) -> torch.Tensor:
        """Add the gradients of ``sum of losses / denominator`` to the parameters.

        Args:
            microbatches: this rank's tokens, on its device or in host memory. While one of them is computed, the next
                is copied to the device.
            denominator: valid tokens of the whole global batch, divided by the loss scale.

        Returns:
            This rank's loss sum / denominator, a detached scalar on the device. The sum over the
            fsdp ranks is the loss (times the loss scale).
        """
        self.model.train()
        self.microbatch_losses = []
        total = torch.zeros((), device=self.mesh.device)
        for index, batch in enumerate(one_ahead(microbatches, self.copies)):
            loss = self._gradients(batch, denominator, is_last=index == len(microbatches) - 1)
            self.microbatch_losses.append(loss)
            total = total + loss
        with self.timers("gradient-sum", level=2):
            if self.sum_copies:
                sum_over_copies(self.model, self.mesh)
            sum_over_tensor_ranks(self.model, self.mesh)
        return total

    def _gradients(self, batch: Microbatch, denominator: torch.Tensor | float, *, is_last: bool) -> torch.Tensor:
        """Add the gradients of one microbatch to the parameters, and return its loss / denominator, detached."""
        passes = self.recurrence.training(batch)
        with self.timers("forward", level=2), torch.no_grad():
            for part in passes.first:
                self._run(batch, part)
        total = torch.zeros((), device=self.mesh.device)
        for part in passes.second:
            with self.timers("forward", level=2), torch.no_grad():
                for again in part.before:
                    self._run(batch, again)
            prepare_backward(self.model, self.zero_stage, is_last=is_last and part is passes.second[-1])
            with self.timers("forward", level=2):
                loss = self._run(batch, part).squeeze(0) / denominator
            with self.timers("backward", level=2):
                loss.backward()
            total = total + loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch]) -> tuple[torch.Tensor, int]:
        """Return the sum of the losses and the number of valid tokens of this rank's microbatches, without dropout.

        At the end all weights are sharded again. FSDP alone would leave some of them gathered for a backward, which
        an evaluation does not have.
        """
        self.model.eval()
        total = torch.zeros((), device=self.mesh.device)
        for batch in microbatches:
            for part in self.recurrence.evaluation(batch):
                total = total + self._run(batch, part).squeeze(0)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        self.model.train()
        return total, sum(batch.num_valid for batch in microbatches)

    def _run(self, batch: Microbatch, part: Part) -> torch.Tensor:
        """Call the model with a part of a microbatch; return the sum of its losses [1], or hidden states."""
        tokens, labels, context = part.of(batch)
        return self.model(tokens, context, labels=labels)


class PipelineEngine:
    """Runs the microbatches through a pipeline schedule. The methods promise the same as those of ``Engine``.

    Only the ranks of the last stage compute losses; the other ranks return 0.
    """

    def __init__(self, run: Run, model: Stages, mesh: ParallelMesh, *, sum_copies: bool):
        self.model, self.mesh, self.sum_copies = model, mesh, sum_copies
        self.denominator: torch.Tensor | float = 1.0
        self.runner: ScheduleRunner | ChunkPipeline
        if run.memory.sequence_chunk_size:
            self.runner = ChunkPipeline.of(run, model, mesh, self._divided)
        else:
            self.runner = ScheduleRunner(PipelineRunner(model, run.parallel.pipeline_schedule, mesh,
                                                        lambda loss_sum, _: self._divided(loss_sum)))
        self.microbatch_losses: list[torch.Tensor] = []

    def forward_backward(self, microbatches: Sequence[Microbatch], denominator: torch.Tensor | float) -> torch.Tensor:
        """Run the schedule, which adds the gradients to the parameters; arguments and result as for ``Engine``."""
        self.model.train()
        self.denominator = denominator
        self.microbatch_losses = self.runner.train([batch.to(self.mesh.device) for batch in microbatches])
        if self.sum_copies:
            sum_over_copies(self.model, self.mesh)
        sum_over_tensor_ranks(self.model, self.mesh)
        if self.model.tied is not None:  # after the other sums, so that both copies end with equal bits
            self.model.tied.sum_gradients()
        return self._total(self.microbatch_losses)

    def evaluate(self, microbatches: Sequence[Microbatch]) -> tuple[torch.Tensor, int]:
        """Run the forward schedule without dropout; arguments and result as for ``Engine.evaluate``."""
        self.model.eval()
        self.denominator = 1.0
        losses = self.runner.evaluate(microbatches)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        self.model.train()
        return self._total(losses), sum(batch.num_valid for batch in microbatches)

    def _divided(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """Return the loss of a microbatch or chunk: the last stage's output, the sum of the losses [1], divided."""
        return loss_sum.squeeze(0) / self.denominator

    def _total(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        # fp64 on every stage, because the caller sums this number over the pp ranks, whose types must be equal.
        total = torch.zeros((), device=self.mesh.device, dtype=torch.float64)
        return total + torch.stack(list(losses)).sum() if losses else total


class DeviceCopies:
    """Copies microbatches to the device at once; the host waits unless they are in pinned memory."""

    def __init__(self, device: torch.device):
        self.device = device

    @staticmethod
    def of(device: torch.device) -> DeviceCopies:
        """Return copies for a device: on a GPU beside its computation."""
        return SideStreamCopies(device) if device.type == "cuda" else DeviceCopies(device)

    def start(self, batch: Microbatch) -> Microbatch:
        """Start the copy of a microbatch."""
        return batch.to(self.device)

    def finish(self, copy: Microbatch) -> Microbatch:
        """Return a started copy, which may be computed with from now on."""
        return copy


class SideStreamCopies(DeviceCopies):
    """Copies microbatches on a stream of their own, beside what the GPU computes."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.stream = torch.cuda.Stream(device)

    def start(self, batch: Microbatch) -> Microbatch:
        """See ``DeviceCopies.start``."""
        with torch.cuda.stream(self.stream):
            return super().start(batch)

    def finish(self, copy: Microbatch) -> Microbatch:
        """See ``DeviceCopies.finish``. The computation waits for the copies, and the host does not."""
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)
        for tensor in copy.tensors().values():
            tensor.record_stream(current)  # else its memory might be used for a later copy too early
        return copy


def one_ahead(microbatches: Sequence[Microbatch], copies: DeviceCopies) -> Iterator[Microbatch]:
    """Yield copies of the microbatches on the device. When one is yielded, the copy of the next has been started."""
    ahead: Microbatch | None = None
    for batch in microbatches:
        if ahead is not None:
            ready = copies.finish(ahead)
            ahead = copies.start(batch)
            yield ready
        else:
            ahead = copies.start(batch)
    if ahead is not None:
        yield copies.finish(ahead)


class ScheduleRunner:
    """Gives the microbatches to a runner of torch's schedules."""

    def __init__(self, runner: PipelineRunner):
        self.runner = runner

    def train(self, microbatches: Sequence[Microbatch]) -> list[torch.Tensor]:
        """Run forward and backward of all microbatches and return their losses, on the last stage."""
        return self.runner.train(*_arguments(microbatches))

    def evaluate(self, microbatches: Sequence[Microbatch]) -> list[torch.Tensor]:
        """Run forward of all microbatches and return their losses, on the last stage."""
        return self.runner.evaluate(*_arguments(microbatches))


def _arguments(microbatches: Sequence[Microbatch]) -> tuple[torch.Tensor, torch.Tensor, list[dict[str, Any]]]:
    """Return the microbatches as a runner of torch's schedules takes them.

    Returns:
        all tokens and all labels, one microbatch after another, and for each microbatch what every stage is given by
        name
    """
    whole = [Part().of(batch) for batch in microbatches]
    tokens, labels, contexts = zip(*whole)
    return torch.cat(tokens), torch.cat(labels), [
        {"context": context, "labels": of_microbatch} for context, of_microbatch in zip(contexts, labels)]


def build_engine(run: Run, model: nn.Module, mesh: ParallelMesh,
                 timers: Timers | None = None) -> Engine | PipelineEngine:
    """Build the engine that fits the model: an accumulation loop, or a pipeline schedule.

    Args:
        timers: measure forward and backward; default: nothing is measured. A pipeline schedule mixes forward and
            backward of different microbatches, so nothing is measured inside it.
    """
    parallel = run.parallel
    sum_copies = parallel.fsdp > 1 and not uses_fsdp(run)
    if isinstance(model, Stages):
        return PipelineEngine(run, model, mesh, sum_copies=sum_copies)
    return Engine(model, mesh, timers or Timers(), zero_stage=parallel.zero_stage, sum_copies=sum_copies,
                  recurrence=ChunkRecurrence.of(run))
