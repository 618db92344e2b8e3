"""Pretrain a GPT or Llama-type model: ``torchrun --nproc-per-node N pretrain_gpt.py FLAGS`` or one plain process.

Flags are Megatron's; ``--help`` lists them. Mistakes in them are reported before torch is imported. ``--dry-run``
prints what a run will do and need, and starts nothing.
"""

import time

from megatron_sp.checkpoint.checkpoint_args import with_checkpoint_args
from megatron_sp.config.cli.plan_flags import split_plan_flags
from megatron_sp.config.load import load_run
from megatron_sp.runtime import launch_environment, planning_environment, run_program
from megatron_sp.train.signals import StopSignals


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
