"""Activation offload: keep the inputs of recomputed layers in host memory between forward and backward.

With full recomputation these inputs are the only memory that grows with depth times sequence length (ALST, arXiv
2506.13996, section 3.3). A side stream copies a layer's input to the host while the layer computes. Before backward
reaches a layer, the side stream copies its input back::

    forward    compute  layer 0    | layer 1    | layer 2        backward  compute  layer 2    | layer 1    | layer 0
               copy     input 0 -> | input 1 -> | input 2 ->               copy     input 1 <- | input 0 <- |

Only tensors of the shape and type of the layer's input are moved, never parameters. Where the two halves of a layer
are recomputed apart, the input of the second half has this shape too and is moved as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(eq=False)
class OffloadedInput:
    """A layer's input in host memory and, once backward is near, its copy on the device.

    Attributes:
        previous: the input offloaded before this one in forward, which backward needs next.
        host_ready: event after which ``host`` is complete.
        copy: the copy on the device.
        copy_ready: event after which ``copy`` is complete.
    """

    host: torch.Tensor
    device: torch.device
    previous: OffloadedInput | None
    host_ready: Any = None
    copy: torch.Tensor | None = None
    copy_ready: Any = None


class ActivationOffload:
    """Autograd hooks that offload the inputs of a model's first layers, which are kept longest.

    Args:
        share: fraction of the layers whose inputs are offloaded.
        num_layers: layers of this rank's model.
    """

    def __init__(self, share: float, num_layers: int):
        self.num_offloaded = round(share * num_layers)
        self._latest: OffloadedInput | None = None
        self._stream: Any = None

    @contextlib.contextmanager
    def around(self, index: int, layer_input: torch.Tensor) -> Iterator[None]:
        """While a layer's forward runs, move what autograd saves of the layer's input to the host.

        Args:
            index: number of the layer among those of this rank.
            layer_input: the input, by whose shape and type the tensors to move are recognised.
        """
        if index >= self.num_offloaded or not torch.is_grad_enabled():
            yield
            return
        if index == 0:
            self._latest = None
        shape, dtype = layer_input.shape, layer_input.dtype

        def pack(x: torch.Tensor) -> Any:
            is_input = x.shape == shape and x.dtype == dtype and not isinstance(x, torch.nn.Parameter)
            return self._copy_to_host(x) if is_input else x

        def unpack(x: Any) -> torch.Tensor:
            return self._copy_to_device(x) if isinstance(x, OffloadedInput) else x

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _copy_to_host(self, x: torch.Tensor) -> OffloadedInput:
        if x.device.type != "cuda":
            entry = OffloadedInput(x.detach().clone(), x.device, self._latest)
        else:
            if self._stream is None:
                self._stream = torch.cuda.Stream(x.device)
            host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self._stream.wait_stream(torch.cuda.current_stream(x.device))
            with torch.cuda.stream(self._stream):
                host.copy_(x.detach(), non_blocking=True)
                x.record_stream(self._stream)
            entry = OffloadedInput(host, x.device, self._latest, host_ready=self._stream.record_event())
        self._latest = entry
        return entry

    def _start_copy_to_device(self, entry: OffloadedInput) -> None:
        if entry.copy is not None or entry.device.type != "cuda":
            return
        self._stream.wait_event(entry.host_ready)
        with torch.cuda.stream(self._stream):
            entry.copy = entry.host.to(entry.device, non_blocking=True)
        entry.copy_ready = self._stream.record_event()

    def _copy_to_device(self, entry: OffloadedInput) -> torch.Tensor:
        """Return an input on its device, and start to copy the one that backward needs next."""
        if entry.device.type != "cuda":
            return entry.host
        self._start_copy_to_device(entry)
        if entry.previous is not None:
            self._start_copy_to_device(entry.previous)
            entry.previous = None
        current = torch.cuda.current_stream(entry.device)
        current.wait_event(entry.copy_ready)
        assert entry.copy is not None
        entry.copy.record_stream(current)
        return entry.copy
