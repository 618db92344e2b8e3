"""``--memory-efficiency auto`` in a run: measure the devices, let ranks agree on them, and choose the techniques."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_sp.config.cli.values import parse_size
from megatron_sp.config.schema import Run
from megatron_sp.errors import ConfigError
from megatron_sp.plan.devices import DEVICES, Device, device_like
from megatron_sp.plan.efficiency import choose_techniques
from megatron_sp.plan.machine import node_memory

#: Devices of a node, assumed where neither the launcher nor a flag gives their number.
USUAL_DEVICES_PER_NODE = 8


def with_needed_techniques(run: Run, device: torch.device, local_world_size: int) -> tuple[Run, list[str]]:
    """Return the run with the memory techniques that it needs, and lines for the log. All ranks call it together.

    Ranks may have different devices. All ranks choose for the smallest memory among them, so that they make the same
    choice.

    Args:
        run: a resolved run with known vocabulary sizes.
        device: this rank's device. The process group must exist.
        local_world_size: processes of this node; 0 where the launcher does not say.

    Raises:
        ConfigError: on every rank, no combination of techniques fits.
    """
    per_node = run.parallel.devices_per_node or USUAL_DEVICES_PER_NODE
    processes = local_world_size or min(run.parallel.world_size, per_node)
    return choose_techniques(run, smallest(measure(run, device, processes), device), per_node)


def measure(run: Run, device: torch.device, processes: int) -> Device:
    """Return the memory that this rank can use. Sizes that flags give replace what the machine reports.

    Args:
        processes: number of processes that share the node's host memory.
    """
    flags, name = run.memory, "CPU"
    node = (parse_size(flags.host_memory) if flags.host_memory else node_memory()) // processes
    memory = node
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory = properties.name, properties.total_memory
    return device_like(name, parse_size(flags.device_memory) if flags.device_memory else memory,
                       node if device.type == "cuda" else 0)


def smallest(found: Device, device: torch.device) -> Device:
    """Return the device on which all ranks agree: the least memory of any rank, and one speed for all.

    Raises:
        ConfigError: a rank does not know how much memory it has.
    """
    speeds = list(DEVICES.values())
    speed = next(index for index, known in enumerate(speeds) if known.tflops == found.tflops)
    least = torch.tensor([found.memory, found.host_memory, speed], dtype=torch.int64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    memory, host, speed = least.tolist()
    if memory < 1:
        raise ConfigError("--memory-efficiency auto: this machine does not say how much memory it has; give "
                          "--device-memory SIZE.")
    return device_like(speeds[speed].name, memory, host)
