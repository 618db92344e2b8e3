"""Devices that a run can be planned for: memory, speed and links, from the manufacturers' data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

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
        kind: "gpu" or "cpu", as the memory plan distinguishes them.
    """

    name: str
    memory: int
    tflops: float
    tflops_fp32: float
    node_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float
    kind: str = "gpu"


#: Node links: NVLink 3 (A100) 300 GB/s, NVLink 4 (H100, H200) 450, NVLink 5 (B200) 900, PCIe 4 x16 (L40S) 32, one
#: direction each. Network: one 200 Gb/s adapter a device (A100, L40S), one 400 Gb/s adapter (H100 and later).
#: The CPU row is a rough figure for one process on one core, so that plans can be compared with runs on a laptop.
DEVICES = {device.name: device for device in (
    Device("A100-40", 40 * GIB, 312.0, 19.5, 300 * GB, 25 * GB, 25 * GB),
    Device("A100-80", 80 * GIB, 312.0, 19.5, 300 * GB, 25 * GB, 25 * GB),
    Device("H100", 80 * GIB, 989.4, 66.9, 450 * GB, 50 * GB, 50 * GB),
    Device("H200", 141 * GB, 989.4, 66.9, 450 * GB, 50 * GB, 50 * GB),
    Device("B200", 180 * GB, 2250.0, 75.0, 900 * GB, 50 * GB, 50 * GB),
    Device("L40S", 48 * GIB, 362.0, 91.6, 32 * GB, 25 * GB, 25 * GB),
    Device("CPU", 16 * GIB, 0.05, 0.05, 2 * GB, 1 * GB, 10 * GB, kind="cpu"),
)}

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(K|M|G|T)?(i?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str) -> int:
    """Return the bytes that a text such as ``80GB`` (10^9), ``40GiB`` (2^30) or ``512MiB`` names.

    Raises:
        ValueError: with a sentence fragment saying what is expected.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"{text!r} is not a size above 0 such as 80GB or 40GiB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** _POWERS[(match[2] or "").upper()])


def device_of_flags(name: str, memory: str) -> tuple[Device, list[str]]:
    """Return the device that ``--device`` and ``--device-memory`` describe, and what is wrong with their values.

    Args:
        name: value of ``--device``.
        memory: value of ``--device-memory``, such as 24GB; "" for the data sheet's.
    """
    problems: list[str] = []
    size, device = 0, DEVICES["H100"]
    try:
        size = parse_size(memory) if memory else 0
    except ValueError as error:
        problems.append(f"--device-memory: {error}.")
    try:
        device = find_device(name, size)
    except ValueError as error:
        problems.append(f"--device: {error}; for another device take the one nearest in speed, and give its memory, "
                        "for example --device-memory 24GB.")
    return device, problems


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
