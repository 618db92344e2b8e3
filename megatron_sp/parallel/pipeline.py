"""Pipeline parallelism: layers split into stages, microbatches flowing through them.

The schedules are torch's (``torch.distributed.pipelining``): 1F1B (Narayanan et al., arXiv
2104.04473), its interleaved form with several stages per rank, zero-bubble (Qi et al., arXiv
2401.10241), ZBV and DualPipeV. This module decides which stage holds which layers, runs one step of a
schedule with the loss contract of ``train.forward_backward``, and keeps tied weights equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, Schedule1F1B, get_schedule_class
from torch.distributed.tensor import DTensor

from megatron_sp.layout.schedules import SCHEDULES, stages_of_rank
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.torch_internals import computation_order, remove_backward_actions
from megatron_sp.transport.channel import CollectiveChannel

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def schedule_class(schedule: str, num_microbatches: int, num_stages: int) -> Any:
    """torch's class for a schedule; with too few microbatches 1F1B never leaves its warm-up and is GPipe."""
    name = SCHEDULES[schedule].torch_name
    return get_schedule_class("GPipe" if name == "1F1B" and num_microbatches < num_stages else name)


def schedule_order(schedule: str, pp: int, stages_per_rank: int,
                   num_microbatches: int) -> list[list[tuple[str, int, int]]]:
    """What each rank computes, in order: (kind, stage, microbatch) with kind F (forward), B (backward), and,
    where backward is split, I (gradient of the input) and W (gradients of the weights)."""
    num_stages = pp * stages_per_rank
    kind = schedule_class(schedule, num_microbatches, num_stages)
    if issubclass(kind, PipelineScheduleSingle):  # torch keeps no list of these that is complete
        warm_up = [min(num_microbatches, pp - rank if kind is Schedule1F1B else num_microbatches) for rank in range(pp)]
        return [_one_stage_order(rank, warm_up[rank], num_microbatches) for rank in range(pp)]
    parts = [SimpleNamespace(num_stages=num_stages, group_size=pp, group_rank=0, stage_index=number,
                             is_first=number == 0, is_last=number == num_stages - 1, submod=nn.Identity())
             for number in stages_of_rank(schedule, pp, stages_per_rank, 0)]
    made = kind(parts, num_microbatches)
    return [computation_order(made, rank) for rank in range(pp)]


def _one_stage_order(stage: int, warm_up: int, num_microbatches: int) -> list[tuple[str, int, int]]:
    """Some forwards, then a backward and a forward in turn, then the backwards that are left."""
    order = [("F", stage, number) for number in range(warm_up)]
    for number in range(num_microbatches):
        order.append(("B", stage, number))
        if warm_up + number < num_microbatches:
            order.append(("F", stage, warm_up + number))
    return order


class Stages(nn.ModuleList):
    """The stages one rank holds, behind one model's parameter names."""

    def __init__(self, stages: Sequence[nn.Module], numbers: Sequence[int], num_stages: int):
        super().__init__(stages)
        self.numbers, self.num_stages = list(numbers), num_stages
        self.tied: TiedWeights | None = None

    def named_parameters(self, prefix: str = "", recurse: bool = True,
                         remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Names as in the whole model: a layer is called the same wherever it lives."""
        for stage in self:
            yield from stage.named_parameters(prefix, recurse, remove_duplicate)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class TiedWeights:
    """Embedding and output layer share a weight but live on the two ends of the pipeline.

    Each end has a copy with the same shards. Their gradients are summed after backward, so that both
    copies make the same step; norm and checkpoints count the weight once.

    Args:
        first, last: this rank's copies, None where it does not hold that end.
    """

    first: nn.Parameter | None
    last: nn.Parameter | None
    group: dist.ProcessGroup | None  # the two ends; None where both copies are on this rank or none is
    device: torch.device = torch.device("cpu")  # what the group's collectives work on; gradients may be offloaded

    def sum_gradients(self) -> None:
        """Replace both copies' gradients by their sum."""
        grads = [_local(copy.grad) for copy in (self.first, self.last) if copy is not None and copy.grad is not None]
        if len(grads) == 2:
            grads[0].add_(grads[1])
            grads[1].copy_(grads[0])
        elif grads:
            assert self.group is not None
            CollectiveChannel(self.group, self.device).sum_in_place(grads)


def own_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Named parameters without second copies of tied weights: each weight of the model once."""
    copy = model.tied.last if isinstance(model, Stages) and model.tied is not None else None
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter is not copy)


class PipelineRunner:
    """Runs steps of a schedule; one schedule object per number and shape of microbatches.

    Args:
        stages: this rank's stage modules by number.
        loss: ``(output of the last stage, target) -> scalar``, already divided by the denominator.
    """

    def __init__(self, stages: Stages, schedule: str, mesh: ParallelMesh, loss: LossFunction):
        self.stages, self.schedule, self.mesh, self.loss = stages, schedule, mesh, loss
        self.is_first = 0 in stages.numbers
        self.is_last = stages.num_stages - 1 in stages.numbers
        self._schedules: dict[tuple[int, torch.Size, bool], Any] = {}

    def _schedule(self, num_microbatches: int, shape: torch.Size, training: bool) -> Any:
        key = (num_microbatches, shape, training)
        if key not in self._schedules:
            group = self.mesh.group("pp")
            stages = [PipelineStage(module, number, self.stages.num_stages, self.mesh.device, group=group)
                      for module, number in zip(self.stages, self.stages.numbers)]
            kind = schedule_class(self.schedule, num_microbatches, self.stages.num_stages)
            self._schedules[key] = kind(stages[0] if issubclass(kind, PipelineScheduleSingle) else stages,
                                        num_microbatches, loss_fn=self.loss, scale_grads=False)
            if not training:
                remove_backward_actions(self._schedules[key])
        return self._schedules[key]

    def _arguments(self, tokens: torch.Tensor, target: torch.Tensor, losses: list[torch.Tensor]) -> tuple[Any, Any]:
        positional = (tokens,) if self.is_first else ()
        named: dict[str, Any] = {"target": target, "losses": losses} if self.is_last else {}
        return positional, named

    def train(self, tokens: torch.Tensor, target: torch.Tensor, inputs: dict[str, torch.Tensor],
              num_microbatches: int) -> list[torch.Tensor]:
        """Forward and backward of all microbatches.

        Args:
            tokens, target: int64 [m*b, t], the microbatches one after another
            inputs: what every stage's forward takes beside its input, batch first
        Returns:
            the microbatches' losses, detached; empty where the last stage is not here
        """
        losses: list[torch.Tensor] = []
        positional, named = self._arguments(tokens, target, losses)
        schedule = self._schedule(num_microbatches, tokens.shape, training=True)
        schedule.step(*positional, **named, **inputs, return_outputs=False)
        return [loss.detach() for loss in losses]

    @torch.no_grad()
    def evaluate(self, tokens: torch.Tensor, target: torch.Tensor, inputs: dict[str, torch.Tensor],
                 num_microbatches: int) -> list[torch.Tensor]:
        """Forward of all microbatches; see ``train``."""
        losses: list[torch.Tensor] = []
        positional, named = self._arguments(tokens, target, losses)
        schedule = self._schedule(num_microbatches, tokens.shape, training=False)
        schedule.eval(*positional, **named, **inputs)
        return losses
