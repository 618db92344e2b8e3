"""Run the chunks of sequences through a pipeline.

``layout.schedules.chunk_order`` has the order of the work and a picture, ``layout.transfers`` the sends and receives.

What flows from rank to rank is a chunk of a microbatch. So a step of one long sequence fills the pipeline, and every
rank holds the activations of a few chunks. In the first pass a chunk's hidden states flow through all stages, each of
which keeps the keys and values of its layers. In the second pass they flow again, now with autograd, and the gradients
of the hidden states flow back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from megatron_sp.config.schema import Run
from megatron_sp.data.batch import Microbatch
from megatron_sp.layout.schedules import chunk_order
from megatron_sp.layout.transfers import Operation, Work, with_transfers
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.pipeline import Stages
from megatron_sp.parallel.stage_links import StageLinks
from megatron_sp.parallel.zero import prepare_backward
from megatron_sp.train.chunk_recurrence import ChunkRecurrence, Part, Passes


@dataclass
class _Step:
    """A step in progress.

    Attributes:
        passes: the calls of the model for each microbatch.
        inputs, outputs: hidden states or, of the last stage, losses of chunks between forward and backward, by
            microbatch and number of the chunk.
        losses: loss of each microbatch so far, on the last stage.
        arriving: receives that were started, by the work that takes them.
        leaving: results that are not sent yet, by the work that computed them.
    """

    microbatches: Sequence[Microbatch]
    passes: list[Passes]
    inputs: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    outputs: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    arriving: dict[Work, tuple[dist.Work, torch.Tensor]] = field(default_factory=dict)
    leaving: dict[Work, torch.Tensor] = field(default_factory=dict)


class ChunkPipeline:
    """Runs training and evaluation steps of one stage per rank, chunk by chunk.

    Args:
        stages: the stage of this rank.
        links: connections to the ranks of the stages before and after this one.
        recurrence: how sequences are cut into chunks.
        width: elements of a token's hidden state.
        shards: ranks over which the tokens of a rank are split between tensor-parallel regions.
        dtype: type of hidden states.
        loss: divides the sum of the losses [1].
    """

    def __init__(self, stages: Stages, links: StageLinks, recurrence: ChunkRecurrence, *, width: int, shards: int,
                 dtype: torch.dtype, loss: Callable[[torch.Tensor], torch.Tensor]):
        (self.stage,) = stages
        self.links, self.recurrence, self.dtype, self.loss = links, recurrence, dtype, loss
        self.width, self.tokens = width, recurrence.own_tokens // shards

    @classmethod
    def of(cls, run: Run, stages: Stages, mesh: ParallelMesh,
           loss: Callable[[torch.Tensor], torch.Tensor]) -> ChunkPipeline:
        """Return the chunk pipeline of a run, for this rank's stage."""
        half = run.precision.dtype != "float32"
        dtype = getattr(torch, run.precision.dtype) if half else next(stages.parameters()).dtype
        return cls(stages, StageLinks(mesh.group("pp"), mesh.device), ChunkRecurrence.of(run),
                   width=run.model.hidden_size, shards=run.parallel.tp if run.parallel.megatron_sp else 1, dtype=dtype,
                   loss=loss)

    def train(self, microbatches: Sequence[Microbatch]) -> list[torch.Tensor]:
        """Run forward and backward of all microbatches and return their losses.

        Returns:
            the losses of the microbatches, detached; empty where this rank does not hold the last stage
        """
        step = _Step(microbatches, [self.recurrence.training(batch) for batch in microbatches])
        chunks, ranks = len(step.passes[0].second), self.links.size
        orders = [chunk_order(ranks, rank, len(microbatches), chunks) for rank in range(ranks)]
        last = orders[self.links.rank][-1]
        for operation in with_transfers(orders)[self.links.rank]:
            if operation.name != "compute":
                self._transfer(step, operation, chunks)
                continue
            work = kind, unit = operation.work
            number, chunk = divmod(unit, chunks)
            if kind == "K":
                with torch.no_grad():
                    self._forward(step, work, number, step.passes[number].first[chunk])
            elif kind == "F":
                part = step.passes[number].second[chunks - 1 - chunk]
                step.inputs[number, chunk], y = self._forward(step, work, number, part)
                step.outputs[number, chunk] = self.loss(y) if self.links.is_last else y
            else:
                self._backward(step, work, (number, chunk), is_last=work == last)
        self.links.finish()
        return [step.losses[number] for number in sorted(step.losses)]

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch]) -> list[torch.Tensor]:
        """Run forward of all microbatches and return their losses, as ``train`` does."""
        step = _Step(microbatches, [])
        parts = [self.recurrence.evaluation(batch) for batch in microbatches]
        chunks = len(parts[0])
        order = [("F", unit) for unit in range(len(microbatches) * chunks)]
        for operation in with_transfers([order] * self.links.size)[self.links.rank]:
            if operation.name != "compute":
                self._transfer(step, operation, chunks)
                continue
            number, chunk = divmod(operation.work[1], chunks)
            _, y = self._forward(step, operation.work, number, parts[number][chunk])
            if self.links.is_last:
                step.losses[number] = step.losses.get(number, 0.0) + self.loss(y)
        self.links.finish()
        return [step.losses[number] for number in sorted(step.losses)]

    def _transfer(self, step: _Step, operation: Operation, chunks: int) -> None:
        """Start a send or a receive."""
        if operation.name == "send":
            self.links.send(step.leaving.pop(operation.work), operation.peer)
            return
        rows = len(step.microbatches[operation.work[1] // chunks].tokens)
        step.arriving[operation.work] = self.links.receive((rows, self.tokens, self.width), self.dtype, operation.peer)

    @staticmethod
    def _take(step: _Step, work: Work) -> torch.Tensor:
        """Wait for the tensor that some work takes from a neighbour, and return it."""
        handle, received = step.arriving.pop(work)
        handle.wait()
        return received

    def _forward(self, step: _Step, work: Work, number: int, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input and the output of this stage for a chunk of a microbatch."""
        x, labels, context = part.of(step.microbatches[number])
        if not self.links.is_first:
            x = self._take(step, work).requires_grad_(torch.is_grad_enabled())
        y = self.stage(x, context, labels=labels)
        if not self.links.is_last:
            step.leaving[work] = y.detach()
        return x, y

    def _backward(self, step: _Step, work: Work, key: tuple[int, int], *, is_last: bool) -> None:
        """Run the backward of a chunk, and keep the gradient of this stage's input for the stage before."""
        x, y, number = step.inputs.pop(key), step.outputs.pop(key), key[0]
        gradient = None
        if self.links.is_last:
            step.losses[number] = step.losses.get(number, 0.0) + y.detach()
        else:
            gradient = self._take(step, work)
        if isinstance(self.stage, FSDPModule):
            self.stage.set_is_last_backward(is_last)
            # As in stage 0: the weights stay gathered, else the chunks in flight would gather them again.
            prepare_backward(self.stage, 0, is_last=is_last)
        y.backward(gradient)
        if not self.links.is_first:
            assert x.grad is not None
            step.leaving[work] = x.grad
