"""``pretrain_gpt.py --dry-run``: read and check a command line, print what the run will do and need, and stop."""

from __future__ import annotations

import json
from collections.abc import Sequence

from megatron_sp.config.cli.plan_flags import PlanFlags
from megatron_sp.config.load import load_run, smallest_world
from megatron_sp.errors import ConfigError
from megatron_sp.plan.devices import device_of_flags
from megatron_sp.plan.efficiency import choose_techniques
from megatron_sp.plan.lengths import plan_phases, planned_run
from megatron_sp.plan.report import plan_run

DEFAULT_DEVICE = "H100"
DEFAULT_DEVICES_PER_NODE = 8


def dry_run(flags: PlanFlags, argv: Sequence[str], world_size: int, devices_per_node: int = 0) -> int:
    """Print the plan of a command line and return the exit code 0, also where the run does not fit the device.

    Args:
        flags: what to plan for.
        argv: the flags of the run.
        world_size: the launcher's number of processes, where ``flags`` name none. Without a launcher it is 1, and
            then the plan is for as many processes as one copy of the model needs.
        devices_per_node: number of devices per node, as the launcher reports it; 0: unknown.

    Raises:
        ConfigError: with every problem of the command line.
    """
    problems = device_of_flags(flags.device or DEFAULT_DEVICE, "")[1]
    try:
        size = flags.world_size or (world_size if world_size > 1 else smallest_world(argv))
        run, notes = load_run(argv, size, files=False, devices_per_node=devices_per_node, plan=True)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems], error.notes) from None
    if problems:
        raise ConfigError(problems)
    if size > max(1, flags.world_size, world_size):
        notes.append(f"Planned for {size} processes, which one copy of the model needs; --world-size N plans for more.")
    per_node = run.parallel.devices_per_node or DEFAULT_DEVICES_PER_NODE
    memory = run.memory
    device, _ = device_of_flags(flags.device or DEFAULT_DEVICE, memory.device_memory, memory.host_memory,
                                min(size, per_node))
    if memory.memory_efficiency:
        run, chosen = choose_techniques(run, device, per_node)
        notes += chosen
    report, phases = plan_run(planned_run(run), device, per_node), plan_phases(run, device, per_node)
    notes += [*_nodes_note(run.parallel.devices_per_node, devices_per_node, size), *report.memory.notes]
    if flags.json:
        more = {"phases": [phase.to_dict() for phase in phases]} if phases else {}
        print(json.dumps(report.to_dict() | more | {"notes": notes}, indent=1))
        return 0
    default = "" if flags.device else f" (default; say --device NAME for another, or {_several(flags)})"
    precision = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[run.precision.dtype]
    by_phase = [*(phase.text() for phase in phases), *(["the longest phase:"] if phases else [])]
    print("\n".join([*notes, f"device: {device.name}, computing in {precision}{default}", *by_phase, report.text()]))
    if not report.fits:
        print("The plan does not fit; say --memory-efficiency auto to turn on the memory techniques that it needs, "
              "raise --sequence-split or --zero-stage, or look for a layout with tools/plan.py.")
    return 0


def _nodes_note(per_node: int, launched: int, world_size: int) -> list[str]:
    """Return a note that says where the number of devices per node comes from, unless a flag gives it.

    Args:
        per_node: number of devices per node in the run; 0: neither the launcher nor a flag says.
        launched: the processes that the launcher starts on this node; 0: it does not say.
    """
    cure = "--devices-per-node N plans for other nodes."
    if launched and per_node == launched:
        count = "1 device per node, since the launcher starts 1 process" if per_node == 1 else (
            f"{per_node} devices per node, since the launcher starts {per_node} processes")
        return [f"Planned with {count} on this node; {cure}"]
    if not per_node and world_size > DEFAULT_DEVICES_PER_NODE:
        return [f"Planned with {DEFAULT_DEVICES_PER_NODE} devices per node, since nothing says otherwise; {cure}"]
    return []


def _several(flags: PlanFlags) -> str:
    return "--world-size N for more processes" if not flags.world_size else "--device-memory SIZE"
