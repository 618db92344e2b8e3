#!/usr/bin/env python3
"""Prove on CPUs that a run in some parallel layout trains as one process would, before a cluster runs it.

usage: verify_layout.py [-h] [--world-size N] FLAGS OF pretrain_gpt.py

The tool makes the run small in such a way that it still takes the same branches of the code. It trains the small run
on at most 16 processes of this machine, through the data reader, trainer and optimizer of real training: in float64
with the run's optimizer and with SGD, and in the run's half precision where it has one. Then it compares each step with
a plain model on one process: loss, learning rate, gradient norm, every gradient, every weight, and the loss of an
evaluation; half precision is compared with a large tolerance. If one model replica needs more than 16 processes, the
tool shrinks the parallel degrees and prints which. Before it starts a process, it simulates the sends and receives of
the pipeline with the degrees of the real run. It needs no data, tokenizer or GPU.

options:
  -h, --help        show this help message and exit
  --world-size N    number of processes of the real run (default: the variable WORLD_SIZE, else the product of the
                    parallel degrees)

example:
  python tools/verify_layout.py --world-size 64 --ulysses-size 4 --zero-stage 3 --model-preset llama3-8b \\
      --seq-length 131072 --global-batch-size 16 --train-iters 1000 --lr 3e-5 --bf16 --mock-data --vocab-size 128256

exit status:
  0  PASS
  1  FAIL
  2  nothing could be proven: wrong flags, or a run that is too large to prove here
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

CHECKOUT = Path(__file__).resolve().parent.parent
if (CHECKOUT / "megatron_sp").is_dir():  # false once pip has installed this file, which then finds the package anyway
    sys.path.insert(0, str(CHECKOUT))

from megatron_sp.config.load import load_run_of_world  # noqa: E402
from megatron_sp.plan.lengths import planned_run  # noqa: E402
from megatron_sp.proof.small.shrink import shrink  # noqa: E402
from megatron_sp.runtime import announced_world_size, run_program, use_only_cpu  # noqa: E402

if TYPE_CHECKING:
    from megatron_sp.proof.verify import Verdict


def print_table(verdict: Verdict) -> None:
    """Print a line for each step with the largest relative difference of loss, gradient norm, gradients and weights."""
    print(f"{'step':<12} {'loss':>9} {'grad norm':>9} {'gradient':>9} {'weight':>9}  worst gradient")
    for step in verdict.steps:
        worst = max(step.gradients, key=lambda name: step.gradients[name])
        print(f"{step.name:<12} {step.numbers['loss']:9.1e} {step.numbers['gradient norm']:9.1e} "
              f"{step.gradients[worst]:9.1e} {max(step.weights.values()):9.1e}  {worst}")


def explain(verdict: Verdict) -> None:
    """Print which values differ in the first wrong step, and which axis is most likely at fault."""
    if verdict.error:
        print(f"the layout does not run:\n{verdict.error.rstrip()}")
    step, wrong = verdict.first_failure()
    if wrong:
        print(f"first wrong in step {step} ({len(wrong)} values), relative differences:")
        for name, value in list(wrong.items())[:8]:
            print(f"  {value:9.1e}  {name}")
    if verdict.healed_by:
        print(f"most likely at fault: {verdict.healed_by[0]}")
        print(f"right without any one of: {'; '.join(verdict.healed_by)}")
    else:
        print("no single axis heals it: the fault is in what all layouts share, or in more than one axis")


def main(argv: list[str]) -> int:
    if not argv or "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0 if argv else 2     # no flags, perhaps an empty variable in a script: nothing was proven
    started = time.monotonic()
    use_only_cpu()
    run, notes = load_run_of_world(argv, announced_world_size(), files=False)
    if run.data.seq_length_schedule:
        notes.append("The proof is of one phase of --seq-length-schedule, the last one unless --seq-length-phase names "
                     "another.")
    small = shrink(planned_run(run))
    parallel = small.run.parallel
    degrees = {"tensor": parallel.tp, "pipeline": parallel.pp, "Ulysses": parallel.ulysses, "ring": parallel.ring,
               "data": parallel.dp}
    said = ", ".join(f"{name} {size}" for name, size in degrees.items() if size > 1) or "one process"
    schedule = f", schedule {parallel.pipeline_schedule} with {parallel.stages_per_rank} stages per rank"
    print("\n".join([*notes, *small.notes]))
    print(f"proving {said}, ZeRO stage {parallel.zero_stage}{schedule if parallel.pp > 1 else ''} on "
          f"{parallel.world_size} processes in float64", flush=True)

    from megatron_sp.proof.communication import order_problem
    from megatron_sp.proof.verify import verify

    if problem := order_problem(run):
        print(f"FAIL: with the degrees of the real run some ranks of the pipeline would wait for each other: {problem}")
        return 1
    verdict = verify(small.run, half=small.half)
    if verdict.steps:
        print_table(verdict)
    if not verdict.passed:
        explain(verdict)
    print(f"{'PASS' if verdict.passed else 'FAIL'} in {time.monotonic() - started:.0f} s")
    return 0 if verdict.passed else 1


if __name__ == "__main__":
    run_program(main)
