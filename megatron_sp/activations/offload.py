"""Activation offload: between forward and backward, hold in host memory what recomputed layers keep.

With full recomputation these inputs are the only memory that grows with depth times sequence length (ALST, arXiv
2506.13996, section 3.3). A side stream copies a layer's input to the host while the layer computes. Before backward
reaches a layer, the side stream copies its input back::

    forward    compute  layer 0    | layer 1    | layer 2        backward  compute  layer 2    | layer 1    | layer 0
               copy     input 0 -> | input 1 -> | input 2 ->               copy     input 1 <- | input 0 <- |

Only tensors of the shape and type of the layer's input are moved, never parameters. Where the two halves of a layer
are recomputed apart, the input of the second half has this shape too and is moved as well.

With selective recomputation layers keep the results of attention too. ``results.ResultsOnHost`` moves these in the
same way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron_sp.activations.storage import HostStorage, Stored


@dataclass(eq=False)
class OffloadedInput:
    """A layer's input in host memory.

    Attributes:
        previous: the input offloaded before this one in forward, which backward needs next.
    """

    stored: Stored
    previous: OffloadedInput | None


class ActivationOffload:
    """Autograd hooks that offload the inputs of a model's first layers, which are kept longest.

    Args:
        share: fraction of the layers whose inputs are offloaded.
        num_layers: layers of this rank's model.
    """

    def __init__(self, share: float, num_layers: int):
        self.num_offloaded = round(share * num_layers)
        self._latest: OffloadedInput | None = None
        self._host = HostStorage()

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
        self._latest = OffloadedInput(self._host.put(x), self._latest)
        return self._latest

    def _copy_to_device(self, entry: OffloadedInput) -> torch.Tensor:
        """Return an input on its device, and start to copy the one that backward needs next."""
        self._host.prefetch(entry.stored)
        if entry.previous is not None:
            self._host.prefetch(entry.previous.stored)
            entry.previous = None
        return self._host.get(entry.stored)
