"""Write and compare checksums of token files, which reveal a damaged token that no check of sizes or offsets can find.

``PREFIX.checksums.json`` describes ``PREFIX.bin`` and ``PREFIX.idx``::

    {"format": "megatron_sp checksums", "version": 1, "algorithm": "sha256", "block_bytes": 16777216,
     "files": {"bin": {"bytes": 40000000, "blocks": ["9f86d0...", "60303a...", "fd61a0..."]},
               "idx": {"bytes": 1002, "blocks": ["2c26b4..."]}}}

Each entry of ``blocks`` is the SHA-256 of ``block_bytes`` consecutive bytes; the last block may be shorter. With blocks
instead of one sum for the whole file, a message can say where the damage is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence

from megatron_sp.errors import DataError
from megatron_sp.output_files import complete_file, reason_of

BLOCK_BYTES = 1 << 24
FORMAT = "megatron_sp checksums"
VERSION = 1
ENDINGS = ("bin", "idx")


def checksum_path(prefix: str | os.PathLike[str]) -> str:
    """Return the path of the checksum file of a token set."""
    return os.fspath(prefix) + ".checksums.json"


def remove_checksums(prefix: str | os.PathLike[str]) -> None:
    """Remove the checksum file of a token set, if there is one. A writer calls this before it replaces the set."""
    with contextlib.suppress(FileNotFoundError):
        os.remove(checksum_path(prefix))


def write_checksums(prefix: str | os.PathLike[str], progress: Callable[[int], None] = lambda count: None) -> None:
    """Read both files of a token set and write its checksum file, completely or not at all.

    Args:
        prefix: path of the two files without ``.bin`` and ``.idx``.
        progress: called with the number of bytes of each block that was read.

    Raises:
        DataError: a file cannot be read, or the checksum file cannot be written.
    """
    files = {}
    for ending in ENDINGS:
        blocks, size = [], 0
        for count, digest in _blocks_of(f"{os.fspath(prefix)}.{ending}", BLOCK_BYTES):
            blocks.append(digest)
            size += count
            progress(count)
        files[ending] = {"bytes": size, "blocks": blocks}
    content = {"format": FORMAT, "version": VERSION, "algorithm": "sha256", "block_bytes": BLOCK_BYTES, "files": files}
    with complete_file(checksum_path(prefix)) as file:
        file.write(json.dumps(content).encode() + b"\n")


def find_damage(prefix: str | os.PathLike[str], progress: Callable[[int], None] = lambda count: None,
                endings: Sequence[str] = ENDINGS) -> list[str]:
    """Read the files of a token set and compare them with the checksum file.

    Args:
        prefix: path of the files without ending.
        progress: called with the number of bytes of each block that was read.
        endings: which of the two files to read.

    Returns:
        One sentence for each difference; an empty list if the files are as they were written.

    Raises:
        DataError: a file is missing or cannot be read, or the checksum file is damaged itself.
    """
    files, block_bytes = _read(checksum_path(prefix))
    problems = []
    for ending in endings:
        path, (size, blocks) = f"{os.fspath(prefix)}.{ending}", files[ending]
        found = 0
        for place, (count, digest) in enumerate(_blocks_of(path, block_bytes)):
            start, found = found, found + count
            if place < len(blocks) and digest != blocks[place] and found <= size:
                problems.append(f"{path}: bytes {start} to {found - 1} are not what was written "
                                f"(block {place} of {len(blocks)}).")
            progress(count)
        if found != size:
            problems.append(f"{path} has {found} bytes, but had {size} when its checksums were written.")
    return problems


def _blocks_of(path: str, block_bytes: int) -> Iterator[tuple[int, str]]:
    """Yield the size and the hexadecimal SHA-256 of each block of a file."""
    try:
        with open(path, "rb") as file:
            while block := file.read(block_bytes):
                yield len(block), hashlib.sha256(block).hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {reason_of(error)}.") from None


def _read(path: str) -> tuple[dict[str, tuple[int, list[str]]], int]:
    """Return size and block sums of each file by ending, and the bytes of a block."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        if (content["format"], content["algorithm"]) != (FORMAT, "sha256"):
            raise ValueError("it is not a checksum file of this program")
        if content["version"] != VERSION:
            raise DataError(f"{path} has version {content['version']}; this program reads version {VERSION}.")
        block_bytes = content["block_bytes"]
        files = {ending: (content["files"][ending]["bytes"], content["files"][ending]["blocks"]) for ending in ENDINGS}
        for size, blocks in files.values():
            if len(blocks) != -(-size // block_bytes):
                raise ValueError(f"{len(blocks)} blocks do not fit {size} bytes")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {reason_of(error)}. Checksums are written by --checksum of "
                        "tools/preprocess_data.py.") from None
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise DataError(f"{path} is damaged ({error}); remove it, or write it again.") from None
    return files, block_bytes
