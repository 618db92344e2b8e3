"""Write a checkpoint of this package from lazy tensors, and read one as lazy tensors, without building the model."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_sp.checkpoint import files, writing
from megatron_sp.checkpoint.lock import RunLock
from megatron_sp.checkpoint.metadata import CheckpointReader
from megatron_sp.checkpoint.saving.tensor_file import TensorWriter
from megatron_sp.checkpoint.state import Piece, PieceLoadPlanner, PieceSavePlanner
from megatron_sp.checkpoint.tokenizer_files import copy_tokenizer
from megatron_sp.checkpoint.verification import read_tensors
from megatron_sp.config.schema import Run
from megatron_sp.config.serialize import to_dict
from megatron_sp.convert.lazy import LazyTensor, Weights
from megatron_sp.errors import CheckpointError
from megatron_sp.progress import progress_bar
from megatron_sp.torch_internals import storage_info

#: Bytes after which a new .distcp file begins.
FILE_BYTES = 1 << 32


class _StreamedTensor:
    """A lazy tensor as torch.distributed.checkpoint saves it: in groups of rows, each read when it is written."""

    def __init__(self, tensor: LazyTensor):
        self.tensor = tensor

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(torch.empty(0, dtype=torch.float32))
        shape = self.tensor.shape
        items = []
        for start, stop in self.tensor.row_ranges():
            offsets = torch.Size((start, *(0 for _ in shape[1:])))
            chunk = ChunkStorageMetadata(offsets, torch.Size((stop - start, *shape[1:])))
            items.append(WriteItem(index=MetadataIndex(name, offsets), type=WriteItemType.SHARD,
                                   tensor_data=TensorWriteData(chunk, properties, torch.Size(shape))))
        return items


class _StreamPlanner(PieceSavePlanner):
    """Plans the save of a dict of ``_StreamedTensor``.

    Args:
        written: called with the bytes of each group of rows.
    """

    def __init__(self, written: Callable[[int], None]):
        super().__init__()
        self.written = written

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        data = write_item.tensor_data
        assert data is not None
        start = data.chunk.offsets[0]
        rows = self.state_dict[write_item.index.fqn].tensor.read(start, start + data.chunk.sizes[0])
        self.written(rows.numel() * 4)
        return rows.float().contiguous()


class _StreamWriter(TensorWriter):
    """Writes items one by one, since torch's own writer keeps all tensors of a file in memory until it is complete."""

    def entries(self) -> dict[str, dict[str, Any]]:
        """Return the manifest's entries of the files that were written."""
        return {name: files.entry_of(size, crc) for name, (size, crc) in self._files.written.items()
                if name.endswith(".distcp")}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        items = list(plan.items)
        number = 0
        while items:
            name = f"__0_{number}.distcp"
            number += 1
            with self._files.create_stream(self.directory / name, "wb") as file:
                while items and file.tell() < FILE_BYTES:
                    item, start = items.pop(0), file.tell()
                    tensor = planner.resolve_data(item)
                    assert isinstance(tensor, torch.Tensor)
                    # A view of a larger storage would be saved with all of it.
                    torch.save(tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone(), file)
                    results.append(WriteResult(item.index, tensor.nbytes,
                                               storage_info(name, start, file.tell() - start)))
                file.flush()
                os.fsync(file.fileno())
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


