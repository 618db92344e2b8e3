"""Copy the microbatches of a step to the device, each while the one before it is computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron_sp.data.batch import Microbatch


class DeviceCopies:
    """Copies microbatches to the device at once; the host waits unless they are in pinned memory."""

    def __init__(self, device: torch.device):
        self.device = device

    @staticmethod
    def of(device: torch.device) -> DeviceCopies:
        """Return copies for a device: on a GPU beside its computation."""
        return SideStreamCopies(device) if device.type == "cuda" else DeviceCopies(device)

    def start(self, batch: Microbatch) -> Microbatch:
        """Start the copy of a microbatch."""
        return batch.to(self.device)

    def finish(self, copy: Microbatch) -> Microbatch:
        """Return a started copy, which may be computed with from now on."""
        return copy


class SideStreamCopies(DeviceCopies):
    """Copies microbatches on a stream of their own, beside what the GPU computes."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.stream = torch.cuda.Stream(device)

    def start(self, batch: Microbatch) -> Microbatch:
        """See ``DeviceCopies.start``."""
        with torch.cuda.stream(self.stream):
            return super().start(batch)

    def finish(self, copy: Microbatch) -> Microbatch:
        """See ``DeviceCopies.finish``. The computation waits for the copies, and the host does not."""
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)
        for tensor in copy.tensors().values():
            tensor.record_stream(current)  # else its memory might be used for a later copy too early
        return copy


def one_ahead(microbatches: Sequence[Microbatch], copies: DeviceCopies) -> Iterator[Microbatch]:
    """Yield copies of the microbatches on the device. When one is yielded, the copy of the next has been started."""
    ahead: Microbatch | None = None
    for batch in microbatches:
        if ahead is not None:
            ready = copies.finish(ahead)
            ahead = copies.start(batch)
            yield ready
        else:
            ahead = copies.start(batch)
    if ahead is not None:
        yield copies.finish(ahead)
