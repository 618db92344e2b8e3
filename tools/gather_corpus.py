#!/usr/bin/env python3
"""Gather a corpus of long documents from this interpreter's own standard library.

One document per module, the longest first until ``--max-bytes`` is reached, written in a fixed
shuffled order as JSON lines ``{"text": ..., "name": ..., "bytes": ...}``. Nothing is downloaded.

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

from megatron_sp.errors import DataError  # noqa: E402
from megatron_sp.output_files import complete_file  # noqa: E402
from megatron_sp.progress import progress_bar  # noqa: E402
from megatron_sp.runtime import run_program  # noqa: E402

SKIPPED_DIRECTORIES = {"__pycache__", "site-packages", "dist-packages"}


def find_modules(root: Path) -> list[Path]:
    """Return all Python source files below ``root``, without installed packages, in a stable order."""
    return sorted(_walk(root))


def _walk(root: Path) -> Iterator[Path]:
    for directory, subdirectories, files in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in SKIPPED_DIRECTORIES]
        yield from (Path(directory, name) for name in files if name.endswith(".py"))


def choose(modules: list[Path], max_bytes: int, min_bytes: int) -> list[Path]:
    """Return the longest modules of at least ``min_bytes`` that together stay within ``max_bytes``."""
    chosen, total = [], 0
    for size, path in sorted(((path.stat().st_size, path) for path in modules), reverse=True):
        if size < min_bytes:
            break
        if total + size <= max_bytes:
            chosen.append(path)
            total += size
    return chosen


def write_corpus(output: Path, root: Path, modules: list[Path]) -> tuple[int, int]:
    """Write one JSON line for each module that is valid UTF-8, completely or not at all.

    Returns:
        Number of documents and their bytes.
    """
    # --split cuts the documents in their order: modules of one package must not all fall into the same part.
    order = sorted(modules, key=lambda path: hashlib.sha256(str(path.relative_to(root)).encode()).digest())
    documents = size = 0
    with complete_file(output, "--output") as file:
        for path in progress_bar(order, desc="Gathering documents", unit=" documents"):
            try:
                text = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue  # the library's own tests of encodings hold files that are broken on purpose
            length = len(text.encode())
            row = {"text": text, "name": str(path.relative_to(root)), "bytes": length}
            file.write((json.dumps(row) + "\n").encode())
            documents, size = documents + 1, size + length
        if not documents:
            raise DataError(f"no Python module of the wanted size below {root}; give another directory with --root or "
                            "lower --min-bytes")
    return documents, size


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines file to write")
    parser.add_argument("--root", type=Path, default=Path(sysconfig.get_paths()["stdlib"]),
                        help="directory to gather from (default: the standard library, %(default)s)")
    parser.add_argument("--max-bytes", type=int, default=16_000_000, help="size of the corpus (default: %(default)s)")
    parser.add_argument("--min-bytes", type=int, default=8_000,
                        help="leave out shorter modules (default: %(default)s)")
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
