"""Compare a layout's training with the plain model's, and find out which axis is at fault."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from megatron_sp.config.resolve import resolve
from megatron_sp.config.rules.checks import check_problems
from megatron_sp.config.schema import Memory, Parallel, Run
from megatron_sp.model.build import build_model
from megatron_sp.proof.processes import ProcessesFailedError, run_processes
from megatron_sp.proof.reference import random_weights, reference_training
from megatron_sp.proof.steps import Build, batch, tensor_differences, train_in_layout

NUM_STEPS = 3
#: In fp64. What follows an update may differ more: Adam divides by gradients that are nearly 0.
TOLERANCE_FIRST, TOLERANCE_LATER = 1e-9, 1e-6
TIMEOUT = 300.0


@dataclass
class StepDifferences:
    """Relative differences of one step."""

    loss: float
    grad_norm: float
    gradients: dict[str, float]  # before the update
    weights: dict[str, float]  # after it

    def exceeding(self, is_first: bool) -> dict[str, float]:
        """What is beyond the tolerance, by name."""
        before = {"loss": self.loss, "gradient norm": self.grad_norm,
                  **{f"gradient of {name}": value for name, value in self.gradients.items()}}
        limit = TOLERANCE_FIRST if is_first else TOLERANCE_LATER
        found = {name: value for name, value in before.items() if not value <= limit}
        return found | {f"weight {name}": value for name, value in self.weights.items() if not value <= TOLERANCE_LATER}


@dataclass
class Verdict:
    """The outcome of a proof.

    Attributes:
        steps: differences, step by step; empty when the layout did not run.
        error: why it did not run.
        healed_by: changes of one axis that make the first step right.
    """

    steps: list[StepDifferences] = field(default_factory=list)
    error: str = ""
    healed_by: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.error and not self.first_failure()[1]

    def first_failure(self) -> tuple[int, dict[str, float]]:
        """The first step (from 1) with something beyond the tolerance, and what; 0 when there is none."""
        for number, step in enumerate(self.steps, start=1):
            if found := step.exceeding(number == 1):
                return number, dict(sorted(found.items(), key=lambda item: -item[1]))
        return 0, {}


def compare_steps(run: Run, num_steps: int, build: Build) -> list[StepDifferences]:
    """On a rank: train in the layout and plainly, in fp64 from the same random weights, and compare."""
    weights = random_weights(run)
    batches = [batch(run, "ragged", seed) for seed in range(num_steps)]
    ours = train_in_layout(run, weights, batches, build=build)
    import torch.distributed as dist

    if dist.get_rank() > 0:
        return []
    found = []
    for mine, theirs in zip(ours, reference_training(weights, run, batches)):
        loss, norm = (abs(a / b - 1) if math.isfinite(a) else math.inf
                      for a, b in ((mine.loss, theirs.loss), (mine.grad_norm, theirs.grad_norm)))
        found.append(StepDifferences(loss, norm, tensor_differences(mine.gradients, theirs.gradients),
                                     tensor_differences(mine.weights, theirs.weights)))
    return found


def verify(run: Run, *, num_steps: int = NUM_STEPS, build: Build = build_model, diagnose: bool = True) -> Verdict:
    """Prove a small run (see ``shrink``) on processes of this machine.

    Args:
        build: makes the model; default: as every program does.
        diagnose: on failure, run again with one axis reduced at a time.
    """
    try:
        verdict = Verdict(run_processes(compare_steps, run.parallel.world_size, run, num_steps, build,
                                        timeout=TIMEOUT))
    except ProcessesFailedError as error:
        verdict = Verdict(error=str(error))
    if diagnose and not verdict.passed:
        verdict.healed_by = [what for what, simpler in simplifications(run)
                             if verify(simpler, num_steps=1, build=build, diagnose=False).passed]
    return verdict


def simplifications(run: Run) -> Iterator[tuple[str, Run]]:
    """The run with one axis at a time taken out, most special ones first; only those the rules allow."""
    parallel, train = run.parallel, run.train
    plain_pipeline = dict(pipeline_schedule="", stages_per_rank=0, pipeline_layers=(), layers_per_virtual_stage=0)
    changes: list[tuple[str, bool, dict[str, object]]] = [
        ("--sequence-parallel", parallel.megatron_sp and parallel.tp > 1, dict(megatron_sp=False)),
        (f"--pipeline-schedule {parallel.pipeline_schedule}", parallel.pp > 1 and parallel.pipeline_schedule != "1f1b",
         plain_pipeline),
        (f"--zero-stage {parallel.zero_stage}", parallel.zero_stage > 0, dict(zero_stage=0)),
        (f"--fsdp-size {parallel.fsdp_size}", parallel.fsdp_size not in (0, parallel.fsdp), dict(fsdp_size=0)),
        (f"--ulysses-size {parallel.ulysses}", parallel.ulysses > 1, dict(ulysses=1)),
        (f"--ring-size {parallel.ring}", parallel.ring > 1, dict(ring=1)),
        (f"--tensor-model-parallel-size {parallel.tp}", parallel.tp > 1, dict(tp=1, megatron_sp=False)),
        (f"--pipeline-model-parallel-size {parallel.pp}", parallel.pp > 1, dict(pp=1, **plain_pipeline)),
    ]
    for what, is_used, change in changes:
        if is_used:
            yield from _allowed(what, run, replace(parallel, **change))  # type: ignore[arg-type]
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
