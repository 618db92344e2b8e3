"""Show progress bars with tqdm. Where tqdm is not installed, programs work without bars."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


class NoBar:
    """Replaces tqdm's bar where tqdm is not installed: yields the items and shows nothing."""

    def __init__(self, items: Iterable[Any] = ()):
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __enter__(self) -> NoBar:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, count: float = 1) -> None:
        pass

    def refresh(self) -> None:
        pass

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        pass


def progress_bar(items: Iterable[Any] | None = None, **options: Any) -> Any:
    """Return a progress bar.

    Args:
        items: what to iterate over; None: the caller calls ``update`` instead.
        options: further arguments of ``tqdm.tqdm``.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        return NoBar(items or ())
    return tqdm(items, **options)
