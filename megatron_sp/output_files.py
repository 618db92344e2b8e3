"""Write output files completely or not at all, and report a full disk in one sentence."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

from megatron_sp.errors import DataError


def reason_of(error: OSError) -> str:
    """Return the operating system's message for an error; without one, as in numpy's errors, the error's own text."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{error.strerror} (ulimit -n shows and sets how many a process may open)"
    return error.strerror or f"{error}; the disk may be full"


def cannot_write(path: str | os.PathLike[str], error: OSError, flag: str = "") -> DataError:
    """Return the message for a file that cannot be written.

    Args:
        path: the file.
        error: what the operating system said.
        flag: the flag that named the file, if one did.
    """
    return DataError(f"{f'{flag} ' * bool(flag)}{os.fspath(path)} cannot be written: {reason_of(error)}. "
                     "Free some space, or give a place that can be written.")


@contextlib.contextmanager
def complete_file(path: str | os.PathLike[str], flag: str = "") -> Iterator[BinaryIO]:
    """Open a file for writing that appears under its name only when the ``with`` block ends without an error.

    Until then the bytes are in ``PATH.writing-PID``, which is removed after any error. Missing directories are made.

    Args:
        path: the file.
        flag: the flag that named it, for the message.

    Raises:
        DataError: the file cannot be written, for example because the disk is full.
    """
    target = os.fspath(path)
    aside = f"{target}.writing-{os.getpid()}"
    try:
        os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
        with open(aside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)
    except OSError as error:
        raise cannot_write(path, error, flag) from None
    finally:
        with contextlib.suppress(OSError):
            os.remove(aside)


@contextlib.contextmanager
def no_empty_directory_left(directory: str | os.PathLike[str]) -> Iterator[None]:
    """After an error in the ``with`` block, remove the directory and those above it that were made in it, if empty."""
    made, path = [], os.path.abspath(directory)
    while not os.path.exists(path):
        made.append(path)
        path = os.path.dirname(path)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for each in made:
                os.rmdir(each)
        raise


def write_json(path: str | os.PathLike[str], value: Any, flag: str = "") -> None:
    """Write a value as JSON, complete or not at all (see ``complete_file``).

    Raises:
        DataError: the file cannot be written, for example because the disk is full.
    """
    with complete_file(path, flag) as file:
        file.write(json.dumps(value, indent=1).encode() + b"\n")
