"""What selective recomputation keeps of a layer: the results of attention, so that backward need not attend again.

A layer's forward runs twice, once in forward and again in backward. Attention runs in the first run only. The second
run takes the results in the order in which the first run put them::

    first run     norm, q, k, v | attend -> o, log-sum-exp | output projection, feed-forward
                                      put |
    second run    norm, q, k, v |         `-> take         | output projection, feed-forward

Attention that is one call of a kernel is one operator, which the modes below recognise by its name. A ring, a window,
a pattern of blocks or attention in query blocks makes many calls. There only the merged result is worth keeping: a
ring of r ranks would otherwise keep r results, and receive all keys again. Such attention calls ``KeptResults.once``.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron_sp.activations.storage import HostStorage, Storage, Stored


class KeptResults:
    """Lets attention that makes many calls of a kernel run once, where its layer runs twice.

    All attention of a process shares one object. ``recompute`` tells it which layer runs, for which microbatch, and
    whether for the first or the second time.

    Attributes:
        computes: whether attention runs inside of ``once``. Then results of its operators must not be kept as well.
    """

    def __init__(self) -> None:
        self.computes = False
        self._layer: LayerResults | None = None
        self._is_second_run = False

    def once(self, attend: Callable[[], Any]) -> Any:
        """Return what a function computes; in the second run of a layer, return what it computed in the first run.

        Args:
            attend: returns a tensor or several tensors, without autograd.
        """
        layer = self._layer
        if layer is None:
            return attend()
        if self._is_second_run:
            return layer.take()
        self.computes = True
        try:
            result = attend()
        finally:
            self.computes = False
        layer.put(result)
        return result

    @contextlib.contextmanager
    def run(self, layer: LayerResults, *, second: bool) -> Iterator[None]:
        """Mark the time of a layer's first or second run.

        Args:
            layer: keeps the results of this call of the layer. Several calls may wait for their second run at a time,
                those of several microbatches.
        """
        before = self._layer, self._is_second_run
        self._layer, self._is_second_run = layer, second
        try:
            yield
        finally:
            self._layer, self._is_second_run = before


class ResultsOnHost:
    """Keeps the results of some operators of a model's layers in host memory between forward and backward.

    Layers share one object, so that backward of a layer starts to fetch the results of the layer before it.
    """

    def __init__(self) -> None:
        self._storage = HostStorage()
        self._latest: LayerResults | None = None

    def of_next_layer(self) -> LayerResults:
        """Return where the layer whose forward begins now keeps its results."""
        self._latest = LayerResults(self._storage, self._latest)
        return self._latest


class LayerResults:
    """The results of one layer in the order of its forward.

    Args:
        storage: holds the results, on the device or in host memory.
        previous: the results of the layer before this one in forward. Backward needs them after these.
    """

    def __init__(self, storage: Storage, previous: LayerResults | None = None):
        self._storage, self._previous = storage, previous
        self._kept: deque[Any] = deque()

    def put(self, result: Any) -> None:
        """Keep a result of an operator or of attention: a tensor, or tensors and numbers."""
        self._kept.append(tree_map_only(torch.Tensor, self._storage.put, result))

    def take(self) -> Any:
        """Return the results one after another, in the order in which they were put."""
        if self._previous is not None:
            self._previous.prefetch()
            self._previous = None
        return tree_map_only(Stored, self._storage.get, self._kept.popleft())

    def prefetch(self) -> None:
        """Start to bring all results to the device."""
        for stored in tree_leaves(list(self._kept)):
            if isinstance(stored, Stored):
                self._storage.prefetch(stored)


class KeepResults(TorchDispatchMode):
    """While a layer's forward runs, keeps the results of some operators.

    Args:
        operators: names such as "aten.mm".
        kept: see ``KeptResults.computes``.
    """

    def __init__(self, operators: Sequence[str], results: LayerResults, kept: KeptResults):
        super().__init__()
        self.operators, self.results, self.kept = operators, results, kept

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if operator_name(function) in self.operators and not self.kept.computes:
            self.results.put(result)
        return result


class TakeResults(KeepResults):
    """While a layer's forward runs again in backward, returns the kept results in place of running the operators."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator_name(function) in self.operators:
            return self.results.take()
        return function(*args, **(kwargs or {}))


def operator_name(function: Any) -> str:
    """Return an operator's name without its default overload: "aten.mm"."""
    return str(function).removesuffix(".default")
