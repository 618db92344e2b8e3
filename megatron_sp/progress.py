"""Progress bars of tqdm, or none where it is not installed: no work depends on being watched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


class NoBar:
    """Stands in for a bar: gives the items, shows nothing."""

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
    """A bar over the items, or one to ``update`` by hand; ``options`` are those of ``tqdm.tqdm``."""
    try:
        from tqdm import tqdm
    except ImportError:
        return NoBar(items or ())
    return tqdm(items, **options)
