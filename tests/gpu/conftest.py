"""One-device checks. Without a GPU every one of them is reported as not run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    reason = "not run: needs a CUDA GPU that torch can use, and none is visible"
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The first GPU, inside a process group of one."""
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield torch.device("cuda", 0)
    dist.destroy_process_group()
