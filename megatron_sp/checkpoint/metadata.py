"""Read a checkpoint's ``.metadata`` without running code from it.

torch.distributed.checkpoint stores there which tensor lies where, as a pickle, and reads it with ``pickle.load``,
which calls any function the file names. This reader only accepts the few classes that such a file needs.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Container
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata

from megatron_sp.checkpoint.files import DamagedCheckpoint
from megatron_sp.errors import CheckpointError

METADATA = ".metadata"

#: Classes and functions that a ``.metadata`` file may name, besides torch's data types.
_ALLOWED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},      # returns the layout of a name such as "torch.strided"; harmless
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},      # Python 3.13 defines these two classes here
    "collections": {"OrderedDict"},
}


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that raises UnpicklingError for every class or function outside ``_ALLOWED``."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if "." in name or name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs and could run code")
        # Python 3.13 writes pathlib._local, which older versions do not have
        return super().find_class("pathlib" if module == "pathlib._local" else module, name)


class CheckpointReader(FileSystemReader):
    """Reads the tensors of a checkpoint directory for ``torch.distributed.checkpoint.load``.

    Args:
        files: names of the files that may be read, which the manifest lists; None allows every file.
    """

    def __init__(self, path: str | Path, files: Container[str] | None = None):
        super().__init__(path)
        self.directory, self.files = Path(path), files
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the content of ``.metadata``: shape, type and place of each tensor.

        Raises:
            DamagedCheckpoint: the file is missing or damaged, or names something that could run code.
        """
        path = self.directory / METADATA
        try:
            with path.open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
            self._check(metadata)
        except Exception as error:      # a damaged pickle raises almost anything
            raise DamagedCheckpoint(f"cannot read {path}: {error}") from None
        if not isinstance(metadata.storage_meta, StorageMeta):
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_tensor_entries(self) -> dict[str, TensorStorageMetadata]:
        """Return the metadata of each tensor by name: its shape, its type, and the chunks it is stored in."""
        return cast(dict[str, TensorStorageMetadata], self.read_metadata().state_dict_metadata)

    def read_tensor(self, name: str) -> torch.Tensor:
        """Return one whole tensor, read without a process group.

        Raises:
            KeyError: the checkpoint has no tensor of this name.
            CheckpointError: it cannot be read.
        """
        if self._metadata is None:
            self._metadata = self.read_metadata()
        entry = cast(TensorStorageMetadata, self._metadata.state_dict_metadata[name])
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            place = self._metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            path = self.directory / place.relative_path
            try:
                with path.open("rb") as file:
                    file.seek(place.offset)
                    part = torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)
                tensor[tuple(slice(start, start + length) for start, length in zip(chunk.offsets, chunk.sizes))] = part
            except Exception as error:      # a damaged archive raises almost anything
                raise CheckpointError(f"cannot read {name} from {path}: {error}") from None
        return tensor

    def _check(self, metadata: Metadata) -> None:
        """Raise ValueError when an entry is not a tensor, or lies in a file outside ``files``."""
        if not isinstance(metadata, Metadata):
            raise ValueError("it does not describe tensors")
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata):
                raise ValueError(f"{name!r} is not a tensor")
        for place in metadata.storage_data.values():
            if self.files is not None and place.relative_path not in self.files:
                raise ValueError(f"it names the file {place.relative_path!r}, which the manifest does not list")
