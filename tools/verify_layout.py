#!/usr/bin/env python3
"""Prove on CPU that a layout trains exactly as one process would, before a cluster is spent on it.

Give it the command line of pretrain_gpt.py. It makes the run small, so that it takes the same branches of the code, and
trains it on at most 16 processes of this machine through the same data reader, trainer and optimizer: with the run's
optimizer and with SGD in float64, and roughly in the run's half precision. Then it compares with a plain model on one
process: loss, learning rate, global gradient norm, every gradient, every weight, and the loss of an evaluation. Where
one replica does not fit, it shrinks the degrees of parallelism to the smallest ones of the same kind, and says which.
No data, tokenizer or GPU is needed.

  verify_layout.py FLAGS OF pretrain_gpt.py [--world-size N]

--world-size N: processes of the real run (default: WORLD_SIZE, else the product of the degrees).
Exit status: 0 PASS, 1 FAIL, 2 nothing could be proven (wrong flags, or too large to prove here).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

CHECKOUT = Path(__file__).resolve().parent.parent
if (CHECKOUT / "megatron_sp").is_dir():  # false once pip has installed this file, which then finds the package anyway
    sys.path.insert(0, str(CHECKOUT))

from megatron_sp.config.cli.flags import parse  # noqa: E402
from megatron_sp.config.load import load_run  # noqa: E402
from megatron_sp.config.resolve import resolve  # noqa: E402
from megatron_sp.config.schema import Run  # noqa: E402
from megatron_sp.errors import ConfigError  # noqa: E402
from megatron_sp.proof.shrink import shrink  # noqa: E402
from megatron_sp.runtime import announced_world_size, run_program, use_only_cpu  # noqa: E402

if TYPE_CHECKING:
    from megatron_sp.proof.verify import Verdict

WORLD_SIZE = "--world-size"


def read(argv: list[str]) -> tuple[Run, list[str]]:
    """The resolved run of a command line, and the notes on it."""
    argv, given = [part for word in argv
                   for part in (word.split("=", 1) if word.startswith(f"{WORLD_SIZE}=") else [word])], "0"
    if WORLD_SIZE in argv:
        index = argv.index(WORLD_SIZE)
        given = argv[index + 1] if index + 1 < len(argv) else ""
        del argv[index:index + 2]
        if not given.isdigit() or int(given) < 1:
            raise ConfigError(f"{WORLD_SIZE} {given}: give the number of processes of the real run, at least 1")
    return load_run(argv, int(given) or announced_world_size() or smallest_world(argv), files=False)


def smallest_world(argv: list[str]) -> int:
    """The product of the degrees."""
    parallel = resolve(parse(argv).run, 1).parallel
    return max(1, parallel.tp * parallel.pp * parallel.sp)


def print_table(verdict: Verdict) -> None:
    """Print the worst relative difference of each kind, step by step."""
    print(f"{'step':<12} {'loss':>9} {'grad norm':>9} {'gradient':>9} {'weight':>9}  worst gradient")
    for step in verdict.steps:
        worst = max(step.gradients, key=lambda name: step.gradients[name])
        print(f"{step.name:<12} {step.numbers['loss']:9.1e} {step.numbers['gradient norm']:9.1e} "
              f"{step.gradients[worst]:9.1e} {max(step.weights.values()):9.1e}  {worst}")


def explain(verdict: Verdict) -> None:
    """What is wrong, and where to look."""
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
        return 0 if argv else 2     # a script whose flags are empty has proven nothing
    started = time.monotonic()
    use_only_cpu()
    run, notes = read(argv)
    small = shrink(run)
    parallel = small.run.parallel
    degrees = {"tensor": parallel.tp, "pipeline": parallel.pp, "Ulysses": parallel.ulysses, "ring": parallel.ring,
               "data": parallel.dp}
    said = ", ".join(f"{name} {size}" for name, size in degrees.items() if size > 1) or "one process"
    schedule = f", schedule {parallel.pipeline_schedule} with {parallel.stages_per_rank} stages per rank"
    print("\n".join([*notes, *small.notes]))
    print(f"proving {said}, ZeRO stage {parallel.zero_stage}{schedule if parallel.pp > 1 else ''} on "
          f"{parallel.world_size} processes in float64", flush=True)

    from megatron_sp.proof.verify import verify

    verdict = verify(small.run, half=small.half)
    if verdict.steps:
        print_table(verdict)
    if not verdict.passed:
        explain(verdict)
    print(f"{'PASS' if verdict.passed else 'FAIL'} in {time.monotonic() - started:.0f} s")
    return 0 if verdict.passed else 1


if __name__ == "__main__":
    run_program(main)
