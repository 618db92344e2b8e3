"""Devices that a run can be planned for: memory, speed and links, from the manufacturers' data sheets."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_sp.config.cli.values import LEAST_MEMORY, parse_size
from megatron_sp.plan.memory import MemoryPlan

GIB = 1 << 30
GB = 10**9


@dataclass(frozen=True)
class Device:
    """What one device can do, in the units of its data sheet.

    Attributes:
        name: how users call it (``--device``).
        memory: bytes that a program can use.
        tflops: dense TFLOP/s in bf16.
        tflops_fp32: TFLOP/s in fp32 without reduced-precision modes.
        node_bandwidth: bytes/s that a device sends to the devices of its node, one direction.
        network_bandwidth: bytes/s of a device's share of the network between nodes, one direction.
        host_bandwidth: bytes/s between a device and host memory, one direction.
        host_memory: bytes of host memory that a node has for each of its devices. A CPU has none besides ``memory``.
        kind: "gpu" or "cpu", as the memory plan distinguishes them.
    """

    name: str
    memory: int
    tflops: float
    tflops_fp32: float
    node_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float
    host_memory: int
    kind: str = "gpu"

    def holds(self, plan: MemoryPlan, usable: float = 1.0) -> bool:
        """Return whether a planned peak fits into this share of the device's and of the host's memory.

        On a CPU the device's memory is the host's memory, so the plan's host bytes count against it too.
        """
        if self.kind == "cpu":
            return plan.total + plan.host <= self.memory * usable
        return plan.total <= self.memory * usable and plan.host <= self.host_memory * usable


#: Node links: NVLink 3 (A100) 300 GB/s, NVLink 4 (H100, H200) 450, NVLink 5 (B200) 900, PCIe 4 x16 (L40S) 32, one
#: direction each. Network: one 200 Gb/s adapter a device (A100, L40S), one 400 Gb/s adapter (H100 and later).
#: Host memory: an eighth of what the manufacturers' systems of 8 GPUs have (DGX A100 with 320 GB: 1 TB; with 640 GB:
#: 2 TB; DGX H100, H200, B200: 2 TB), for L40S a usual server of 8 GPUs with 1 TB.
#: The CPU row is a rough figure for one process on one core, so that plans can be compared with runs on a laptop.
DEVICES = {device.name: device for device in (
    Device("A100-40", 40 * GIB, 312.0, 19.5, 300 * GB, 25 * GB, 25 * GB, 128 * GB),
    Device("A100-80", 80 * GIB, 312.0, 19.5, 300 * GB, 25 * GB, 25 * GB, 256 * GB),
    Device("H100", 80 * GIB, 989.4, 66.9, 450 * GB, 50 * GB, 50 * GB, 256 * GB),
    Device("H200", 141 * GB, 989.4, 66.9, 450 * GB, 50 * GB, 50 * GB, 256 * GB),
    Device("B200", 180 * GB, 2250.0, 75.0, 900 * GB, 50 * GB, 50 * GB, 256 * GB),
    Device("L40S", 48 * GIB, 362.0, 91.6, 32 * GB, 25 * GB, 25 * GB, 128 * GB),
    Device("CPU", 16 * GIB, 0.05, 0.05, 2 * GB, 1 * GB, 10 * GB, 0, kind="cpu"),
)}


def device_of_flags(name: str, memory: str, host_memory: str = "", per_node: int = 1) -> tuple[Device, list[str]]:
    """Return the device that the flags describe, and what is wrong with their values.

    Args:
        name: value of ``--device``.
        memory: value of ``--device-memory``, such as 24GB; "" for the data sheet's.
        host_memory: value of ``--host-memory``, for a whole node; "" for what the manufacturer's systems have.
        per_node: devices of a node that the run uses.
    """
    problems: list[str] = []
    sizes = {"--device-memory": 0, "--host-memory": 0}
    for flag, text in (("--device-memory", memory), ("--host-memory", host_memory)):
        try:
            sizes[flag] = parse_size(text, LEAST_MEMORY) if text else 0
        except ValueError as error:
            problems.append(f"{flag}: {error}.")
    device = DEVICES["H100"]
    try:
        device = find_device(name)
    except ValueError as error:
        problems.append(f"--device: {error}; for another device take the one nearest in speed, and give its memory, "
                        "for example --device-memory 24GB.")
    return with_memory(device, sizes["--device-memory"], sizes["--host-memory"] // max(1, per_node)), problems


def device_like(name: str, memory: int, host_memory: int) -> Device:
    """Return a device by what its driver calls it, with its bytes of memory and the speed of the nearest one known.

    Args:
        name: for example "NVIDIA H100 80GB HBM3".
        host_memory: bytes of host memory for each device of the node.
    """
    known = next((device for device in DEVICES.values() if device.name.partition("-")[0] in name), DEVICES["H100"])
    return replace(known, name=name, memory=memory, host_memory=host_memory)


def with_memory(device: Device, memory: int, host_memory: int) -> Device:
    """Return the device with other bytes of device memory, and of host memory for each device; 0 changes nothing."""
    return replace(device, memory=memory or device.memory, host_memory=host_memory or device.host_memory)


def find_device(name: str, memory: int = 0) -> Device:
    """Return the device of this name, compared without case, with another memory where one is given.

    Raises:
        ValueError: with a sentence fragment listing the names.
    """
    by_name = {known.lower(): device for known, device in DEVICES.items()}
    if name.lower() not in by_name:
        raise ValueError(f"{name!r} is not one of {', '.join(DEVICES)}")
    device = by_name[name.lower()]
    return replace(device, memory=memory) if memory else device
