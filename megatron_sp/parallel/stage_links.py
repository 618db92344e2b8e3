"""Send tensors between neighbouring stages of a pipeline, beside what the ranks compute.

The order of all sends and receives is that of ``layout.transfers``, in which no two ranks wait for each other. Starting
one does not wait for the neighbour, except for the oldest send when more than ``MOST_SENDS`` may still be on their way.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist

from megatron_sp.layout.rendezvous import MOST_SENDS


class StageLinks:
    """The links of a rank to the pipeline ranks before and after it.

    Args:
        group: all ranks of the pipeline, in the order of their stages.
        device: where tensors are received.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group, self.device = group, device
        self._ranks = dist.get_process_group_ranks(group)
        self._sends: deque[tuple[dist.Work, torch.Tensor]] = deque()  # those that may not be done, oldest first

    def start_send(self, x: torch.Tensor, stage: int) -> None:
        """Start to send x to a neighbouring stage."""
        x = x.contiguous()
        work = dist.isend(x, self._ranks[stage], self.group)
        assert work is not None
        self._sends.append((work, x))
        self._keep_at_most(MOST_SENDS)

    def start_receive(self, shape: tuple[int, ...], dtype: torch.dtype, stage: int) -> tuple[dist.Work, torch.Tensor]:
        """Start to receive a tensor from a neighbouring stage; it is complete once the caller has waited."""
        received = torch.empty(shape, dtype=dtype, device=self.device)
        work = dist.irecv(received, self._ranks[stage], self.group)
        assert work is not None
        return work, received

    def finish(self) -> None:
        """Wait until everything is sent."""
        self._keep_at_most(0)

    def _keep_at_most(self, number: int) -> None:
        """Wait for the oldest sends until so many are left, which frees their tensors."""
        while len(self._sends) > number:
            work, _ = self._sends.popleft()
            work.wait()
