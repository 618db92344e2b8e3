"""Pretrain a GPT or Llama-type model: ``torchrun --nproc-per-node N pretrain_gpt.py FLAGS`` or one plain process.

Flags are Megatron's; ``--help`` lists them. Mistakes in them are reported before torch is imported. ``--dry-run``
prints what a run will do and need, and starts nothing.
"""

import sys
import time
from pathlib import Path

CHECKOUT = str(Path(__file__).resolve().parent)
if CHECKOUT not in sys.path:    # Python leaves the script's directory out with -P, -I or PYTHONSAFEPATH
    sys.path.insert(0, CHECKOUT)

from megatron_sp.checkpoint.checkpoint_args import with_checkpoint_args  # noqa: E402
from megatron_sp.config.cli.plan_flags import split_plan_flags  # noqa: E402
from megatron_sp.config.load import load_run  # noqa: E402
from megatron_sp.runtime import launch_environment, planning_environment, run_program  # noqa: E402
from megatron_sp.train.signals import StopSignals  # noqa: E402


def main(argv: list[str]) -> int:
    started = time.monotonic()
    plan, argv = split_plan_flags(argv)
    environment = launch_environment() if plan is None else planning_environment()
    if plan is not None:
        from megatron_sp.plan.dry_run import dry_run

        return dry_run(plan, argv, environment.world_size, environment.local_world_size) if environment.rank == 0 else 0
    argv, taken = with_checkpoint_args(argv)
    run, notes = load_run(argv, environment.world_size, devices_per_node=environment.local_world_size)
    signals = StopSignals.of(run)   # before the slow import of torch, so that no signal is missed

    from megatron_sp.train.setup import pretrain

    return pretrain(run, environment, signals, [*taken, *notes], started=started)


if __name__ == "__main__":
    run_program(main)
