"""Measure the bytes of all live tensors while code runs, by watching each storage from its creation to its end."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageTracker(TorchDispatchMode):
    """Count the bytes of all storages that operators return while this mode is active, until each storage is freed.

    It works on real and on fake tensors; for fake ones, enter ``FakeTensorMode`` first. It does not see memory that a
    kernel uses internally.

    Attributes:
        live: bytes of all live storages.
        peak: largest value of ``live`` so far.
        largest: number of elements of the largest tensor so far, and the operator that returned it.
        at_peak: bytes at the peak by operator, shape and type (if ``explain``).
    """

    def __init__(self, explain: bool = False) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.largest: tuple[int, str] = (0, "")
        self.at_peak: Counter[tuple[str, tuple[int, ...], str]] = Counter()
        self._explain, self._known = explain, weakref.WeakSet[torch.UntypedStorage]()
        self._made: dict[int, tuple[str, tuple[int, ...], str, int]] = {}

    def __enter__(self) -> StorageTracker:
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> None:
            """Count a change of size: FSDP frees gathered weights this way, which the dispatcher does not see."""
            self._resize(storage, size)
            self._change(storage)

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.wait_tensor.default and isinstance(
                args[0], torch._subclasses.FakeTensor):
            result = args[0]  # with fake tensors this operator returns a copy, with real ones its input
        else:
            result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf, str(func))
        return result

    def add(self, tensor: torch.Tensor, name: str = "") -> None:
        """Count a tensor, for example one that existed before this mode became active."""
        for part in _plain(tensor):
            storage = part.untyped_storage()
            if part.numel() > self.largest[0] and part.numel() * part.element_size() <= storage.nbytes():
                self.largest = (part.numel(), name)
            if storage in self._known:
                continue
            self._known.add(storage)
            size, key = storage.nbytes(), id(storage)
            self.live += size
            self._made[key] = (name, tuple(part.shape), str(part.dtype), size)
            weakref.finalize(storage, self._end, key)
        self._note_peak()

    def _change(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            name, shape, dtype, before = self._made[id(storage)]
            self._made[id(storage)] = (name, shape, dtype, storage.nbytes())
            self.live += storage.nbytes() - before
            self._note_peak()

    def _note_peak(self) -> None:
        if self.live > self.peak:
            self.peak = self.live
            if self._explain:
                self.at_peak = Counter()
                for made in self._made.values():
                    self.at_peak[made[:3]] += made[3]

    def _end(self, key: int) -> None:
        self.live -= self._made.pop(key)[3]

    def report(self, least: int = 1 << 20) -> str:
        """Return lines about what was live at the peak, largest first (if ``explain``)."""
        lines = [f"{size / 2**20:10.1f} MiB  {key}" for key, size in self.at_peak.most_common() if size >= least]
        return "\n".join(lines)


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that a tensor subclass consists of."""
    if hasattr(tensor, "__tensor_flatten__") and not isinstance(tensor, torch._subclasses.FakeTensor):
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, torch.Tensor):
                yield from _plain(part)
    elif tensor.layout == torch.strided:
        yield tensor
