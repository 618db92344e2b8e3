"""Compare a training in a layout with the training of the plain model, and find the axis that causes a difference."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megatron_sp.config.resolve import resolve
from megatron_sp.config.rules.checks import check_problems
from megatron_sp.config.schema import Memory, Parallel, Precision, Run, Schedule
from megatron_sp.data.batch import BatchReader
from megatron_sp.model.build import build_model
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.proof.data import document_numbers, whole_batches, write_documents
from megatron_sp.proof.processes import ProcessesFailedError, run_processes
from megatron_sp.proof.reference import (
    Step,
    Weights,
    keyed_dropout,
    random_weights,
    reference_evaluation,
    reference_training,
)
from megatron_sp.proof.steps import (
    Build,
    ObservedStep,
    SilentRecorder,
    load_full,
    run_trainer,
    tensor_differences,
    trainer_without_signals,
)
from megatron_sp.train.checkpoints.state import TrainState
from megatron_sp.train.report.timers import Timers
from megatron_sp.train.setup import build_readers, choose_tokenizer

#: Number of steps with the run's optimizer, and of the trainings with SGD and in half precision that follow.
NUM_STEPS, FURTHER_STEPS = 3, 2
#: Largest relative difference in fp64 that passes.
TOLERANCE = 1e-9
#: The same in half precision: for losses and norms, for all gradients together, for the change of all weights together.
TOLERANCES_HALF = (3e-2, 0.1, 3e-2)
#: Seconds that the processes of a proof may take.
TIMEOUT = 300.0
#: Learning rate of SGD, large enough for one step to change the weights visibly. SGD shows a wrong constant factor of
#: the gradients, which Adam cancels.
SGD_RATE = 0.1


@dataclass
class StepDifferences:
    """The relative differences of one step, each the largest that any rank found.

    Attributes:
        name: name of the training and number of the step in it.
        numbers: differences of the loss, the gradient norm and the learning rate; at the last step of a training also
            of the evaluation's loss.
        gradients: differences of the gradients before the update, by parameter name.
        weights: differences of the weights after the update, by parameter name.
        limits: tolerances of ``numbers``, ``gradients`` and ``weights``.
    """

    name: str
    numbers: dict[str, float]
    gradients: dict[str, float]
    weights: dict[str, float]
    limits: tuple[float, float, float] = (TOLERANCE, TOLERANCE, TOLERANCE)

    def exceeding(self) -> dict[str, float]:
        """Return the differences that are beyond their tolerances, by the name of the value."""
        of_numbers, of_gradients, of_weights = self.limits
        found = {name: value for name, value in self.numbers.items() if not value <= of_numbers}
        found |= {f"gradient of {name}": value for name, value in self.gradients.items() if not value <= of_gradients}
        return found | {f"weight {name}": value for name, value in self.weights.items() if not value <= of_weights}


@dataclass
class Verdict:
    """The outcome of a proof.

    Attributes:
        steps: the differences of each step; empty if the layout did not run.
        error: why it did not run, or "".
        healed_by: simplifications of one axis with which all steps are right.
    """

    steps: list[StepDifferences] = field(default_factory=list)
    error: str = ""
    healed_by: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.error and bool(self.steps) and not self.first_failure()[1]

    def first_failure(self) -> tuple[str, dict[str, float]]:
        """Return the name of the first step with differences beyond their tolerances, and these, largest first."""
        for step in self.steps:
            if found := step.exceeding():
                return step.name, dict(sorted(found.items(), key=lambda item: -item[1]))
        return "", {}


# ---------------------------------------------------------------- on the ranks


@dataclass
class Trained:
    """The results of a training in the layout, on one rank: its steps, the evaluation's loss, and the data readers."""

    steps: list[Step]
    evaluation: float
    train: BatchReader
    valid: BatchReader


def compare_trainings(run: Run, num_steps: int, build: Build, half: Precision | None) -> list[StepDifferences]:
    """On a rank: train in the layout and with the plain model from the same random weights, and compare the steps.

    Args:
        run: a small run in fp64.
        num_steps: number of steps with the run's optimizer.
        build: makes the model.
        half: also train in this half precision, if given.

    Returns:
        The differences of each step, the largest over all ranks: first with the run's optimizer in fp64, then with SGD
        in fp64, then with SGD in half precision.
    """
    mesh, weights = ParallelMesh.build(run.parallel), random_weights(run)
    sgd = replace(run, optimizer=replace(run.optimizer, optimizer="sgd"), schedule=_with_peak_rate(run, SGD_RATE))
    trainings = [(run.optimizer.optimizer, run), *([("sgd", sgd)] if run.optimizer.optimizer != "sgd" else [])]
    found = []
    with tempfile.TemporaryDirectory(prefix="proof_") as directory:
        prefix = Path(directory) / "documents"
        write_documents(run, prefix)
        data = replace(run.data, mock_data=False, data_path=(str(prefix),))
        for name, one in trainings:
            one, steps = replace(one, data=data), num_steps if one is run else min(num_steps, FURTHER_STEPS)
            ours = train(one, weights, steps, mesh, build)
            found += differences_of(name, ours, expect(one, weights, ours))
        if half is not None:
            rounded = {name: weight.float() for name, weight in weights.items()}
            exact, steps = replace(sgd, data=data), min(num_steps, FURTHER_STEPS)
            ours = train(replace(exact, precision=half), rounded, steps, mesh, build)
            expected = expect(exact, {name: weight.double() for name, weight in rounded.items()}, ours)
            found += half_differences_of(half.dtype, rounded, ours, expected)
    return _largest_over_ranks(found)