def write_checkpoint(directory: Path, iteration: int, weights: Weights, run: Run, counters: dict[str, int]) -> Path:
    """Write a checkpoint that holds weights only, and let the tracker point to it.

    Args:
        directory: the ``--save`` directory of a training run, or a new one.
        run: a configuration whose model is that of the weights. The checkpoint stores it.
        counters: entries of ``TrainState`` that are not 0.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: the checkpoint cannot be written, or the source cannot be read. Nothing is left behind.
    """
    run = replace(run, checkpoint=replace(run.checkpoint, save_optimizer=False))
    state = {"format": files.FORMAT, "iteration": iteration, "vocab_size": run.model.vocab_size, "optimizer": None,
             "train": {"iteration": iteration, "consumed_samples": 0, "consumed_tokens": 0, "scheduler_samples": 0,
                       **counters},
             "schedule": {}, "loss_scaler": {"dynamic": False}, "config": to_dict(run)}
    building: Path | None = None
    lock: RunLock | None = None
    try:
        lock = RunLock.take(directory, 1)
        building = writing.start_building(directory, iteration)
        entries = _write_tensors(building, weights)
        writing.write_durably(building / files.STATE, json.dumps(state, indent=1))
        copy_tokenizer(run.data, building)
        for name in files.file_names(building):
            if name not in entries:
                entries[name] = files.manifest_entry(building / name)
        return writing.finish_building(building, iteration, entries)
    except BaseException as error:
        if building is not None:
            with contextlib.suppress(OSError, CheckpointError):
                writing.remove_unfinished(building)
        if reason := _failure_of_system(error):
            raise CheckpointError(f"cannot write {directory}: {reason}. Free some space, or give another --save"
                                  ) from None
        raise
    finally:
        if lock is not None:
            lock.release()


def _failure_of_system(error: BaseException | None) -> str:
    """Return the operating system's message if an error came from a file that could not be written; else "".

    torch.save raises an error of its own while it handles the system's.
    """
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return (error.strerror or str(error)) if error is not None else ""


def _write_tensors(building: Path, weights: Weights) -> dict[str, dict[str, Any]]:
    """Write the tensors, and return the manifest's entries of their files."""
    writer = _StreamWriter(building)
    total = 4 * sum(torch.Size(tensor.shape).numel() for tensor in weights.values())
    streamed: Any = {f"model.{name}": _StreamedTensor(tensor) for name, tensor in weights.items()}
    failure: BaseException | None = None
    with progress_bar(total=total, unit="B", unit_scale=True, unit_divisor=1024, desc="writing") as bar:
        with _without_warning_of_no_group():
            try:
                dcp.save(streamed, storage_writer=writer, planner=_StreamPlanner(bar.update), no_dist=True)
            except dcp.api.CheckpointException as error:      # torch wraps what happened on this only rank
                failure = next(iter(error.failures.values()))[0]
    if failure is not None:     # raised here, because a raise above would replace the context that holds its cause
        raise failure
    return writer.entries()


@contextlib.contextmanager
def _without_warning_of_no_group() -> Iterator[None]:
    """Silence torch's warning that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed.*")
        yield


class _Reader(CheckpointReader):
    """Reads ``.metadata`` once for all tensors."""

    known: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self.known is None:
            self.known = super().read_metadata(*args, **kwargs)
        return self.known


def read_weights(path: Path) -> Weights:
    """Return the parameters in a checkpoint's directory as lazy tensors, after verifying its files.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    manifest = files.read_manifest(path)
    with progress_bar(manifest.items(), unit="file", desc="verifying") as entries:
        for name, entry in entries:
            if damage := files.describe_damage(path / name, entry):
                raise CheckpointError(f"{damage}; {files.choices(path.parent)}")
    reader = _Reader(path, manifest)
    return {name.removeprefix("model."): _stored(reader, path, name, entry)
            for name, entry in read_tensors(path, manifest).items() if name.startswith("model.")}


def _stored(reader: _Reader, path: Path, name: str, entry: TensorStorageMetadata) -> LazyTensor:
    shape = tuple(entry.size)

    def read(a: int, b: int) -> torch.Tensor:
        rows = torch.empty((b - a, *shape[1:]), dtype=entry.properties.dtype)
        piece: Any = {name: Piece(rows, shape, (a, *(0 for _ in shape[1:])))}
        with _without_warning_of_no_group():
            dcp.load(piece, storage_reader=reader, planner=PieceLoadPlanner(), no_dist=True)
        return rows

    # torch reads stored pieces whole, so groups of rows end where pieces end.
    bounds = tuple(sorted({chunk.offsets[0] for chunk in entry.chunks} | {shape[0]}))
    return LazyTensor(shape, read, f"{path}: {name}", bounds=bounds)
