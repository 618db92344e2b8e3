"""Read and write safetensors files a few rows at a time.

The safetensors package needs all tensors of a file in memory to write it, and maps the whole file to read it. The
format is simple, so this module streams it instead: 8 bytes with the length of the header, the header in JSON (for
each tensor type, shape, and where its bytes begin and end), then the bytes of the tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megatron_sp.convert.lazy import LazyTensor
from megatron_sp.errors import CheckpointError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
          "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
#: Types that other libraries store and that no weight of a model here can have; they are refused when they are read.
UNREADABLE = {"F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "F6_E3M2", "U16", "U32", "U64", "C64"}
LARGEST_HEADER = 100_000_000      # as the safetensors package


def read_safetensors(path: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a file by name; their bytes are read when they are needed.

    Raises:
        CheckpointError: the file cannot be read, or it is damaged or cut short.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if 2 <= length <= min(LARGEST_HEADER, size - 8) else None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is damaged: it does not begin with the header of a safetensors file. "
                              "Copy or download it again")
    header.pop("__metadata__", None)
    found = {name: _tensor(path, name, entry, 8 + length, size) for name, entry in header.items()}
    _refuse_shared_bytes(path, header)
    return found


def _refuse_shared_bytes(path: Path, header: dict[str, Any]) -> None:
    """Raise CheckpointError where the bytes of tensors overlap or have gaps, which the format does not allow."""
    end, before = 0, ""
    for start, stop, name in sorted((*entry["data_offsets"], name) for name, entry in header.items()):
        if start != end:
            how = f"overlap those of {before}" if start < end else "do not begin where those of the tensor before end"
            raise CheckpointError(f"{path} is damaged: the bytes of the tensor {name} {how}. Copy or download it again")
        end, before = stop, name


def _tensor(path: Path, name: str, entry: Any, first: int, size: int) -> LazyTensor:
    """Return one tensor of a file.

    Args:
        first: place in the file where the bytes of the tensors begin.
        size: size of the file in bytes.
    """
    try:
        kind, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if kind in UNREADABLE:
            raise CheckpointError(f"{path}: the tensor {name} has the type {kind}, which this program cannot read; "
                                  "give the model in float32, float16 or bfloat16")
        dtype = DTYPES[kind]
        sound = all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop)) and (
            stop - start == math.prod(shape) * dtype.itemsize)
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise CheckpointError(f"{path} is damaged: the entry of the tensor {name} in its header makes no sense. "
                              "Copy or download it again")
    if first + stop > size:
        raise CheckpointError(f"{path} is cut short: it has {size} bytes, and its tensor {name} ends at byte "
                              f"{first + stop}. Copy or download it again")
    row_bytes = math.prod(shape[1:]) * dtype.itemsize

    def read(a: int, b: int) -> torch.Tensor:
        data = bytearray((b - a) * row_bytes)
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(first + start + a * row_bytes)
                got = _read_into(file, data)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        if got < len(data):
            raise CheckpointError(f"{path} became shorter while it was read. Copy or download it again")
        return torch.frombuffer(data, dtype=dtype).view(b - a, *shape[1:]) if data else torch.empty(
            (b - a, *shape[1:]), dtype=dtype)

    return LazyTensor(shape, read, f"{path}: {name}")


def _read_into(file: Any, data: bytearray) -> int:
    """Fill ``data`` from a file in as many reads as that takes, and return how many bytes were read."""
    view, got = memoryview(data), 0
    while got < len(data) and (count := file.readinto(view[got:])):
        got += count
    return got


def tensor_bytes(shape: Iterable[int], dtype: torch.dtype) -> int:
    """Return the size of a tensor in bytes."""
    return math.prod(shape) * dtype.itemsize


def write_safetensors(file: BinaryIO, tensors: list[tuple[str, tuple[int, ...], Iterator[torch.Tensor]]],
                      dtype: torch.dtype) -> None:
    """Write a file.

    Args:
        file: opened for writing.
        tensors: for each tensor its name, its shape, and its rows in consecutive groups, which are read one by one.
        dtype: type of all tensors in the file.
    """
    kind = next(name for name, known in DTYPES.items() if known == dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, shape, _ in tensors:
        end = place + tensor_bytes(shape, dtype)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)      # the bytes of the tensors begin at a multiple of 8
    file.write(len(text).to_bytes(8, "little") + text)
    for name, shape, groups in tensors:
        written = 0
        for rows in groups:
            data = rows.to(dtype).contiguous().view(-1).view(torch.uint8).numpy()
            file.write(memoryview(data))
            written += data.nbytes
        assert written == tensor_bytes(shape, dtype), (name, shape, written)
