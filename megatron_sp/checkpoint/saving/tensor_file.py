"""Write this rank's tensors into one file, and compute the file's checksum from the bytes on their way to the disk."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from megatron_sp.checkpoint.agreement import error_in_words
from megatron_sp.checkpoint.files import entry_of
from megatron_sp.checkpoint.metadata import METADATA
from megatron_sp.checkpoint.state import Piece, PieceSavePlanner
from megatron_sp.errors import CheckpointError


class TensorWriter(dcp.FileSystemWriter):
    """torch's writer of checkpoint files, which flushes them to disk and notes their checksums.

    The checksum is computed from the bytes in memory. Unlike one computed from the written file, it also reveals bytes
    that the disk stored wrongly.
    """

    def __init__(self, path: Path):
        super().__init__(path, sync_files=True)
        self.directory = path
        self.fs = self._files = _ChecksummedFiles()

    @classmethod
    def name_files(cls, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans of all ranks with the name of the file that each rank writes."""
        return cls(Path()).prepare_global_plan(plans)

    def write(self, plan: SavePlan, pieces: dict[str, Piece]) -> tuple[list[WriteResult], dict[str, dict[str, Any]]]:
        """Write the tensors of this rank's plan.

        Returns:
            where each tensor lies, for ``finish``, and the manifest's entries of the files by name

        Raises:
            CheckpointError: naming the file, and why it cannot be written.
        """
        if not plan.items:      # other ranks write everything that this rank holds
            return [], {}
        planner = PieceSavePlanner()
        planner.state_dict = pieces
        if not any(piece.data.is_cuda for piece in pieces.values()):
            # Without this the writer would look for a stream on the current GPU, which in a new thread is GPU 0.
            self.per_thread_copy_ahead = 0
        # missing only on another file system than rank 0's, which rank 0 reports
        self.directory.mkdir(exist_ok=True)
        with naming_file_in_errors(self.directory / f"__{dist.get_rank()}_0.distcp"):
            results = self.write_data(plan, planner).wait()
        return results, {name: entry_of(size, crc) for name, (size, crc) in self._files.written.items()}

    def write_metadata(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write ``.metadata`` on rank 0: where each tensor lies.

        Args:
            results: what ``write`` returned on every rank.
        """
        with naming_file_in_errors(self.directory / METADATA):
            self.finish(metadata, results)


class _ChecksummedFiles(FileSystem):
    """torch's access to files, plus the size and CRC-32 of every file that was written, by name."""

    def __init__(self) -> None:
        self.written: dict[str, tuple[int, int]] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        with open(path, mode) as file:
            stream = _ChecksummedStream(cast(BinaryIO, file))
            yield stream
        self.written[os.path.basename(path)] = (stream.size, stream.crc)


class _ChecksummedStream:
    """A file that is written from start to end, which knows the size and CRC-32 of its bytes."""

    def __init__(self, file: BinaryIO):
        self._file, self.size, self.crc = file, 0, 0

    def write(self, data: Any) -> int:
        self._file.write(data)
        length = memoryview(data).nbytes
        self.crc, self.size = zlib.crc32(data, self.crc), self.size + length
        return length

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        self._file.flush()
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def naming_file_in_errors(path: Path) -> Iterator[None]:
    """Turn an error within the block into a CheckpointError that names the file being written."""
    try:
        yield
    except Exception as error:      # file systems raise OSError, torch's writer RuntimeError
        raise CheckpointError(f"rank {dist.get_rank()} cannot write {path}: {error_in_words(error)}") from None
