"""Compute gradients and loss of a list of microbatches, in whatever order the layout asks for.

The trainer calls ``Engine``. Its runner performs the step: ``OperationRunner`` a list of operations, for whole models,
chunks of sequences, and pipelines of chunks; ``ScheduleRunner`` one of torch's pipeline schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from megatron_sp.config.schema import Run
from megatron_sp.data.batch import Microbatch
from megatron_sp.layout.sharding import uses_fsdp
from megatron_sp.parallel.gradients import sum_over_copies, sum_over_tensor_ranks
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.pipeline import PipelineRunner, Stages
from megatron_sp.train.chunk_recurrence import Part
from megatron_sp.train.operation_runner import OperationRunner
from megatron_sp.train.report.timers import Timers


class Runner(Protocol):
    """Runs forward, and in training backward, of this rank's part of the model for all microbatches of a step."""

    def train(self, microbatches: Sequence[Microbatch], denominator: torch.Tensor | float) -> list[torch.Tensor]:
        """Add the gradients of the losses / denominator; return these per microbatch, where the last stage is."""

    def evaluate(self, microbatches: Sequence[Microbatch]) -> list[torch.Tensor]:
        """Return the losses of the microbatches, where the last stage is."""


class Engine:
    """Computes the gradients of a step, summed over the ranks as far as FSDP does not sum them.

    Args:
        model: a GPT, or this rank's stages of one.
        mesh: the mesh that the model is built on.
        runner: runs the microbatches.
        timers: measure the sum of gradients.
        sum_copies: whether every rank holds a whole copy of the weights outside FSDP. Then this class sums the
            gradients over the ranks after the last microbatch.

    Attributes:
        microbatch_losses: the losses of the last step, where this rank holds the last stage.
    """

    def __init__(self, model: nn.Module, mesh: ParallelMesh, runner: Runner, timers: Timers, *, sum_copies: bool):
        self.model, self.mesh, self.runner, self.timers, self.sum_copies = model, mesh, runner, timers, sum_copies
        self.microbatch_losses: list[torch.Tensor] = []

    def forward_backward(self, microbatches: Sequence[Microbatch], denominator: torch.Tensor | float) -> torch.Tensor:
        """Add the gradients of ``sum of losses / denominator`` to the parameters.

        Args:
            microbatches: this rank's tokens, on its device or in host memory.
            denominator: valid tokens of the whole global batch, divided by the loss scale.

        Returns:
            This rank's loss sum / denominator, a detached scalar on the device; 0 where it does not hold the last
            stage. The sum over the fsdp ranks and the stages is the loss (times the loss scale).
        """
        self.model.train()
        self.microbatch_losses = self.runner.train(microbatches, denominator)
        with self.timers("gradient-sum", level=2):
            if self.sum_copies:
                sum_over_copies(self.model, self.mesh)
            sum_over_tensor_ranks(self.model, self.mesh)
            if isinstance(self.model, Stages) and self.model.tied is not None:
                self.model.tied.sum_gradients()  # after the other sums, so that both copies end with equal bits
        return self._total(self.microbatch_losses)

    def evaluate(self, microbatches: Sequence[Microbatch]) -> tuple[torch.Tensor, int]:
        """Return the sum of the losses and the number of valid tokens of this rank's microbatches, without dropout.

        At the end all weights are sharded again. FSDP alone would leave some of them gathered for a backward, which
        an evaluation does not have.
        """
        self.model.eval()
        losses = self.runner.evaluate(microbatches)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        self.model.train()
        return self._total(losses), sum(batch.num_valid for batch in microbatches)

    def _total(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        # In a pipeline fp64 on every stage, because the caller sums this number over the stages in one type.
        dtype = torch.float64 if isinstance(self.model, Stages) else None
        total = torch.zeros((), device=self.mesh.device, dtype=dtype)
        for loss in losses:
            total = total + loss
        return total


class ScheduleRunner:
    """Gives the microbatches to a runner of torch's schedules."""

    def __init__(self, run: Run, stages: Stages, mesh: ParallelMesh):
        self.mesh = mesh
        self.denominator: torch.Tensor | float = 1.0
        self.runner = PipelineRunner(stages, run.parallel.pipeline_schedule, mesh,
                                     lambda loss_sum, _: loss_sum.squeeze(0) / self.denominator)

    def train(self, microbatches: Sequence[Microbatch], denominator: torch.Tensor | float) -> list[torch.Tensor]:
        """See ``Runner``."""
        self.denominator = denominator
        return self.runner.train(*_arguments([batch.to(self.mesh.device) for batch in microbatches]))

    def evaluate(self, microbatches: Sequence[Microbatch]) -> list[torch.Tensor]:
        """See ``Runner``."""
        self.denominator = 1.0
        return self.runner.evaluate(*_arguments([batch.to(self.mesh.device) for batch in microbatches]))


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


def build_engine(run: Run, model: nn.Module, mesh: ParallelMesh, timers: Timers | None = None) -> Engine:
    """Build the engine that fits the model.

    Args:
        timers: measure forward and backward; default: nothing is measured. A pipeline schedule of torch mixes forward
            and backward of different microbatches, so nothing is measured inside it.
    """
    timers = timers or Timers()
    runner: Runner
    if isinstance(model, Stages) and not run.memory.sequence_chunk_size:
        runner = ScheduleRunner(run, model, mesh)
    else:
        runner = OperationRunner.of(run, model, mesh, timers)
    return Engine(model, mesh, runner, timers, sum_copies=run.parallel.fsdp > 1 and not uses_fsdp(run))
