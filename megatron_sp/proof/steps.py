"""Make training steps in any layout with the framework's own trainer, and return whole gradients and weights.

The steps use the data reader, reduction, loss scale, clipping, schedule and optimizer of real training. Only logs and
checkpoints are left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_sp.config.schema import Run
from megatron_sp.data.batch import Readers
from megatron_sp.model.build import build_model
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.pipeline import Stages
from megatron_sp.proof.data import END, local_microbatches, read_from_memory
from megatron_sp.proof.reference import Batch, Drop, Step, Weights, documents_after, keep_all, reference_training
from megatron_sp.torch_internals import silence_redistribution
from megatron_sp.train.checkpoints.state import TrainState
from megatron_sp.train.report.recorder import Recorder
from megatron_sp.train.report.timers import Timers
from megatron_sp.train.signals import StopSignals
from megatron_sp.train.train_step import StepNumbers, StepTotals, TrainStep
from megatron_sp.train.trainer import Trainer

# torch warns for every parameter that gathering whole tensors is slow. A proof gathers them on purpose.
silence_redistribution()

#: A function that makes a model: ``build_model``, or in tests of the proof one that puts a fault into the model.
Build = Callable[..., nn.Module]

#: A difference is relative to the largest element of its tensor, but at least to this share of the largest element of
#: all tensors: the rounding errors of a nearly zero gradient can be as large as the gradient.
FLOOR = 1e-3


class SilentRecorder(Recorder):
    """A recorder that writes no logs and keeps the losses of evaluations by the name of the data set."""

    def __init__(self, run: Run, mesh: ParallelMesh, timers: Timers):
        super().__init__(run, mesh.device, timers, TrainState(), is_writer=False)
        self.losses: dict[str, float] = {}

    def evaluation(self, losses: Mapping[str, float], *where: int) -> None:
        """Keep the losses instead of writing them."""
        self.losses |= losses


@dataclass(frozen=True)
class ObservedStep(TrainStep):
    """The framework's training step with observers, which see the gradients before each update.

    Attributes:
        observers: functions that are called before each update with the totals of the step.
    """

    observers: list[Callable[[StepTotals], None]] = field(default_factory=list)

    def before_update(self, numbers: StepNumbers) -> None:
        """Call the observers; ``TrainStep`` then updates the weights."""
        if self.observers:
            totals = numbers.read()
            for observe in self.observers:
                observe(totals)


def trainer_without_signals(run: Run, step: TrainStep, readers: Readers, recorder: Recorder) -> Trainer:
    """Return the framework's trainer before its first step. It handles no signals, so Ctrl-C ends the proof."""
    return Trainer(run, step, readers, TrainState(), recorder, StopSignals(()), started=time.monotonic())


def run_trainer(trainer: Trainer, count: int, *, details: bool = True) -> list[Step]:
    """Make ``count`` training steps and return their results, which are equal on every rank.

    Args:
        trainer: its step is an ``ObservedStep``.
        count: number of steps.
        details: whether to gather gradients, and the weights after every step; otherwise only the last weights.
    """
    run, model, mesh, step = trainer.run, trainer.model, trainer.mesh, trainer.step
    gradients: list[Weights] = []

    def keep_gradients(totals: StepTotals) -> None:
        whole = whole_tensors(run, model, mesh, lambda parameter: parameter.grad)
        gradients.append({name: gradient / totals.loss_scale for name, gradient in whole.items()})

    assert isinstance(step, ObservedStep)
    if details:
        step.observers.append(keep_gradients)
    steps = []
    for number in range(count):
        report = trainer.train_step()
        wanted = details or number == count - 1
        after = whole_tensors(run, model, mesh, lambda parameter: parameter) if wanted else {}
        steps.append(Step(report.lm_loss, report.grad_norm, gradients[-1] if details else {}, after,
                          report.learning_rate))
    return steps


def train_in_layout(run: Run, weights: Weights, batches: Sequence[Batch], *, build: Build = build_model,
                    mesh: ParallelMesh | None = None, details: bool = True) -> list[Step]:
    """On a rank: make one training step for each batch with the framework's trainer and return the results.

    Args:
        run: the layout, model and optimizer.
        weights: whole initial weights by name. The parameters are stored in their type.
        batches: global batches as ``proof.data.batch`` makes them.
        build: makes the model; default: as in real training.
        mesh: the mesh of ``run.parallel``; default: a new one.
        details: see ``run_trainer``.

    Returns:
        The results of each step, equal on every rank.
    """
    mesh = mesh or ParallelMesh.build(run.parallel)
    model = build(run, mesh, dtype=next(iter(weights.values())).dtype)
    load_full(model, weights)
    timers = Timers()
    with read_from_memory(run, mesh, batches) as reader:
        trainer = trainer_without_signals(run, ObservedStep.build(run, model, mesh, timers), Readers(reader),
                                SilentRecorder(run, mesh, timers))
        return run_trainer(trainer, len(batches), details=details)


