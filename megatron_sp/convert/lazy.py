"""Tensors that are read a few rows at a time, so that a conversion holds neither a whole model nor a large tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

#: Bytes of fp32 numbers that are read at a time.
PIECE_BYTES = 1 << 27


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that still lies in files.

    Attributes:
        shape: shape of the whole tensor.
        read: ``read(start, stop)`` returns rows start to stop of dimension 0, ``[stop - start, *shape[1:]]``. The type
            is that of the file.
        source: file and name there, for messages.
        by_rows: whether reading a few rows reads only these from the file. Otherwise every call reads the whole tensor.
        bounds: rows at which the pieces begin and end that can only be read whole; empty where there are none.
    """

    shape: tuple[int, ...]
    read: Callable[[int, int], torch.Tensor]
    source: str
    by_rows: bool = True
    bounds: tuple[int, ...] = ()

    def whole(self) -> torch.Tensor:
        """Return the tensor."""
        return self.read(0, self.shape[0])

    def row_ranges(self) -> Iterator[tuple[int, int]]:
        """Yield start and stop of consecutive groups of rows: stored pieces, else as many as ``PIECE_BYTES`` hold."""
        if self.bounds:
            yield from zip(self.bounds, self.bounds[1:])
            return
        rows = self.shape[0]
        step = max(1, PIECE_BYTES // max(1, 4 * math.prod(self.shape[1:]))) if self.by_rows else rows
        for start in range(0, rows, step):
            yield start, min(start + step, rows)


#: The parameters of a model under this package's names: those of ``checkpoint.state`` without the prefix ``model.``.
Weights = dict[str, LazyTensor]


def lazy_of(tensor: torch.Tensor, source: str) -> LazyTensor:
    """Return a tensor that is in memory or mapped from a file."""
    return LazyTensor(tuple(tensor.shape), lambda a, b: tensor[a:b], source)


def column_part(tensor: LazyTensor, start: int, stop: int) -> LazyTensor:
    """Return columns start to stop (dimension 1) of a tensor."""
    return LazyTensor((tensor.shape[0], stop - start), lambda a, b: tensor.read(a, b)[:, start:stop], tensor.source,
                      tensor.by_rows)


def row_part(tensor: LazyTensor, start: int, stop: int) -> LazyTensor:
    """Return rows start to stop (dimension 0) of a tensor."""
    return LazyTensor((stop - start, *tensor.shape[1:]), lambda a, b: tensor.read(start + a, start + b), tensor.source,
                      tensor.by_rows)


def transposed(tensor: LazyTensor) -> LazyTensor:
    """Return the transpose of a matrix; each read reads the whole matrix."""
    return LazyTensor(tensor.shape[::-1], lambda a, b: tensor.whole().T[a:b], tensor.source, by_rows=False)


def rows_joined(parts: list[LazyTensor]) -> LazyTensor:
    """Return tensors one below the other (dimension 0)."""
    if len(parts) == 1:
        return parts[0]
    starts = [sum(part.shape[0] for part in parts[:number]) for number in range(len(parts) + 1)]

    def read(a: int, b: int) -> torch.Tensor:
        found = [part.read(max(a, first) - first, min(b, last) - first)
                 for part, first, last in zip(parts, starts, starts[1:]) if max(a, first) < min(b, last)]
        return torch.cat(found)

    return LazyTensor((starts[-1], *parts[0].shape[1:]), read, parts[0].source, all(part.by_rows for part in parts))


def columns_joined(parts: list[LazyTensor]) -> LazyTensor:
    """Return matrices side by side (dimension 1)."""
    if len(parts) == 1:
        return parts[0]
    return LazyTensor((parts[0].shape[0], sum(part.shape[1] for part in parts)),
                      lambda a, b: torch.cat([part.read(a, b) for part in parts], dim=1), parts[0].source,
                      all(part.by_rows for part in parts))


def changed(tensor: LazyTensor, change: Callable[[torch.Tensor], torch.Tensor]) -> LazyTensor:
    """Return a tensor of the same shape, each element of which follows from the same element of the given one."""
    return LazyTensor(tensor.shape, lambda a, b: change(tensor.read(a, b)), tensor.source, tensor.by_rows,
                      tensor.bounds)
