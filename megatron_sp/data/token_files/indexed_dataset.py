"""Read token files: Megatron's pairs of a ``.bin`` and an ``.idx`` file (MMIDIDX version 1).

``PREFIX.bin`` holds the tokens of all sequences, one after another, without a header.
``PREFIX.idx`` is little-endian and packed::

    magic "MMIDIDX\\0\\0" (9 bytes) | version uint64 = 1 | dtype code uint8
    num_sequences uint64 | num_document_indices uint64
    lengths int32 [num_sequences]           tokens per sequence
    pointers int64 [num_sequences]          byte offset of each sequence in the .bin
    document_indices int64 [num_documents+1]  first sequence of each document, then num_sequences
    modes int8 [num_sequences]              only in multimodal sets; not used here

A document without tokens has no sequence; it only repeats an entry of ``document_indices``. All
arithmetic on counts and offsets is 64-bit, and nothing here loops over sequences in Python. ``token_writer.py`` writes
such files.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import weakref
from typing import Protocol

import numpy as np

from megatron_sp.config.rules.files import token_file_problem
from megatron_sp.data.token_files.checksums import checksum_path, find_damage
from megatron_sp.errors import DataError
from megatron_sp.output_files import reason_of

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, type[np.generic]] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
DTYPE_CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
MAX_LENGTH = 2**31 - 1  # lengths are int32 in the file
MAX_READ = 1 << 30  # bytes to ask for in one read; Linux returns at most 2^31 - 4096


def best_dtype(vocab_size: int) -> np.dtype:
    """Return the type in which Megatron stores tokens: uint16 for a vocabulary below 65,500, else int32."""
    return np.dtype(np.uint16) if vocab_size < 65500 else np.dtype(np.int32)


def bin_path(prefix: str | os.PathLike[str]) -> str:
    return os.fspath(prefix) + ".bin"


def idx_path(prefix: str | os.PathLike[str]) -> str:
    return os.fspath(prefix) + ".idx"


def pointers_of(lengths: np.ndarray, itemsize: int) -> np.ndarray:
    """Return the byte offset of every sequence. The sum is int64, since int32 lengths may add up to more than 2^31."""
    pointers = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    pointers *= itemsize
    return pointers


class TokenSequences(Protocol):
    """What ``GPTDataset`` needs of the sequences that it cuts into samples."""

    prefix: str
    lengths: np.ndarray

    @property
    def path(self) -> str:
        """The file or the data that holds the tokens, for messages."""

    def __len__(self) -> int:
        """Return the number of sequences."""

    def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return tokens ``[offset, offset + length)`` of sequence ``i``."""

    def fingerprint(self) -> str:
        """Return a stable hash of the lengths."""