def step_in_layout(run: Run, weights: Weights, tokens: Tensor, labels: Tensor, *, build: Build = build_model,
                   mesh: ParallelMesh | None = None) -> Step:
    """On a rank: compute the gradients of one global batch without an update. The result is equal on every rank.

    Args:
        run: the layout and model.
        weights: whole weights by name.
        tokens, labels: the global batch, ``[B, s]`` each.
        build: makes the model; default: as in real training.
        mesh: the mesh of ``run.parallel``; default: a new one.
    """
    mesh = mesh or ParallelMesh.build(run.parallel)
    model = build(run, mesh, dtype=next(iter(weights.values())).dtype)
    load_full(model, weights)
    step = TrainStep.build(run, model, mesh)
    totals = step.compute_gradients(local_microbatches(run, mesh, tokens, labels))
    gradients = whole_tensors(run, model, mesh, lambda parameter: parameter.grad)
    return Step(totals.loss, totals.grad_norm,
                {name: gradient / totals.loss_scale for name, gradient in gradients.items()})


def whole_tensors(run: Run, model: nn.Module, mesh: ParallelMesh,
                  of: Callable[[nn.Parameter], Tensor | None]) -> Weights:
    """Return a whole tensor for every parameter of all pipeline stages, by name; NaN where copies differ.

    A tied weight has a copy on the first and on the last stage.

    Args:
        of: returns the tensor to gather for a parameter: the parameter itself, or its gradient.
    """
    mine = [(name, gather_full(name, of(parameter), run)) for name, parameter in named(model)]
    stages: list[list[tuple[str, Tensor]]] = [mine]
    if mesh.size("pp") > 1:
        stages = [[] for _ in range(mesh.size("pp"))]
        dist.all_gather_object(stages, mine, mesh.group("pp"))
    whole: Weights = {}
    for name, tensor in (pair for stage in stages for pair in stage):
        same = name not in whole or torch.equal(whole[name], tensor)
        whole[name] = tensor if same else torch.full_like(tensor, math.nan)
    return whole


def reference_step(run: Run, weights: Weights, tokens: Tensor, labels: Tensor, drop: Drop = keep_all) -> Step:
    """Return the plain model's training step on a global batch (``[B, s]`` each)."""
    return reference_training(weights, run, [(tokens, labels)], lambda first: drop, documents_after(END))[0]


def differences(step: Step, expected: Step) -> dict[str, float]:
    """Return the relative differences of the loss, the gradient norm and every gradient (``tensor_differences``)."""
    found = {"loss": abs(step.loss / expected.loss - 1), "grad_norm": abs(step.grad_norm / expected.grad_norm - 1)}
    return {name: _finite(value) for name, value in found.items()} | tensor_differences(step.gradients,
                                                                                       expected.gradients)


def tensor_differences(ours: Weights, theirs: Weights) -> dict[str, float]:
    """Return for each tensor the largest difference of an element, relative to its largest element (see ``FLOOR``).

    A tensor that is missing on one side or has another shape counts as infinitely different.
    """
    largest = max(float(tensor.abs().max()) for tensor in theirs.values())
    found = {}
    for name in ours.keys() | theirs.keys():
        mine, want = ours.get(name), theirs.get(name)
        if mine is None or want is None or mine.shape != want.shape:
            found[name] = math.inf
            continue
        scale = max(float(want.abs().max()), FLOOR * largest)
        found[name] = _finite(float((mine - want).abs().max()) / scale)
    return found


def _finite(difference: float) -> float:
    """Return the difference, or infinity for NaN, because every comparison with NaN is false."""
    return difference if difference == difference else math.inf


def named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters with their logical names: both copies of a tied embedding have the name of the first one."""
    copy = model.tied.last if isinstance(model, Stages) and model.tied is not None else None
    for name, parameter in model.named_parameters():
        yield "embedding.word.weight" if parameter is copy else name, parameter


def load_full(model: nn.Module, weights: Weights) -> None:
    """Set every parameter to its shard of a whole tensor; padding rows become 0.

    This works for any sharding, because it asks torch which rank owns which element. Each rank numbers the elements of
    its shard with numbers that no other rank uses, and gathers the whole tensor of numbers. The place at which one of
    its own numbers then stands is the place of that element in the whole tensor.
    """
    parameters = list(named(model))
    names = {name for name, _ in parameters}
    assert names <= weights.keys() if isinstance(model, Stages) else names == weights.keys(), names ^ weights.keys()
    rank = dist.get_rank()
    with torch.no_grad():
        for name, parameter in parameters:
            full = torch.zeros(parameter.shape, dtype=parameter.dtype)
            assert full.shape[1:] == weights[name].shape[1:], name
            full[:len(weights[name])] = weights[name]
            if not isinstance(parameter, DTensor):
                parameter.copy_(full)
                continue
            local = parameter.to_local()
            local.copy_(torch.arange(local.numel()).view(local.shape) + rank * full.numel())
            places = parameter.full_tensor().long() - rank * full.numel()  # exact in fp32, since proofs stay below 2^24
            mine = (places >= 0) & (places < full.numel())
            values = torch.full((local.numel(),), float("nan"), dtype=full.dtype)
            values[places[mine]] = full[mine]
            local.copy_(values.view(local.shape))


def gather_full(name: str, tensor: Tensor | None, run: Run) -> Tensor:
    """Return a whole parameter or gradient without the padding of the vocabulary.

    Args:
        name: logical name of the parameter.
        tensor: the parameter or its gradient, perhaps sharded.
        run: gives the vocabulary size.

    Raises:
        AssertionError: the tensor is None, or its padding rows are not 0.
    """
    assert tensor is not None, name
    full = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
    if name in ("embedding.word.weight", "output.weight"):
        assert not full[run.model.vocab_size:].any(), "padding of the vocabulary is not 0"
        full = full[:run.model.vocab_size]
    return full.clone()
