"""One training step: gradients of a global batch, one reduction over all ranks, clipping, update of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from megatron_sp.config.schema import Run
from megatron_sp.data.batch import Microbatch
from megatron_sp.layout.patterns.choice import LayerAttention, layer_attention
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.train.forward_backward import Engine, build_engine
from megatron_sp.train.health.loss_scale import LossScaler
from megatron_sp.train.optimizer import (
    CLIP_EPSILON,
    SGD,
    AdamW,
    GradientScale,
    build_optimizer,
    clip_factor,
    num_zeros,
    require_all_gradients,
    scale_gradients,
    squared_norm,
)
from megatron_sp.train.report.timers import Timers
from megatron_sp.train.schedule import Schedule


class StepTotals(NamedTuple):
    """What all ranks know of a step once its gradients are computed; the same numbers on every rank.

    Attributes:
        loss: mean loss per valid token of the global batch, in nats; NaN when no token is valid.
        grad_norm: global norm of the gradient of that loss, before clipping and without the loss scale.
        num_valid: tokens of the global batch whose label counts.
        loss_scale: the factor that the gradients on the parameters carry until ``TrainStep.update``.
        num_zeros: zeros in the gradient; 0.0 unless ``TrainStep.counts_zeros``.
        params_norm: global norm of the weights; 0.0 unless ``TrainStep.measures_weights``.
        votes: sums over all ranks of the ``votes`` given to ``TrainStep.compute_gradients``.
        attention_share: work of attention in the global batch, relative to sequences of one document each.
    """

    loss: float
    grad_norm: float
    num_valid: int
    loss_scale: float
    num_zeros: float = 0.0
    params_norm: float = 0.0
    votes: tuple[float, ...] = ()
    attention_share: float = 1.0

    @property
    def has_labels(self) -> bool:
        return self.num_valid > 0

    @property
    def is_finite(self) -> bool:
        """Whether the gradient norm is finite, and the loss too, unless the batch has no label and so no loss."""
        return math.isfinite(self.grad_norm) and (math.isfinite(self.loss) or not self.has_labels)

    @property
    def allows_update(self) -> bool:
        return self.has_labels and self.is_finite


class StepNumbers(NamedTuple):
    """``StepTotals`` on the device, where the host has not waited for them yet.

    Attributes:
        on_device: fp64 numbers, the same on every rank: valid tokens, and sums over all ranks in the order in which
            ``read`` takes them.
        loss_scale: see ``StepTotals``.
    """

    on_device: torch.Tensor
    loss_scale: float

    def read(self) -> StepTotals:
        """Wait until the device has computed the numbers, and return them."""
        num_valid, loss_sum, squared_gradients, zeros, squared_weights, attention, *sums = self.on_device.tolist()
        return StepTotals(
            loss=loss_sum / self.loss_scale if num_valid else math.nan,
            grad_norm=math.sqrt(squared_gradients) / self.loss_scale, num_valid=round(num_valid),
            loss_scale=self.loss_scale, num_zeros=zeros, params_norm=math.sqrt(squared_weights), votes=tuple(sums),
            attention_share=attention)

    def gradient_scale(self, clip: float) -> GradientScale:
        """Return what the update does with the gradients: as ``allows_update`` and ``clip_factor`` say, on the device.

        A few operators do it, because on a GPU each takes the time of its launch.
        """
        if clip > 0:
            divisor = ((self.on_device[2].sqrt() + CLIP_EPSILON * self.loss_scale) / clip).clamp(min=self.loss_scale)
        else:
            divisor = torch.full_like(self.on_device[2], self.loss_scale)
        # Loss and squared norm times 0: 0 if both are finite, else NaN, which is not above 0.
        allowed = torch.add(self.on_device[0], self.on_device[1:3].sum(), alpha=0) > 0
        skip = torch.logical_not(allowed, out=torch.empty((), device=allowed.device))
        return GradientScale(divisor, divisor.float(), skip)


@dataclass(frozen=True)
class TrainStep:
    """What one training step is made of, and its two halves.

    ``Trainer`` runs every step through this class. A proof or a benchmark runs the same code without data set,
    checkpoint or log files::

        step = TrainStep.build(run, build_model(run, mesh), mesh)
        totals = step.compute_gradients(microbatches)      # list[Microbatch]: this rank's part of a global batch
        ...                                                # look at the gradients here, before clipping
        learning_rate = step.update(totals, scheduler_samples=0)

    Between the two calls each ``parameter.grad`` holds the gradient of the mean loss per valid token of the global
    batch, times ``totals.loss_scale``, summed over all ranks and not clipped. Where the parameter is a DTensor the
    gradient has the same placements, so ``parameter.grad.full_tensor()`` is the whole gradient.

    ``train`` makes a step as a whole. It updates the weights before the host has read any number of the step, so that
    a GPU does not wait for the host in between. The results are the same.

    All ranks call these methods, because they communicate.

    Attributes:
        model: the model, or this rank's pipeline stages of it.
        mesh: the mesh that the model lives on.
        engine: runs forward and backward of the microbatches of ``model``.
        optimizer: updates the parameters of ``model``.
        schedule: learning rate and weight decay by number of samples.
        scaler: the loss scale; constant 1 without fp16.
        timers: measure the parts of the step.
        clip_grad: largest global gradient norm; 0 turns clipping off.
        counts_zeros: whether to count zeros in the gradient.
        measures_weights: whether to compute the norm of the weights.
        attention: what the tokens of each layer see, see ``layout.patterns.choice``.
    """

    model: nn.Module
    mesh: ParallelMesh
    engine: Engine
    optimizer: AdamW | SGD
    schedule: Schedule
    scaler: LossScaler
    timers: Timers
    clip_grad: float
    counts_zeros: bool = False
    measures_weights: bool = False
    attention: tuple[LayerAttention, ...] = (LayerAttention(),)

    @classmethod
    def build(cls, run: Run, model: nn.Module, mesh: ParallelMesh, timers: Timers | None = None) -> TrainStep:
        """Build engine, optimizer, schedule and loss scale as the run's flags say.

        Args:
            timers: default: measure nothing.
        """
        timers = timers or Timers()
        return cls(model, mesh, build_engine(run, model, mesh, timers), build_optimizer(run, model), Schedule.of(run),
                   LossScaler(run.precision), timers, clip_grad=run.optimizer.clip_grad,
                   counts_zeros=run.logging.log_num_zeros_in_grad, measures_weights=run.logging.log_params_norm,
                   attention=layer_attention(run.model))

    def compute_gradients(self, microbatches: Sequence[Microbatch],
                          votes: Callable[[], Sequence[float]] = tuple) -> StepTotals:
        """Add the gradients of one global batch to the parameters, which hold none before.

        Args:
            microbatches: this rank's tokens of the global batch, on the model's device or in host memory.
            votes: called after backward; returns numbers of this rank that are summed over all ranks in the same
                reduction (whether the rank was asked to stop, for example).

        Raises:
            TrainingError: a parameter got no gradient.
        """
        numbers = self._add_gradients(microbatches, votes)
        with self.timers("optimizer"):
            return numbers.read()

    def _add_gradients(self, microbatches: Sequence[Microbatch], votes: Callable[[], Sequence[float]]) -> StepNumbers:
        """Do what ``compute_gradients`` does, without waiting for the numbers."""
        scale = self.scaler.scale
        with self.timers("forward-backward"):
            # ``full`` is a kernel. A copy of a Python number would wait until the device has finished the last step.
            mine = torch.full((), sum(batch.num_valid for batch in microbatches), device=self.mesh.device)
            num_valid = self.mesh.sum_over(mine, "fsdp")
            # One factor divides by the number of valid tokens and multiplies with the loss scale. Without any valid
            # token all losses are 0, and so are the gradients.
            loss = self.engine.forward_backward(microbatches, num_valid.clamp(min=1) / scale)
        with self.timers("optimizer"):
            return self._reduce(loss, num_valid, scale, self._attention_share(microbatches), votes())

    def _attention_share(self, microbatches: Sequence[Microbatch]) -> float:
        """Return the work of attention in this rank's sequences, relative to sequences of one document each."""
        found = [batch.mask.attention_share(len(batch.tokens), batch.tokens.shape[1] * self.mesh.size("sp"),
                                            self.attention)
                 for batch in microbatches]
        return sum(found) / len(found)

    def _reduce(self, loss: torch.Tensor, valid: torch.Tensor, scale: float, attention_share: float,
                votes: Sequence[float]) -> StepNumbers:
        """Sum this step's numbers over all ranks in one reduction. Every decision is taken from its result.

        Args:
            valid: the valid tokens of the global batch, summed over the ranks before.
        """
        require_all_gradients(self.model)
        mine = torch.tensor([0.0, attention_share / self.mesh.size("world"), *votes], dtype=torch.float64,
                            pin_memory=self.mesh.device.type == "cuda")
        zero, *of_host = mine.to(self.mesh.device, non_blocking=True).unbind()
        tp = self.mesh.size("tp")
        shares = torch.stack([
            loss if tp == 1 else loss.double() / tp,                        # equal on all tp ranks
            squared_norm(self.model, self.mesh),
            num_zeros(self.model, self.mesh) if self.counts_zeros else zero,
            squared_norm(self.model, self.mesh, of_gradients=False) if self.measures_weights else zero, *of_host])
        return StepNumbers(torch.cat((valid.view(1), self.mesh.sum_over(shares, "world"))), scale)

    def train(self, microbatches: Sequence[Microbatch], scheduler_samples: float,
              votes: Callable[[], Sequence[float]] = tuple,
              look: Callable[[StepTotals], None] = lambda totals: None) -> tuple[StepTotals, float]:
        """Compute the gradients of a global batch and update the weights, as the two other methods do.

        The device decides by itself whether it updates the weights. The host launches the update, and then waits for
        the numbers of the step, once.

        Args:
            microbatches, votes: see ``compute_gradients``.
            scheduler_samples: see ``update``.
            look: called with the totals before the gradients are cleared. Where no weight was updated, the parameters
                still hold their gradients; otherwise the gradients may be clipped or not.

        Returns:
            the totals and the learning rate of the step
        """
        numbers = self._add_gradients(microbatches, votes)
        self.before_update(numbers)
        with self.timers("optimizer"):
            learning_rate = self.schedule.apply(self.optimizer, scheduler_samples)
            self._apply(numbers)
            totals = numbers.read()
        look(totals)
        self._finish(totals)
        return totals, learning_rate

    def before_update(self, numbers: StepNumbers) -> None:
        """Do nothing. A subclass can look at the gradients of a step here, before ``train`` updates the weights."""

    def _apply(self, numbers: StepNumbers) -> None:
        """Update the weights if the numbers allow it, without knowing them."""
        scale = numbers.gradient_scale(self.clip_grad)
        place = next(self.model.parameters()).device
        if place != self.mesh.device:  # offloaded weights are updated by the host, which has to wait
            scale = GradientScale(*(number.to(place) for number in scale))
        self.optimizer.step(scale=scale)

    def update(self, totals: StepTotals, scheduler_samples: float) -> float:
        """Update the weights with the gradients they hold, then clear the gradients.

        The weights stay as they are when loss or gradients are not finite, or when no token of the batch had a label.

        Args:
            totals: of ``compute_gradients``.
            scheduler_samples: samples of earlier steps that updated the weights; the schedule depends on them.

        Returns:
            the learning rate of this step
        """
        with self.timers("optimizer"):
            learning_rate = self.schedule.apply(self.optimizer, scheduler_samples)
            if totals.allows_update:
                scale_gradients(self.model, clip_factor(totals.grad_norm, self.clip_grad) / totals.loss_scale)
                self.optimizer.step()
        self._finish(totals)
        return learning_rate

    def _finish(self, totals: StepTotals) -> None:
        """Clear the gradients and adapt the loss scale."""
        with self.timers("optimizer"):
            self.optimizer.zero_grad()
            if totals.has_labels or not totals.is_finite:
                self.scaler.update(overflow=not totals.is_finite)
