"""Send tensors between neighbouring stages of a pipeline, in an order in which no two ranks wait for each other.

torch sends all messages between two ranks of a GPU in the order in which they were started. If one rank first sends and
then receives, and its neighbour does the same, both wait. So a send is not started at once, but together with the next
receive of this rank, or when this rank has something to compute for which it need not receive::

    rank 0   forward a |        forward b | send b, receive gradient of a |  backward a
                       | send a           |         x  both at once       |
    rank 1             | forward a    backward a | send gradient of a, receive b |  forward b
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
        self._waiting: list[dist.P2POp] = []
        self._started: deque[tuple[dist.Work, torch.Tensor]] = deque()  # sends that may not be done, oldest first

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def send(self, x: torch.Tensor, stage: int) -> None:
        """Send x to a neighbouring stage, together with the next receive or at the next ``flush``."""
        self._waiting.append(dist.P2POp(dist.isend, x.contiguous(), self._ranks[stage], self.group))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, stage: int) -> torch.Tensor:
        """Return the next tensor that a neighbouring stage sends."""
        received = torch.empty(shape, dtype=dtype, device=self.device)
        *_, last = self._start([dist.P2POp(dist.irecv, received, self._ranks[stage], self.group)])
        last.wait()
        return received

    def flush(self) -> None:
        """Start the sends that wait for a receive."""
        self._start([])

    def finish(self) -> None:
        """Wait until everything is sent."""
        self.flush()
        self._keep_at_most(0)

    def _start(self, receive: list[dist.P2POp]) -> list[dist.Work]:
        """Start all waiting sends and the receive together, and return the handles to wait for.

        The tensors of the sends are kept until they are sent. NCCL gives one handle for all of them.
        """
        sends, self._waiting = self._waiting, []
        if not sends and not receive:
            return []
        works = dist.batch_isend_irecv([*sends, *receive])
        if len(works) == len(sends) + len(receive):
            self._started += [(work, send.tensor) for work, send in zip(works, sends)]
        elif not receive:
            self._started += [(work, send.tensor) for work in works for send in sends]
        self._keep_at_most(MOST_SENDS)
        return works

    def _keep_at_most(self, number: int) -> None:
        """Wait for the oldest sends until so many are left, which frees their tensors."""
        while len(self._started) > number:
            work, _ = self._started.popleft()
            work.wait()
