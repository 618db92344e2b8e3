"""Pipeline parallelism: ranks hold different layers of the model, and microbatches pass from rank to rank.

The schedules are torch's (``torch.distributed.pipelining``): 1F1B (Narayanan et al., arXiv
2104.04473), its interleaved form with several stages per rank, zero-bubble (Qi et al., arXiv
2401.10241), ZBV and DualPipeV. This module decides which stage holds which layers, runs one step of a
schedule with the loss contract of ``train.forward_backward``, and keeps tied weights equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, Schedule1F1B, get_schedule_class
from torch.distributed.tensor import DTensor

from megatron_sp.layout.schedules import SCHEDULES, stages_of_rank
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.torch_internals import StageWithObjects, computation_order, remove_backward_actions
from megatron_sp.transport.channel import CollectiveChannel

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def schedule_class(schedule: str, num_microbatches: int, num_stages: int) -> Any:
    """Return torch's class for a schedule.

    That of 1F1B is GPipe when there are fewer microbatches than stages: 1F1B would then end before its steady state.
    """
    name = SCHEDULES[schedule].torch_name
    return get_schedule_class("GPipe" if name == "1F1B" and num_microbatches < num_stages else name)


def schedule_order(schedule: str, pp: int, stages_per_rank: int,
                   num_microbatches: int) -> list[list[tuple[str, int, int]]]:
    """Return for each rank what it computes, in order: (kind, stage, microbatch).

    The kind is F (forward) or B (backward). Schedules that split the backward have I (gradient of the stage's input)
    and W (gradients of its weights) instead of B.
    """
    num_stages = pp * stages_per_rank
    kind = schedule_class(schedule, num_microbatches, num_stages)
    if issubclass(kind, PipelineScheduleSingle):  # torch has no complete list of the actions of these
        warm_up = [min(num_microbatches, pp - rank if kind is Schedule1F1B else num_microbatches) for rank in range(pp)]
        return [_one_stage_order(rank, warm_up[rank], num_microbatches) for rank in range(pp)]
    made = schedule_of_stages(schedule, pp, stages_per_rank, num_microbatches)
    return [computation_order(made, rank) for rank in range(pp)]


def schedule_of_stages(schedule: str, pp: int, stages_per_rank: int, num_microbatches: int) -> Any:
    """Return torch's object of a schedule with several stages per rank, whose stages have no layers."""
    num_stages = pp * stages_per_rank
    parts = [SimpleNamespace(num_stages=num_stages, group_size=pp, group_rank=0, stage_index=number,
                             is_first=number == 0, is_last=number == num_stages - 1, submod=nn.Identity())
             for number in stages_of_rank(schedule, pp, stages_per_rank, 0)]
    return schedule_class(schedule, num_microbatches, num_stages)(parts, num_microbatches)


def _one_stage_order(stage: int, warm_up: int, num_microbatches: int) -> list[tuple[str, int, int]]:
    """Return ``warm_up`` forwards, then backwards and forwards in alternation, then the remaining backwards."""
    order = [("F", stage, number) for number in range(warm_up)]
    for number in range(num_microbatches):
        order.append(("B", stage, number))
        if warm_up + number < num_microbatches:
            order.append(("F", stage, warm_up + number))
    return order


class Stages(nn.ModuleList):
    """The stages of one rank as one module, whose parameters have the same names as in a model without pipeline."""

    def __init__(self, stages: Sequence[nn.Module], numbers: Sequence[int], num_stages: int):
        super().__init__(stages)
        self.numbers, self.num_stages = list(numbers), num_stages
        self.tied: TiedWeights | None = None

    def named_parameters(self, prefix: str = "", recurse: bool = True,
                         remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the stages' parameters by their names in the whole model, without the number of the stage.

        So a layer has the same name on whichever rank it is, and checkpoints fit every pipeline.
        """
        for stage in self:
            yield from stage.named_parameters(prefix, recurse, remove_duplicate)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class TiedWeights:
    """The two copies of a weight that the embedding and the output layer share.

    The first stage of the pipeline holds one copy, the last stage the other, with the same shards. Their gradients are
    summed after backward, so that the optimizer changes both copies alike. The gradient norm and checkpoints count the
    weight once.

    Args:
        first, last: the copies of the first and the last stage; None where this rank does not hold the stage.
        group: the ranks of the two stages; None where this rank holds both copies or none.
        device: the group's collectives work on tensors of this device. Gradients may be in host memory instead.
    """

    first: nn.Parameter | None
    last: nn.Parameter | None
    group: dist.ProcessGroup | None
    device: torch.device = torch.device("cpu")

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
    """Return the named parameters without the last stage's copy of a tied weight, so that each weight counts once."""
    copy = model.tied.last if isinstance(model, Stages) and model.tied is not None else None
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter is not copy)


class PipelineRunner:
    """Runs training and evaluation steps of a schedule.

    It keeps one of torch's schedule objects for each number and shape of microbatches.

    Args:
        stages: the stages that this rank holds.
        loss: ``(output of the last stage, target) -> scalar``, already divided by the denominator.
    """

    def __init__(self, stages: Stages, schedule: str, mesh: ParallelMesh, loss: LossFunction):
        self.stages, self.schedule, self.mesh, self.loss = stages, schedule, mesh, loss
        self.is_first = 0 in stages.numbers
        self.is_last = stages.num_stages - 1 in stages.numbers
        self._schedules: dict[tuple[int, torch.Size, bool], tuple[Any, list[StageWithObjects]]] = {}

    @contextlib.contextmanager
    def _schedule(self, objects: Sequence[dict[str, Any]], shape: torch.Size, training: bool) -> Iterator[Any]:
        """Give torch's schedule object for as many microbatches as there are objects, with these in place meanwhile."""
        num_microbatches = len(objects)
        key = (num_microbatches, shape, training)
        if key not in self._schedules:
            group = self.mesh.group("pp")
            stages = [StageWithObjects(module, number, self.stages.num_stages, self.mesh.device, group=group)
                      for module, number in zip(self.stages, self.stages.numbers)]
            kind = schedule_class(self.schedule, num_microbatches, self.stages.num_stages)
            made = kind(stages[0] if issubclass(kind, PipelineScheduleSingle) else stages, num_microbatches,
                        loss_fn=self.loss, scale_grads=False)
            if not training:
                remove_backward_actions(made)
            self._schedules[key] = made, stages
        schedule, stages = self._schedules[key]
        for stage in stages:
            stage.objects = objects
        yield schedule
        for stage in stages:
            stage.objects = ()  # the schedule is kept, and would keep the tensors in them

    def _arguments(self, tokens: torch.Tensor, target: torch.Tensor, losses: list[torch.Tensor]) -> tuple[Any, Any]:
        positional = (tokens,) if self.is_first else ()
        named: dict[str, Any] = {"target": target, "losses": losses} if self.is_last else {}
        return positional, named

    def train(self, tokens: torch.Tensor, target: torch.Tensor,
              objects: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
        """Run forward and backward of all microbatches and return their losses.

        Args:
            tokens, target: int64 [m*b, t], the microbatches one after another
            objects: for each microbatch the arguments, by name, that the forward of every stage takes besides its input
        Returns:
            the losses of the microbatches, detached; empty where this rank does not hold the last stage
        """
        losses: list[torch.Tensor] = []
        positional, named = self._arguments(tokens, target, losses)
        with self._schedule(objects, tokens.shape, training=True) as schedule:
            schedule.step(*positional, **named, return_outputs=False)
        return [loss.detach() for loss in losses]

    @torch.no_grad()
    def evaluate(self, tokens: torch.Tensor, target: torch.Tensor,
                 objects: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
        """Run forward of all microbatches and return their losses; arguments as in ``train``."""
        losses: list[torch.Tensor] = []
        positional, named = self._arguments(tokens, target, losses)
        with self._schedule(objects, tokens.shape, training=False) as schedule:
            schedule.eval(*positional, **named)
        return losses
