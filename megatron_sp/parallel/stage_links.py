"""Send tensors between neighbouring stages of a pipeline.

Sends and receives start at once. ``layout.transfers`` has the order in which no two ranks wait for each other.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist

#: Sends whose tensors are kept. The neighbour is at most a few steps behind, so the oldest of them is usually done.
MOST_SENDS = 4


class StageLinks:
    """The links of a rank to the pipeline ranks before and after it.

    Args:
        group: all ranks of the pipeline, in the order of their stages.
        device: where tensors are received.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._ranks = dist.get_process_group_ranks(group)
        self._started: deque[tuple[dist.Work, torch.Tensor]] = deque()  # sends that may not be done, oldest first

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def send(self, x: torch.Tensor, stage: int) -> None:
        """Start to send x to a neighbouring stage."""
        x = x.contiguous()
        work = dist.isend(x, self._ranks[stage], self.group)
        assert work is not None
        self._started.append((work, x))
        self._keep_at_most(MOST_SENDS)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, stage: int) -> tuple[dist.Work, torch.Tensor]:
        """Start to receive the next tensor of a neighbouring stage; the handle says when it is there."""
        received = torch.empty(shape, dtype=dtype, device=self.device)
        work = dist.irecv(received, self._ranks[stage], self.group)
        assert work is not None
        return work, received

    def finish(self) -> None:
        """Wait until everything is sent."""
        self._keep_at_most(0)

    def _keep_at_most(self, number: int) -> None:
        """Wait for the oldest sends until so many are left, which frees their tensors."""
        while len(self._started) > number:
            work, _ = self._started.popleft()
            work.wait()
