"""Load matplotlib and write pictures, for all programs that draw: PNG files appear only when they are complete."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from megatron_sp.errors import DataError
from megatron_sp.output_files import complete_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def load_pyplot() -> Any:
    """Return ``matplotlib.pyplot``, set to write files, so that it needs no screen.

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


def picture_problems(path: str | os.PathLike[str] | None, flag: str = "--output") -> list[str]:
    """Return what is wrong with the name of a picture to write: nothing, or that its ending is not that of a PNG."""
    if path is None or os.fspath(path).lower().endswith(".png"):
        return []
    return [f"{flag} {os.fspath(path)} must end in .png."]


def save_picture(figure: Figure, path: str | os.PathLike[str], dpi: int = 150, flag: str = "--output") -> None:
    """Write a figure as a PNG and close it. The file appears only when it is complete.

    Args:
        figure: what to write.
        path: the PNG file.
        dpi: pixels per inch.
        flag: name of the flag with which the user chose the file, for messages.

    Raises:
        DataError: the file cannot be written.
    """
    pyplot = load_pyplot()
    try:
        with complete_file(path, flag) as file:
            # matplotlib would write its version into the file, and the same picture would differ between versions.
            figure.savefig(file, format="png", dpi=dpi, bbox_inches="tight", metadata={"Software": None})
    finally:
        pyplot.close(figure)
