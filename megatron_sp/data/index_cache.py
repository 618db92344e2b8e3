"""A directory of arrays that many processes share: one process builds them, and all map them into memory.

An entry is a directory whose name is the hash of everything that its arrays depend on. A process builds the entry under
another name and renames it when it is complete, so no reader sees an unfinished entry. Entries are never rewritten. The
first process takes a lock and builds the entry; the others wait for the lock and then find it. The system releases the
lock of a killed process, and the next one removes what the killed one had written and builds the entry. Where the file
system has no locks, two processes may build the same entry, and the result of the second is deleted. A node with a disk
of its own builds its own entries.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator

import numpy as np

from megatron_sp.errors import DataError
from megatron_sp.output_files import reason_of

try:
    import fcntl
except ImportError:  # not on every platform
    fcntl = None  # type: ignore[assignment]

FORMAT = 2  # part of every key: raise it when the meaning of a stored array changes
DESCRIPTION = "description.json"  # what the arrays depend on, and their names, types and shapes
BUILDING = ".building-"  # in the name of an entry that is not complete yet
SMALL = 1 << 16  # bytes; a smaller array is read whole, since each mapped file keeps a file descriptor open
Arrays = dict[str, np.ndarray]


class IndexCache:
    """Entries of named arrays in one directory.

    Args:
        directory: holds the entries; "": nothing is stored, and every call builds its arrays in memory.
        required: whether the user named this directory. Then it is an error if it cannot be written. The default
            directory beside the data may be read-only.
    """

    def __init__(self, directory: str = "", required: bool = False):
        self.directory = directory
        self.required = required

    def get(self, description: dict[str, object], build: Callable[[], Arrays]) -> Arrays:
        """Return the arrays that ``description`` determines: from disk if they are there, else built and stored.

        Where the default directory cannot be written, each process builds the arrays in its own memory.

        Args:
            description: all values that the arrays depend on; they must be JSON values.
            build: computes the arrays.

        Raises:
            DataError: an entry is damaged or cannot be read, or a directory that the user asked for cannot be written.
        """
        if not self.directory:
            return build()
        text = json.dumps({"format": FORMAT, **description}, sort_keys=True)
        entry = os.path.join(self.directory, hashlib.blake2b(text.encode(), digest_size=16).hexdigest())
        if (arrays := _load(entry)) is not None:
            return arrays
        try:
            os.makedirs(self.directory, exist_ok=True)
            with _locked(entry + ".lock") as is_locked:
                if (arrays := _load(entry)) is None:
                    if is_locked:
                        _remove_unfinished(entry)
                    _store(entry, text, build())
                    arrays = _load(entry)
        except OSError as error:
            if self.required:
                raise DataError(f"--data-cache-path {self.directory} cannot be written: {reason_of(error)}; "
                                "give a directory with write permission and free space.") from None
            return build()
        if arrays is None:
            raise DataError(f"{entry} was written but cannot be read back; remove it or use another "
                            "--data-cache-path.")
        return arrays


def _load(entry: str) -> Arrays | None:
    # An entry gets its name when it is complete. So a file that is missing later is damage, not a build under way.
    if not os.path.isdir(entry):
        return None
    try:
        with open(os.path.join(entry, DESCRIPTION)) as file:
            shapes = json.load(file)["arrays"]
        arrays = {name: _read(os.path.join(entry, name + ".npy")) for name in shapes}
        if wrong := [name for name, array in arrays.items() if _shape_of(array) != shapes[name]]:
            raise ValueError(f"{wrong[0]}.npy holds another array than was stored")
    except FileNotFoundError as error:
        raise _damaged(entry, f"{os.path.basename(error.filename)} is missing") from None
    except OSError as error:
        raise DataError(f"The index cache {entry} cannot be read: {reason_of(error)}.") from None
    except Exception as error:  # json and numpy raise many kinds for a damaged file
        raise _damaged(entry, str(error) or type(error).__name__) from None
    return arrays


def _shape_of(array: np.ndarray) -> list[object]:
    """Return type and shape of an array, as they are written into the description."""
    return [array.dtype.str, list(array.shape)]


def _damaged(entry: str, why: str) -> DataError:
    return DataError(f"The index cache {entry} is damaged ({why}); remove this directory, it is built again.")


def _read(path: str) -> np.ndarray:
    try:
        return np.load(path, mmap_mode=None if os.path.getsize(path) < SMALL else "r", allow_pickle=False)
    except EOFError:
        raise ValueError("empty file") from None


def _remove_unfinished(entry: str) -> None:
    """Remove the files that killed builds of this entry left behind. The caller must hold the entry's lock."""
    for path in glob.glob(glob.escape(entry + BUILDING) + "*"):
        shutil.rmtree(path, ignore_errors=True)


def _store(entry: str, text: str, arrays: Arrays) -> None:
    aside = tempfile.mkdtemp(prefix=os.path.basename(entry) + BUILDING, dir=os.path.dirname(entry))
    try:
        for name, array in arrays.items():
            with open(os.path.join(aside, name + ".npy"), "wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
        shapes = {name: _shape_of(array) for name, array in arrays.items()}
        with open(os.path.join(aside, DESCRIPTION), "w") as file:
            file.write(json.dumps({**json.loads(text), "arrays": shapes}, sort_keys=True) + "\n")
        os.chmod(aside, 0o755)  # mkdtemp lets only this user read the directory; other users may train on the same data
        with contextlib.suppress(FileExistsError, NotADirectoryError):
            os.rename(aside, entry)
    except OSError as error:
        if not os.path.isdir(entry):  # if it exists now, another process has built the entry in the meantime
            raise error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[bool]:
    """Hold an exclusive lock during the ``with`` statement; the system releases it when the process is killed.

    Yields:
        Whether the lock is held: False where the file system has no locks.
    """
    if fcntl is None:
        yield False
        return
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            is_locked = True
        except OSError:
            is_locked = False
        yield is_locked
