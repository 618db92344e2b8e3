"""The one seam between trainer and model: gradients and loss of a list of microbatches.

Without pipeline this is an accumulation loop. A pipeline schedule offers the same two methods
with the same meaning.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from megatron_sp.config.schema import Run
from megatron_sp.data.batch import Microbatch
from megatron_sp.layout.sharding import uses_fsdp
from megatron_sp.parallel.gradients import sum_over_copies, sum_over_tensor_ranks
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.pipeline import PipelineRunner, Stages
from megatron_sp.parallel.zero import synchronize_gradients
from megatron_sp.train.report.timers import Timers


class Engine:
    """Accumulation over microbatches.

    Args:
        model: a GPT; its FSDP modules, if any, reduce gradients by summing.
        mesh: where the model lives.
        timers: measure forward, backward and the sum of gradients.
        zero_stage: 0 and 1 sum gradients over ranks at the last microbatch, 2 and 3 at each.
        sum_copies: every rank holds a whole copy outside FSDP, whose gradients are summed after the last.
    """

    def __init__(self, model: nn.Module, mesh: ParallelMesh, timers: Timers, *, zero_stage: int, sum_copies: bool):
        self.model, self.mesh, self.timers = model, mesh, timers
        self.zero_stage, self.sum_copies = zero_stage, sum_copies
        self.microbatch_losses: list[torch.Tensor] = []

    def forward_backward(self, microbatches: Sequence[Microbatch], denominator: torch.Tensor | float) -> torch.Tensor:
        """Add the gradients of ``sum of losses / denominator`` to the parameters.

        Args:
            microbatches: this rank's tokens, on its device.
            denominator: valid tokens of the whole global batch, divided by the loss scale.

        Returns:
            This rank's loss sum / denominator, a detached scalar on the device. The sum over the
            fsdp ranks is the loss (times the loss scale).
        """
        self.model.train()
        self.microbatch_losses = []
        total = torch.zeros((), device=self.mesh.device)
        for index, batch in enumerate(microbatches):
            synchronize_gradients(self.model, self.zero_stage, is_last_microbatch=index == len(microbatches) - 1)
            with self.timers("forward", level=2):
                loss = self._loss(batch) / denominator
            with self.timers("backward", level=2):
                loss.backward()
            self.microbatch_losses.append(loss.detach())
            total = total + loss.detach()
        with self.timers("gradient-sum", level=2):
            if self.sum_copies:
                sum_over_copies(self.model, self.mesh)
            sum_over_tensor_ranks(self.model, self.mesh)
        return total

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch]) -> tuple[torch.Tensor, int]:
        """Loss sum and number of valid tokens of this rank's microbatches, dropout off.

        Afterwards the weights are sharded again: FSDP would leave some of them gathered, waiting for
        a backward that never comes.
        """
        self.model.eval()
        total = torch.zeros((), device=self.mesh.device)
        for batch in microbatches:
            total = total + self._loss(batch)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        self.model.train()
        return total, sum(batch.num_valid for batch in microbatches)

    def _loss(self, batch: Microbatch) -> torch.Tensor:
        return self.model(batch.tokens, batch.positions, batch.sample_ids, labels=batch.labels).squeeze(0)


class PipelineEngine:
    """The same contract over a pipeline schedule: microbatches flow through the stages.

    The loss lives on the last stage; elsewhere a rank's share of it is 0.
    """

    def __init__(self, model: Stages, mesh: ParallelMesh, *, schedule: str, sum_copies: bool):
        self.model, self.mesh, self.sum_copies = model, mesh, sum_copies
        self.denominator: torch.Tensor | float = 1.0
        self.runner = PipelineRunner(model, schedule, mesh, self._loss)
        self.microbatch_losses: list[torch.Tensor] = []

    def forward_backward(self, microbatches: Sequence[Microbatch], denominator: torch.Tensor | float) -> torch.Tensor:
        """See ``Engine.forward_backward``."""
        self.model.train()
        self.denominator = denominator
        self.microbatch_losses = self.runner.train(*_joined(microbatches))
        if self.sum_copies:
            sum_over_copies(self.model, self.mesh)
        sum_over_tensor_ranks(self.model, self.mesh)
        if self.model.tied is not None:  # last, so that both copies get the same bits
            self.model.tied.sum_gradients()
        return self._total(self.microbatch_losses)

    def evaluate(self, microbatches: Sequence[Microbatch]) -> tuple[torch.Tensor, int]:
        """See ``Engine.evaluate``."""
        self.model.eval()
        self.denominator = 1.0
        losses = self.runner.evaluate(*_joined(microbatches))
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        self.model.train()
        return self._total(losses), sum(batch.num_valid for batch in microbatches)

    def _loss(self, loss_sum: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        """The last stage gives the loss sum [1] itself."""
        return loss_sum.squeeze(0) / self.denominator

    def _total(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        # one type on all stages: the sum over pp follows
        total = torch.zeros((), device=self.mesh.device, dtype=torch.float64)
        return total + torch.stack(list(losses)).sum() if losses else total


def _joined(microbatches: Sequence[Microbatch]) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], int]:
    """All microbatches one after another, as a schedule takes them: tokens, target, inputs of all stages, number."""
    tokens, labels, positions, sample_ids = (
        torch.cat([getattr(batch, name) for batch in microbatches])
        for name in ("tokens", "labels", "positions", "sample_ids"))
    return tokens, labels, {"positions": positions, "sample_ids": sample_ids, "labels": labels}, len(microbatches)


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
        return PipelineEngine(model, mesh, schedule=parallel.pipeline_schedule, sum_copies=sum_copies)
    return Engine(model, mesh, timers or Timers(), zero_stage=parallel.zero_stage, sum_copies=sum_copies)
