"""Keep the autograd graph of attention that brings its own backward, where its layer runs twice.

A kernel of another library, such as a compiled one, makes its own node in the graph, which saves q, k, v, the output
and the log-sum-exp. ``KeptResults.once`` cannot give such a node the results of the first run. So the node itself is
kept from the first run, but without the tensors that it saves. Those are given back to it for backward::

    first run    q, k, v -> kernel -> o, log-sum-exp           its node notes places instead of tensors
    second run   q, k, v again; o, log-sum-exp of the first run
    backward     the node of the first run, with the tensors of the second
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

Function = Callable[..., torch.Tensor]
Tensors = tuple[torch.Tensor, ...]


class _Place(NamedTuple):
    """Stands for a saved tensor: a view of one of the tensors that backward is given, by number and layout."""

    number: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Enter(torch.autograd.Function):
    """The start of a kept graph. It holds no input, and notes the gradient of one in a dict."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, x: torch.Tensor, gradients: dict[int, torch.Tensor],
                number: int) -> torch.Tensor:
        ctx.gradients, ctx.number = gradients, number
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        ctx.gradients[ctx.number] = grad
        return grad.new_zeros(0), None, None, None


class _Graph:
    """A graph from the output of a function to its inputs, which holds none of the tensors that its nodes save.

    The nodes and hooks of the graph refer to lists and dicts of this object, and not to the object itself. Python could
    not free such a circle, because a part of it is in C++.
    """

    def __init__(self) -> None:
        self.again: list[torch.Tensor] = []  # inputs, output and other tensors; filled only while backward runs
        self.places: list[_Place] = []  # of saved tensors that are no inputs
        self.gradients: dict[int, torch.Tensor] = {}
        self.strides: list[tuple[int, ...]] = []

    def build(self, function: Function, given: Sequence[torch.Tensor]) -> Tensors:
        """Keep the graph; return the function's value, then the further tensors that the graph's nodes save."""
        storages = [_address(x) for x in given]
        # A saved view must tell which input it is of, so inputs that share their memory are copied first.
        inputs = [x.detach().clone() if storages.count(storage) > 1 else x.detach()
                  for x, storage in zip(given, storages)]
        saved: list[torch.Tensor] = []
        pack, unpack = _hooks(inputs, saved, self.places, self.again)
        self.anchor = torch.zeros(0, dtype=given[0].dtype, device=given[0].device, requires_grad=True)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            o = function(*(_Enter.apply(self.anchor, x, self.gradients, number) for number, x in enumerate(inputs)))
        self.end, o = torch.autograd.graph.get_gradient_edge(o), o.detach()
        results = [o]
        for x in saved:  # most kernels save their output, which is kept once
            is_output = _address(x) == _address(o)
            number, offset = (0, int(x.storage_offset() - o.storage_offset())) if is_output else (len(results), 0)
            self.places.append(_Place(len(inputs) + number, tuple(x.shape), x.stride(), offset))
            results += [] if is_output else [x]
        saved.clear()  # the hook that filled it lives as long as the graph
        self.strides = [x.stride() for x in (*inputs, *results)]
        return tuple(results)

    def backward(self, given: Sequence[torch.Tensor], grad: torch.Tensor) -> None:
        """Put the gradients of the inputs into ``gradients``.

        Args:
            given: the inputs and what ``build`` returned.
            grad: gradient of the output.
        """
        self.again += [x if x.stride() == stride else
                       torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)
                       for x, stride in zip(given, self.strides)]
        torch.autograd.grad(self.end, self.anchor, grad)
        self.again.clear()


def _address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _hooks(inputs: Sequence[torch.Tensor], saved: list[torch.Tensor], places: Sequence[_Place],
           again: Sequence[torch.Tensor]) -> tuple[Callable[..., Any], ...]:
    """Return the hooks that save places instead of tensors, and that find the tensors in backward.

    Args:
        saved: gets the tensors that are no inputs.
        places: of those tensors, by their number; filled before backward.
        again: filled before backward.
    """
    known = {_address(x): (number, int(x.storage_offset())) for number, x in enumerate(inputs)}

    def pack(x: torch.Tensor) -> int | _Place:
        if _address(x) in known:
            number, offset = known[_address(x)]
            return _Place(number, tuple(x.shape), x.stride(), int(x.storage_offset()) - offset)
        saved.append(x.detach())
        return len(saved) - 1

    def unpack(found: int | _Place) -> torch.Tensor:
        place = found if isinstance(found, _Place) else places[found]
        x = again[place.number]
        return x.as_strided(place.size, place.stride, x.storage_offset() + place.offset)

    return pack, unpack


class _KeptGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Function, once: Callable[[Callable[[], Any]], Any],
                *inputs: torch.Tensor) -> torch.Tensor:
        ctx.graph, ctx.count = _Graph(), len(inputs)
        results: Tensors = once(lambda: ctx.graph.build(function, inputs))
        ctx.save_for_backward(*inputs, *results)
        return results[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        ctx.graph.backward(ctx.saved_tensors, grad)
        return None, None, *(ctx.graph.gradients.pop(number, None) for number in range(ctx.count))


def keep_graph(function: Function, once: Callable[[Callable[[], Any]], Any], *inputs: torch.Tensor) -> torch.Tensor:
    """Return ``function(*inputs)``; the function runs once, also where its layer runs twice.

    Args:
        function: differentiable. Copies of its inputs that its nodes save are kept from the first run.
        once: see ``KeptResults.once``.
    """
    return _KeptGraph.apply(function, once, *inputs)