def _with_peak_rate(run: Run, rate: float) -> Schedule:
    """Return the run's schedule with all learning rates scaled by one factor, so that the peak is ``rate``."""
    schedule = run.schedule
    factor = rate / schedule.lr
    return replace(schedule, lr=rate, min_lr=schedule.min_lr * factor, lr_warmup_init=schedule.lr_warmup_init * factor)


def train(run: Run, weights: Weights, num_steps: int, mesh: ParallelMesh, build: Build) -> Trained:
    """Train with the framework's data sets, readers and trainer, and evaluate once after the last step."""
    model = build(run, mesh, dtype=next(iter(weights.values())).dtype)
    load_full(model, weights)
    timers = Timers()
    recorder = SilentRecorder(run, mesh, timers)
    readers = build_readers(run, choose_tokenizer(run), mesh, TrainState(), recorder)
    assert readers.train is not None and readers.valid is not None
    trainer = trainer_without_signals(run, ObservedStep.build(run, model, mesh, timers), readers, recorder)
    try:
        steps = run_trainer(trainer, num_steps)
        trainer.evaluate("valid")
    finally:
        for reader in readers.all():
            reader.close()
    return Trained(steps, recorder.losses["valid"], readers.train, readers.valid)


def expect(run: Run, weights: Weights, ours: Trained) -> tuple[list[Step], float]:
    """Train the plain model on the samples that ``ours`` used. Rank 0 does it and sends the result to all ranks.

    Returns:
        The steps, and the loss of an evaluation after the last one.
    """
    box: list[tuple[list[Step], float] | None] = [None]
    if dist.get_rank() == 0:
        batches = whole_batches(run, ours.train.dataset, len(ours.steps))
        steps = reference_training(weights, run, batches, partial(keyed_dropout, run),
                                   document_numbers(run, ours.train.dataset))
        held_out = whole_batches(run, ours.valid.dataset, run.train.eval_iters)
        box = [(steps, reference_evaluation(steps[-1].weights, run, held_out,
                                           document_numbers(run, ours.valid.dataset)))]
    dist.broadcast_object_list(box)
    assert box[0] is not None
    return box[0]


def _off(ours: float, theirs: float) -> float:
    """Return the relative difference of two numbers, or infinity if ours is not finite."""
    return abs(ours - theirs) / max(abs(theirs), 1e-300) if math.isfinite(ours) else math.inf


def _numbers(ours: Step, theirs: Step) -> dict[str, float]:
    return {"loss": _off(ours.loss, theirs.loss), "gradient norm": _off(ours.grad_norm, theirs.grad_norm),
            "learning rate": _off(ours.learning_rate, theirs.learning_rate)}


def differences_of(name: str, ours: Trained, expected: tuple[list[Step], float]) -> list[StepDifferences]:
    """Return the differences of each step of a training in fp64 from the plain model's step."""
    found = [StepDifferences(f"{name} {number}", _numbers(mine, theirs),
                             tensor_differences(mine.gradients, theirs.gradients),
                             tensor_differences(mine.weights, theirs.weights))
             for number, (mine, theirs) in enumerate(zip(ours.steps, expected[0], strict=True), start=1)]
    found[-1].numbers["evaluation loss"] = _off(ours.evaluation, expected[1])
    return found


def half_differences_of(name: str, start: Weights, ours: Trained,
                        expected: tuple[list[Step], float]) -> list[StepDifferences]:
    """Return the differences of each step of a training in half precision from the plain model's step in fp64.

    Rounding can change single elements a lot. So all gradients are compared together, by the norm of the difference
    relative to the norm of the gradients, and the changes of all weights since the start in the same way.
    """
    found = []
    for number, (mine, theirs) in enumerate(zip(ours.steps, expected[0], strict=True), start=1):
        change = [{name: weights[name].double() - start[name].double() for name in start}
                  for weights in (mine.weights, theirs.weights)]
        found.append(StepDifferences(
            f"{name} {number}", _numbers(mine, theirs), {"all weights": _distance(mine.gradients, theirs.gradients)},
            {"changes": _distance(*change)},
            TOLERANCES_HALF))
    found[-1].numbers["evaluation loss"] = _off(ours.evaluation, expected[1])
    return found


