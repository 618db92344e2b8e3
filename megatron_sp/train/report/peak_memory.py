"""Measure the peak memory of the ranks."""

from __future__ import annotations

import resource

import torch
import torch.distributed as dist


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that this rank used at any time: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def largest_of_ranks(value: int, device: torch.device) -> int:
    """Return the largest of all ranks' values. All ranks call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    largest = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)