class IndexedDataset:
    """Sequences of tokens on disk. Opening maps the index into memory and checks both files.

    Where there is a checksum file (see ``checksums.py``), the index is compared with it too: no other check could see
    that the end of a document has moved. The tokens are not read; ``tools/inspect_dataset.py check`` reads them.

    Args:
        prefix: path of the two files without ``.bin`` / ``.idx``.

    Attributes:
        lengths: tokens per sequence, int32 ``[num_sequences]``.
        pointers: byte offset per sequence, int64 ``[num_sequences]``.
        document_indices: first sequence per document, int64 ``[num_documents + 1]``.
        dtype: type of the stored tokens.

    Raises:
        DataError: a file is missing or damaged, or the two files do not belong together.
    """

    def __init__(self, prefix: str | os.PathLike[str]):
        self.prefix = os.fspath(prefix)
        if problem := token_file_problem(self.prefix):
            raise DataError(problem)
        try:
            self._read_index()
            self._check_index()
            self._check_sums()
            self._file = os.open(bin_path(prefix), os.O_RDONLY)
        except OSError as error:
            raise DataError(f"{error.filename or idx_path(prefix)} cannot be read: {reason_of(error)}.") from None
        weakref.finalize(self, os.close, self._file)

    def _read_index(self) -> None:
        path = idx_path(self.prefix)
        size = os.path.getsize(path)
        if size < HEADER.size:
            raise DataError(f"{path} has {size} bytes, fewer than the {HEADER.size} of an index header; "
                            "it is damaged or not an index.")
        with open(path, "rb") as file:
            magic, version, code, num_sequences, num_entries = HEADER.unpack(file.read(HEADER.size))
            self._index = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if magic != MAGIC:
            raise DataError(f"{path} starts with {magic!r} instead of {MAGIC!r}; it is not a Megatron token index "
                            "(the old lazy/cached formats have to be preprocessed again).")
        if version != VERSION:
            raise DataError(f"{path} has format version {version}; this program reads version {VERSION}.")
        if code not in DTYPES:
            raise DataError(f"{path} has dtype code {code}; token sets have one of {sorted(DTYPES)}.")
        expected = HEADER.size + 12 * num_sequences + 8 * num_entries
        if size not in (expected, expected + num_sequences):
            raise DataError(f"{path} has {size} bytes, but its header announces {num_sequences} sequences and "
                            f"{num_entries} document entries, which take {expected}; it is damaged or cut short.")
        self.dtype = np.dtype(DTYPES[code])
        buffer = np.frombuffer(self._index, dtype=np.uint8)
        self._index_size = size
        ends = np.cumsum([HEADER.size, 4 * num_sequences, 8 * num_sequences, 8 * num_entries]).tolist()
        self.lengths = buffer[ends[0]:ends[1]].view("<i4")
        self.pointers = buffer[ends[1]:ends[2]].view("<i8")
        self.document_indices = buffer[ends[2]:ends[3]].view("<i8")

    def _check_index(self) -> None:
        path = idx_path(self.prefix)
        lengths, pointers, documents = self.lengths, self.pointers, self.document_indices
        if len(lengths) and int(lengths.min()) < 0:
            raise DataError(f"{path} has the negative length {int(lengths.min())} at sequence {int(lengths.argmin())}.")
        ends = pointers + lengths.astype(np.int64) * self.dtype.itemsize
        if len(pointers) and int(pointers[0]) != 0:
            raise DataError(f"{path}: the first sequence starts at byte {int(pointers[0])} instead of 0.")
        wrong = np.flatnonzero(pointers[1:] != ends[:-1])
        if len(wrong):
            at = int(wrong[0]) + 1
            raise DataError(f"{path}: sequence {at} starts at byte {int(pointers[at])}, but the one before it ends at "
                            f"byte {int(ends[at - 1])}; the index is damaged.")
        if len(documents) == 0 or int(documents[0]) != 0 or int(documents[-1]) != len(lengths):
            raise DataError(f"{path}: the document entries must run from 0 to {len(lengths)} (the number of "
                            f"sequences), not {documents[:1].tolist()} to {documents[-1:].tolist()}.")
        if np.any(documents[1:] < documents[:-1]):
            raise DataError(f"{path}: the document entries are not in order.")
        self.num_tokens = int(lengths.sum(dtype=np.int64))
        size, expected = os.path.getsize(bin_path(self.prefix)), self.num_tokens * self.dtype.itemsize
        if size != expected:
            raise DataError(f"{bin_path(self.prefix)} has {size} bytes, but {path} describes {self.num_tokens} "
                            f"{self.dtype.name} tokens in {len(lengths)} sequences, which take {expected}; the two "
                            "files come from different runs or one is cut short. Preprocess the data again.")

    def _check_sums(self) -> None:
        if os.path.exists(checksum_path(self.prefix)) and (found := find_damage(self.prefix, endings=("idx",))):
            raise DataError(f"{found[0]} Restore the file or preprocess the data again. If another program has written "
                            f"this set anew, remove {checksum_path(self.prefix)}.")

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.lengths)

    @property
    def path(self) -> str:
        """The .bin file, for messages."""
        return bin_path(self.prefix)

    @property
    def num_documents(self) -> int:
        return len(self.document_indices) - 1

    def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return tokens ``[offset, offset + length)`` of sequence ``i`` in the stored type, ``[length]``, not writable.

        Raises:
            DataError: a file has become shorter since it was opened, or the disk reports an error.
        """
        self._check_index_size()
        total = int(self.lengths[i])
        length = total - offset if length is None else length
        if not 0 <= offset <= offset + length <= total:
            raise IndexError(f"tokens [{offset}, {offset + length}) of a sequence of {total} tokens")
        return self.read(int(self.pointers[i]) // self.dtype.itemsize + offset, length)

    def document_lengths(self) -> np.ndarray:
        """Return the tokens of each document, int64 ``[num_documents]``."""
        ends = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        return np.diff(ends[self.document_indices])

    def read(self, start: int, count: int) -> np.ndarray:
        """Read ``count`` tokens from token ``start`` of the .bin file.

        The file is not mapped into memory: if a mapped file is cut short or its disk has an error, reading it ends the
        process with the signal SIGBUS and without a message.
        """
        position, wanted = start * self.dtype.itemsize, count * self.dtype.itemsize
        pieces = []
        while wanted:
            try:
                piece = os.pread(self._file, min(wanted, MAX_READ), position)
            except OSError as error:
                raise DataError(f"{bin_path(self.prefix)} cannot be read at byte {position}: "
                                f"{error.strerror}.") from None
            if not piece:
                raise self._has_shrunk(bin_path(self.prefix), os.fstat(self._file).st_size,
                                       self.num_tokens * self.dtype.itemsize)
            pieces.append(piece)
            position, wanted = position + len(piece), wanted - len(piece)
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return np.frombuffer(data, dtype=self.dtype.newbyteorder("<")).astype(self.dtype, copy=False)

    def _check_index_size(self) -> None:
        """Refuse an index file that has become shorter: reading beyond its end would end the process (SIGBUS)."""
        size = self._index.size()
        if size < self._index_size:
            raise self._has_shrunk(idx_path(self.prefix), size, self._index_size)

    def _has_shrunk(self, path: str, size: int, before: int) -> DataError:
        return DataError(f"{path} has {size} bytes, but had {before} when it was opened: another program has changed "
                         "it. Write the file again and start from the last checkpoint; do not overwrite token files "
                         "that a run reads.")

    def fingerprint(self) -> str:
        """Return a stable hash of the sequence lengths, which are all that the order of samples depends on."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(np.ascontiguousarray(self.lengths))
        return digest.hexdigest()