def _distance(ours: Weights, theirs: Weights) -> float:
    """Return the norm of the difference of all tensors relative to the norm of ``theirs``; infinity for NaN."""
    squares = sum(float((ours[name].double() - theirs[name].double()).square().sum()) for name in theirs)
    whole = sum(float(theirs[name].double().square().sum()) for name in theirs)
    return math.sqrt(squares / whole) if math.isfinite(squares) else math.inf


def _largest_over_ranks(found: Sequence[StepDifferences]) -> list[StepDifferences]:
    """Return the steps with the largest difference that any rank found for each value."""
    every: list[Sequence[StepDifferences]] = [()] * dist.get_world_size()
    dist.all_gather_object(every, found)

    def largest(parts: Sequence[dict[str, float]]) -> dict[str, float]:
        return {name: max(part.get(name, math.inf) for part in parts) for name in parts[0].keys() | parts[-1].keys()}

    return [replace(same[0], numbers=largest([step.numbers for step in same]),
                    gradients=largest([step.gradients for step in same]),
                    weights=largest([step.weights for step in same]))
            for same in zip(*every, strict=True)]


# ---------------------------------------------------------------- without a launcher


def verify(run: Run, *, num_steps: int = NUM_STEPS, build: Build = build_model, diagnose: bool = True,
           half: Precision | None = None) -> Verdict:
    """Prove a small run (see ``shrink``) on processes of this machine.

    Args:
        run: the small run, in fp64.
        num_steps: number of steps with the run's optimizer; other trainings have at most ``FURTHER_STEPS``.
        build: makes the model; default: as in real training.
        diagnose: whether to run a layout that fails again without one axis at a time, to find the one at fault.
        half: also train in this half precision, and compare with larger tolerances.
    """
    try:
        verdict = Verdict(run_processes(compare_trainings, run.parallel.world_size, run, num_steps, build, half,
                                        timeout=TIMEOUT))
    except ProcessesFailedError as error:
        verdict = Verdict(error=str(error))
    if diagnose and not verdict.passed:
        steps = min(num_steps, 2)
        verdict.healed_by = [what for what, simpler in simplifications(run)
                             if verify(simpler, num_steps=steps, build=build, diagnose=False, half=half).passed]
    return verdict


def simplifications(run: Run) -> Iterator[tuple[str, Run]]:
    """Yield the name of an axis and the run without it, for one axis at a time, the rarest axes first.

    Runs that break a rule of the configuration are left out.
    """
    parallel, train = run.parallel, run.train
    plain_pipeline = dict(pipeline_schedule="", stages_per_rank=0, pipeline_layers=(), layers_per_virtual_stage=0)
    changes: list[tuple[str, bool, dict[str, object]]] = [
        ("--sequence-parallel", parallel.megatron_sp and parallel.tp > 1, dict(megatron_sp=False)),
        (f"--pipeline-schedule {parallel.pipeline_schedule}", parallel.pp > 1 and parallel.pipeline_schedule != "1f1b",
         plain_pipeline),
        (f"--zero-stage {parallel.zero_stage}", parallel.zero_stage > 0, dict(zero_stage=0)),
        (f"--fsdp-size {parallel.fsdp_size}", parallel.fsdp_size not in (0, parallel.fsdp), dict(fsdp_size=0)),
        (f"--ulysses-size {parallel.ulysses}", parallel.ulysses > 1,
         dict(ulysses=1, ulysses_overlap_groups=0)),
        (f"--ring-size {parallel.ring}", parallel.ring > 1, dict(ring=1)),
        (f"--tensor-model-parallel-size {parallel.tp}", parallel.tp > 1, dict(tp=1, megatron_sp=False)),
        (f"--pipeline-model-parallel-size {parallel.pp}", parallel.pp > 1, dict(pp=1, **plain_pipeline)),
    ]
    for what, is_used, change in changes:
        if is_used:
            yield from _allowed(what, run, replace(parallel, **change))  # type: ignore[arg-type]
    if run.memory.sequence_chunk_size:
        whole = replace(run.memory, sequence_chunk_size=0, offload_key_values=False)
        yield from _allowed("--sequence-chunk-size", replace(run, memory=whole), parallel)
    if run.memory != Memory():
        yield from _allowed("recomputation, tiling and offload", replace(run, memory=Memory()), parallel)
    if parallel.dp > 1:
        yield from _allowed(f"data parallelism over {parallel.dp}", run, parallel, dp=1)
    size = train.global_batch_size // parallel.dp
    if size != train.micro_batch_size and parallel.pp == 1:
        yield from _allowed("accumulation", replace(run, train=replace(train, micro_batch_size=size)), parallel)


def _allowed(what: str, run: Run, parallel: Parallel, dp: int = 0) -> Iterator[tuple[str, Run]]:
    world = parallel.tp * parallel.pp * parallel.sp * (dp or run.parallel.dp)
    whole = run.parallel.fsdp_size in (0, run.parallel.fsdp)
    parallel = replace(parallel, fsdp_size=0 if whole else parallel.fsdp_size)
    simpler = resolve(replace(run, parallel=parallel), world)
    if not check_problems(simpler):
        yield what, simpler
