"""Where tensors wait until they are needed again: on the device, or in host memory.

Host memory is reached through two streams, one for each direction, so that copies run while the device computes::

    compute     make a | make b  | ...            | use b    | use a
    to host            | a ->    | b ->
    to device                      | <- b         | <- a     |
                                   prefetch(b)      get(b), prefetch(a)

On a CPU both kinds of storage are the same memory, and host storage only makes the copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(eq=False)
class Stored:
    """A tensor in a storage.

    Attributes:
        value: the tensor in the memory of the storage.
        device: where it came from and is used.
        value_ready: event after which ``value`` is complete; None on a CPU.
        copy: its copy on the device between ``prefetch`` and ``get``.
        copy_ready: event after which ``copy`` is complete.
    """

    value: torch.Tensor
    device: torch.device
    value_ready: Any = None
    copy: torch.Tensor | None = None
    copy_ready: Any = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensor."""
        return self.value.numel() * self.value.element_size()


class Storage(Protocol):
    """Keeps tensors and gives them back on the device that they came from."""

    def put(self, x: torch.Tensor) -> Stored:
        """Keep x, which the caller does not change afterwards."""

    def prefetch(self, stored: Stored) -> None:
        """Start to bring a tensor to the device, so that a later ``get`` need not wait."""

    def get(self, stored: Stored) -> torch.Tensor:
        """Return the tensor that ``put`` or ``replace`` kept, on the device that it came from."""

    def replace(self, stored: Stored, x: torch.Tensor) -> None:
        """Keep x in place of the tensor that ``stored`` holds.

        Args:
            stored: what ``put`` returned for the old tensor.
            x: the new tensor, of the same shape and type. It may be the very tensor that ``get`` returned, after the
                caller has changed it in place.
        """


class DeviceStorage:
    """Keeps tensors where they are."""

    def put(self, x: torch.Tensor) -> Stored:
        """Keep x itself, without a copy."""
        return Stored(x.detach(), x.device)

    def prefetch(self, stored: Stored) -> None:
        """Do nothing, because the tensor never left the device."""

    def get(self, stored: Stored) -> torch.Tensor:
        """Return the tensor that ``put`` or ``replace`` kept."""
        return stored.value

    def replace(self, stored: Stored, x: torch.Tensor) -> None:
        """Keep x instead of the old tensor."""
        stored.value = x


class HostStorage:
    """Keeps tensors in host memory, which is pinned for a GPU, so that copies do not block."""

    def __init__(self) -> None:
        self._to_host: Any = None
        self._to_device: Any = None

    def put(self, x: torch.Tensor) -> Stored:
        """Start to copy x to host memory, and return what ``get`` needs to bring it back."""
        if x.device.type != "cuda":
            return Stored(x.detach().clone(), x.device)
        if self._to_host is None:
            self._to_host, self._to_device = torch.cuda.Stream(x.device), torch.cuda.Stream(x.device)
        stored = Stored(torch.empty(x.shape, dtype=x.dtype, pin_memory=True), x.device)
        self.replace(stored, x)
        return stored

    def replace(self, stored: Stored, x: torch.Tensor) -> None:
        """Start to copy x over the old tensor in host memory."""
        if stored.device.type != "cuda":
            if x is not stored.value:
                stored.value.copy_(x)
            return
        self._to_host.wait_stream(torch.cuda.current_stream(stored.device))  # until x is complete
        with torch.cuda.stream(self._to_host):
            stored.value.copy_(x.detach(), non_blocking=True)
            x.record_stream(self._to_host)  # else its memory might be reused before the copy is made
        stored.value_ready = self._to_host.record_event()

    def prefetch(self, stored: Stored) -> None:
        """Start to copy a tensor from host memory to its device, unless a copy is there already."""
        if stored.device.type != "cuda" or stored.copy is not None:
            return
        self._to_device.wait_event(stored.value_ready)
        with torch.cuda.stream(self._to_device):
            stored.copy = stored.value.to(stored.device, non_blocking=True)
        stored.copy_ready = self._to_device.record_event()

    def get(self, stored: Stored) -> torch.Tensor:
        """Return the copy of a tensor on its device, and copy it now if ``prefetch`` has not been called."""
        if stored.device.type != "cuda":
            return stored.value
        self.prefetch(stored)
        current = torch.cuda.current_stream(stored.device)
        current.wait_event(stored.copy_ready)
        copy, stored.copy = stored.copy, None
        assert copy is not None
        copy.record_stream(current)
        return copy
