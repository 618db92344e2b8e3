"""What all programs that draw share: matplotlib if it is installed, and complete PNG files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from megatron_sp.errors import DataError
from megatron_sp.output_files import complete_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def load_pyplot() -> Any:
    """Return ``matplotlib.pyplot``, set to draw into files and not on a screen.

    Raises:
        DataError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise DataError("Drawing needs matplotlib, which is not installed; install it with: "
                        "pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save_picture(figure: Figure, path: str | os.PathLike[str], dpi: int = 150, flag: str = "--output") -> None:
    """Write a figure as a PNG, completely or not at all, and close it.

    Args:
        figure: what to write.
        path: the PNG.
        dpi: pixels per inch.
        flag: the flag that named the file, for messages.

    Raises:
        DataError: the file cannot be written.
    """
    pyplot = load_pyplot()
    try:
        with complete_file(path, flag) as file:
            # Without "Software" the same picture has the same bytes under every version of matplotlib's name.
            figure.savefig(file, format="png", dpi=dpi, bbox_inches="tight", metadata={"Software": None})
    finally:
        pyplot.close(figure)
