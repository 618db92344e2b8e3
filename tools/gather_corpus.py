#!/usr/bin/env python3
"""Make a corpus of long documents from the Python standard library of this interpreter, without any download.

Each Python module becomes one document. The longest modules are taken first, until --max-bytes is reached. The output
is JSON lines ``{"text": ..., "name": ..., "bytes": ...}`` in an order that looks random and is always the same.

Example:

    python tools/gather_corpus.py --output corpus.jsonl --max-bytes 1000000
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
if (CHECKOUT / "megatron_sp").is_dir():  # false once pip has installed this file, which then finds the package anyway
    sys.path.insert(0, str(CHECKOUT))

from megatron_sp.config.cli.tool_parser import ToolParser  # noqa: E402
from megatron_sp.errors import DataError  # noqa: E402
from megatron_sp.output_files import complete_file  # noqa: E402
from megatron_sp.progress import progress_bar  # noqa: E402
from megatron_sp.runtime import run_program  # noqa: E402

SKIPPED_DIRECTORIES = {"__pycache__", "site-packages", "dist-packages"}


def find_modules(root: Path) -> list[Path]:
    """Return all Python source files below ``root``, in a fixed order; installed packages are left out."""
    return sorted(_walk(root))


def _walk(root: Path) -> Iterator[Path]:
    for directory, subdirectories, files in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in SKIPPED_DIRECTORIES]
        yield from (Path(directory, name) for name in files if name.endswith(".py"))


def choose(modules: list[Path], max_bytes: int, min_bytes: int) -> list[Path]:
    """Return modules of at least ``min_bytes``, longest first, as many as fit into ``max_bytes`` together."""
    chosen, total = [], 0
    for size, path in sorted(((path.stat().st_size, path) for path in modules), reverse=True):
        if size < min_bytes:
            break
        if total + size <= max_bytes:
            chosen.append(path)
            total += size
    return chosen


def write_corpus(output: Path, root: Path, modules: list[Path]) -> tuple[int, int]:
    """Write one JSON line for each module that is valid UTF-8. The file appears only when it is complete.

    Returns:
        The number of documents, and the bytes of all their texts.
    """
    # Sorting by a hash mixes the packages. --split gives the last documents of the file to validation and test, which
    # would otherwise hold the modules of one package only.
    order = sorted(modules, key=lambda path: hashlib.sha256(str(path.relative_to(root)).encode()).digest())
    documents = size = 0
    with complete_file(output, "--output") as file:
        for path in progress_bar(order, desc="Gathering documents", unit=" documents"):
            try:
                text = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue  # the library's tests of encodings contain files that are invalid on purpose
            length = len(text.encode())
            row = {"text": text, "name": str(path.relative_to(root)), "bytes": length}
            file.write((json.dumps(row) + "\n").encode())
            documents, size = documents + 1, size + length
        if not documents:
            raise DataError(f"no Python module of the wanted size below {root}; give another directory with --root or "
                            "lower --min-bytes")
    return documents, size


def build_parser() -> argparse.ArgumentParser:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    group = parser.add_argument_group("input and output")
    group.add_argument("--root", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), metavar="DIR",
                       help="directory with Python modules (default: the standard library, %(default)s)")
    group.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl", help="JSON lines file to write")
    group = parser.add_argument_group("size")
    group.add_argument("--max-bytes", type=int, default=16_000_000, metavar="N",
                       help="most bytes of all documents together (default: %(default)s)")
    group.add_argument("--min-bytes", type=int, default=8_000, metavar="N",
                       help="leave out modules of fewer bytes (default: %(default)s)")
    return parser


def main(argv: list[str]) -> None:
    arguments = build_parser().parse_args(argv)
    if not arguments.root.is_dir():
        raise DataError(f"--root {arguments.root} is not a directory; give one that holds Python modules")
    modules = choose(find_modules(arguments.root), arguments.max_bytes, arguments.min_bytes)
    documents, size = write_corpus(arguments.output, arguments.root, modules)
    longest = max(path.stat().st_size for path in modules)
    print(f"{arguments.output}: {documents} documents, {size / 1e6:.1f} MB, the longest about {longest / 1e3:.0f} kB")


if __name__ == "__main__":
    run_program(main)
