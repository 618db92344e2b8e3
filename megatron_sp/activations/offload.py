"""Activation offload: the inputs of recomputed layers wait in host memory.

With full recomputation these inputs are all that grows with depth x sequence (ALST, arXiv
2506.13996, section 3.3). They are copied out on a side stream while the layer computes, and brought
back one layer ahead of backward. Parameters never move: only a layer's input does, and what is kept
in its shape (the input of its second half, when the layer is kept in two).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(eq=False)
class Stored:
    """A layer's input in host memory, and on its way back."""

    host: torch.Tensor
    device: torch.device
    before: Stored | None  # of the layer before, which backward needs next
    ready: Any = None  # event after which the host copy is whole
    returning: torch.Tensor | None = None
    returned: Any = None  # event after which ``returning`` is whole


class ActivationOffload:
    """Hooks around the layers of one model.

    Args:
        share: of the layers, the first ones, whose inputs are moved (they wait longest).
    """

    def __init__(self, share: float, num_layers: int):
        self.num_offloaded = round(share * num_layers)
        self._latest: Stored | None = None
        self._stream: Any = None

    @contextlib.contextmanager
    def around(self, index: int, layer_input: torch.Tensor) -> Iterator[None]:
        """For the forward of the layer of this local number: moves its saved inputs, and nothing else."""
        if index >= self.num_offloaded or not torch.is_grad_enabled():
            yield
            return
        if index == 0:
            self._latest = None
        shape, dtype = layer_input.shape, layer_input.dtype

        def pack(x: torch.Tensor) -> Any:
            is_input = x.shape == shape and x.dtype == dtype and not isinstance(x, torch.nn.Parameter)
            return self._send(x) if is_input else x

        def unpack(x: Any) -> torch.Tensor:
            return self._fetch(x) if isinstance(x, Stored) else x

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _send(self, x: torch.Tensor) -> Stored:
        if x.device.type != "cuda":
            entry = Stored(x.detach().clone(), x.device, self._latest)
        else:
            if self._stream is None:
                self._stream = torch.cuda.Stream(x.device)
            host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self._stream.wait_stream(torch.cuda.current_stream(x.device))
            with torch.cuda.stream(self._stream):
                host.copy_(x.detach(), non_blocking=True)
                x.record_stream(self._stream)
            entry = Stored(host, x.device, self._latest, ready=self._stream.record_event())
        self._latest = entry
        return entry

    def _start_return(self, entry: Stored) -> None:
        if entry.returning is not None or entry.device.type != "cuda":
            return
        self._stream.wait_event(entry.ready)
        with torch.cuda.stream(self._stream):
            entry.returning = entry.host.to(entry.device, non_blocking=True)
        entry.returned = self._stream.record_event()

    def _fetch(self, entry: Stored) -> torch.Tensor:
        """The input on its device; the one that backward needs next is on its way when this returns."""
        if entry.device.type != "cuda":
            return entry.host
        self._start_return(entry)
        if entry.before is not None:
            self._start_return(entry.before)
            entry.before = None
        current = torch.cuda.current_stream(entry.device)
        current.wait_event(entry.returned)
        assert entry.returning is not None
        entry.returning.record_stream(current)
        return entry.returning
