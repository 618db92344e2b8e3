"""Write token files: Megatron's pairs of a ``.bin`` and an ``.idx`` file, described in ``indexed_dataset.py``.

Memory does not grow with the number of documents: the lengths wait in working files beside the tokens, and the index is
written from them piece by piece.

::

    PREFIX.bin.ASIDE        tokens                               -> PREFIX.bin
    PREFIX.lengths.ASIDE    tokens of each sequence, int32    \\
    PREFIX.documents.ASIDE  sequences of each document, int32 /  -> PREFIX.idx

ASIDE is ``writing-PID``, or a name that a later process knows too and can continue from.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from megatron_sp.data.token_files.checksums import remove_checksums, write_checksums
from megatron_sp.data.token_files.indexed_dataset import (
    DTYPE_CODES,
    HEADER,
    MAGIC,
    MAX_LENGTH,
    VERSION,
    IndexedDataset,
    bin_path,
    idx_path,
    pointers_of,
)
from megatron_sp.errors import DataError
from megatron_sp.output_files import cannot_write

STEP = 1 << 20  # sequences or tokens that are held in memory at a time
WORKING = ("bin", "lengths", "documents")


class IndexedDatasetBuilder:
    """Write a token set. Both files get their names only when they are complete.

    Args:
        prefix: path of the two files without ``.bin`` and ``.idx``.
        dtype: type of the stored tokens, see ``best_dtype``.
        aside: last part of the working files' names; default: a name of this process alone.
        checksum: whether to write a checksum file too (see ``checksums.py``).

    Use it as a context manager, which opens the files. When the ``with`` block ends by an exception, it removes them.

    Raises:
        DataError: at the start of the ``with`` block, when the files cannot be created.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: np.dtype | type[np.generic], aside: str = "",
                 checksum: bool = False):
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype)
        if self.dtype not in DTYPE_CODES:
            raise ValueError(f"tokens cannot be stored as {self.dtype}")
        self.checksum = checksum
        self._aside = aside or f"writing-{os.getpid()}"
        self._files: dict[str, IO[bytes]] = {}

    def working_path(self, kind: str) -> str:
        """Return the path of a working file: "bin", "lengths", "documents" or "idx"."""
        return f"{self.prefix}.{kind}.{self._aside}"

    def __enter__(self) -> IndexedDatasetBuilder:
        self._open("wb")
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.abort()

    def _open(self, mode: str) -> None:
        try:
            os.makedirs(os.path.dirname(self.prefix) or ".", exist_ok=True)
            for kind in WORKING:
                self._files[kind] = open(self.working_path(kind), mode)  # noqa: SIM115 (closed in finalize/abort)
        except OSError as error:
            raise cannot_write(bin_path(self.prefix), error) from None

    def position(self) -> list[int]:
        """Write what is buffered to the disk, and return the size of each working file."""
        try:
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise cannot_write(bin_path(self.prefix), error) from None
        return [self._files[kind].tell() for kind in WORKING]

    def continue_from(self, sizes: list[int]) -> None:
        """Open the working files of an earlier process in place of new ones, and cut them to the given sizes.

        Args:
            sizes: what ``position`` returned there.

        Raises:
            DataError: a working file is missing or shorter.
        """
        for kind, size in zip(WORKING, sizes, strict=True):
            path = Path(self.working_path(kind))
            found = path.stat().st_size if path.exists() else 0
            if found < size:
                raise DataError(f"{path} has {found} bytes, but had {size} when the unfinished run noted its progress; "
                                "it cannot be continued. Remove the unfinished files and start again.")
        self._open("r+b")
        for kind, size in zip(WORKING, sizes, strict=True):
            self._files[kind].truncate(size)
            self._files[kind].seek(size)

    def add_document(self, tokens: np.ndarray | list[int], lengths: list[int] | None = None) -> None:
        """Add one document.

        Args:
            tokens: all tokens of the document.
            lengths: tokens of each of its sequences; default: one sequence, or none where there are no tokens.
        """
        if lengths is None:
            lengths = [len(tokens)] if len(tokens) else []
        counts = np.asarray(lengths, dtype=np.int64)
        self._add(self._convert(tokens), counts, np.array([len(counts)]))

    def add_documents(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Add many documents of one sequence each.

        Args:
            tokens: the tokens of all documents, one document after another.
            lengths: tokens of each document; 0 for an empty one.
        """
        lengths = np.asarray(lengths, dtype=np.int64)
        filled = lengths > 0
        self._add(self._convert(tokens), lengths[filled], filled)

    def add_dataset(self, other: IndexedDataset, progress: Callable[[int], None] = lambda count: None) -> None:
        """Append all sequences and documents of another token set of the same type, a few million tokens at a time.

        Args:
            other: the token set.
            progress: called with the number of tokens after each step.

        Raises:
            DataError: the other set has another type.
        """
        if other.dtype != self.dtype:
            raise DataError(f"{other.prefix}.bin holds {other.dtype} tokens and cannot be appended to a set of "
                            f"{self.dtype} tokens ({self.prefix}).")
        for start in range(0, other.num_tokens, 4 * STEP):
            tokens = other.read(start, min(4 * STEP, other.num_tokens - start))
            self._write("bin", tokens.astype(self.dtype.newbyteorder("<"), copy=False))
            progress(len(tokens))
        for start in range(0, len(other.lengths), STEP):
            self._write("lengths", other.lengths[start:start + STEP])
        for start in range(0, other.num_documents, STEP):
            self._write("documents", np.diff(other.document_indices[start:start + STEP + 1]).astype("<i4"))

    def _convert(self, tokens: np.ndarray | list[int]) -> np.ndarray:
        wide = np.asarray(tokens)
        if wide.dtype == self.dtype or not wide.size:
            return wide.astype(self.dtype, copy=False)
        limits = np.iinfo(self.dtype)
        if int(wide.min()) < limits.min or int(wide.max()) > limits.max:
            worst = int(wide.max()) if int(wide.max()) > limits.max else int(wide.min())
            raise DataError(f"{self.prefix}: token id {worst} does not fit into {self.dtype.name}; "
                            "the vocabulary size given is too small for the tokens.")
        return wide.astype(self.dtype)

    def _add(self, tokens: np.ndarray, lengths: np.ndarray, sequences_per_document: np.ndarray) -> None:
        if int(lengths.sum()) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens given, but the lengths add up to {int(lengths.sum())}")
        if len(lengths) and int(lengths.max()) > MAX_LENGTH:
            raise DataError(f"{self.prefix}: a sequence has {int(lengths.max())} tokens; the format holds at most "
                            f"{MAX_LENGTH}. Split the document.")
        self._write("bin", tokens.astype(self.dtype.newbyteorder("<"), copy=False))
        self._write("lengths", lengths.astype("<i4"))
        self._write("documents", sequences_per_document.astype("<i4"))

    def _write(self, kind: str, values: np.ndarray) -> None:
        try:
            self._files[kind].write(values.tobytes())
        except OSError as error:
            raise cannot_write(bin_path(self.prefix), error) from None

    def finalize(self, progress: Callable[[int], None] = lambda count: None) -> None:
        """Write the index and give both files their names; then write the checksums if they were asked for.

        Args:
            progress: called with the number of bytes that were read for the checksums.

        Raises:
            DataError: the disk is full, or reports another error; the ``with`` block then removes the working files.
        """
        _, *sizes = self.position()
        try:
            self._write_index(*(size // 4 for size in sizes))
            # Remove an older index first: a kill between the next two lines must not leave it beside the new tokens.
            # Older checksums would contradict the new files.
            remove_checksums(self.prefix)
            with contextlib.suppress(FileNotFoundError):
                os.remove(idx_path(self.prefix))
            os.replace(self.working_path("bin"), bin_path(self.prefix))
            os.replace(self.working_path("idx"), idx_path(self.prefix))
        except OSError as error:
            raise cannot_write(error.filename2 or idx_path(self.prefix), error) from None
        self._remove_unfinished()
        if self.checksum:
            write_checksums(self.prefix, progress)

    def _write_index(self, sequences: int, documents: int) -> None:
        with open(self.working_path("idx"), "wb") as index:
            index.write(HEADER.pack(MAGIC, VERSION, DTYPE_CODES[self.dtype], sequences, documents + 1))
            for lengths in self._stored("lengths"):
                index.write(lengths.tobytes())
            position = 0
            for lengths in self._stored("lengths"):
                index.write((position + pointers_of(lengths, self.dtype.itemsize)).astype("<i8").tobytes())
                position += int(lengths.sum(dtype=np.int64)) * self.dtype.itemsize
            index.write(np.zeros(1, dtype="<i8").tobytes())
            last = 0
            for counts in self._stored("documents"):
                indices = last + np.cumsum(counts, dtype=np.int64)
                index.write(indices.astype("<i8").tobytes())
                last = int(indices[-1])
            index.flush()
            os.fsync(index.fileno())

    def _stored(self, kind: str) -> Iterator[np.ndarray]:
        """Yield the numbers of a working file, some at a time."""
        with open(self.working_path(kind), "rb") as file:
            while data := file.read(4 * STEP):
                yield np.frombuffer(data, dtype="<i4")

    def close(self) -> None:
        """Close the working files and keep them, so that ``continue_from`` can open them again."""
        for file in self._files.values():
            with contextlib.suppress(OSError):  # closing writes what is still buffered, which fails on a full disk
                file.close()

    def abort(self) -> None:
        """Remove the unfinished files, also when an interrupt arrives during the removal or arrived while opening."""
        try:
            self._remove_unfinished()
        except BaseException:
            self._remove_unfinished()
            raise

    def _remove_unfinished(self) -> None:
        for kind in (*WORKING, "idx"):
            with contextlib.suppress(OSError):
                os.remove(self.working_path(kind))
        self.close()


def merge_token_sets(prefixes: Sequence[str], output: str, checksum: bool = False,
                     progress: Callable[[int], None] = lambda count: None) -> IndexedDataset:
    """Write one token set that holds all sequences and documents of several, in order, and return it.

    Only a few million tokens are in memory at a time.

    Args:
        prefixes: the sets.
        output: prefix of the set to write.
        checksum: whether to write a checksum file for it.
        progress: called with the number of tokens after each step.

    Raises:
        DataError: a set is damaged, or the sets do not hold tokens of one type.
    """
    sets = [IndexedDataset(prefix) for prefix in prefixes]
    with IndexedDatasetBuilder(output, sets[0].dtype, checksum=checksum) as builder:
        for each in sets:
            builder.add_dataset(each, progress)
        builder.finalize()
    return IndexedDataset(output)
