"""Write a model in Hugging Face's format: config.json, safetensors files with their index, tokenizer."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_sp.checkpoint.writing import sync_directory
from megatron_sp.config.families import CONFIG, Family, WeightName, hugging_face_config
from megatron_sp.config.schema import Model
from megatron_sp.convert.hugging_face import INDEX, SINGLE, weight_names
from megatron_sp.convert.lazy import LazyTensor, Weights, changed, rows_joined, transposed
from megatron_sp.convert.parameters import is_norm_weight
from megatron_sp.convert.safetensors_file import tensor_bytes, write_safetensors
from megatron_sp.errors import CheckpointError
from megatron_sp.progress import progress_bar


def export(directory: Path, family: Family, model: Model, weights: Weights, *, dtype: torch.dtype, shard_bytes: int,
           more_config: dict[str, object], tokenizer: dict[str, Path | str]) -> list[str]:
    """Write a model's directory, which appears under its name when it is complete.

    Args:
        directory: the directory to write. It must not exist, or be empty.
        model: the resolved model flags, vocabulary size included.
        weights: the weights of the whole model, under this package's names.
        dtype: type of the written weights.
        shard_bytes: largest size of one safetensors file in bytes, unless a single tensor is larger.
        more_config: further keys of config.json.
        tokenizer: file name in ``directory`` -> path of a file to copy there, or text to write.

    Returns:
        The names of the written files.

    Raises:
        CheckpointError: the directory is not empty or cannot be written. Nothing is left behind.
    """
    aside = directory.with_name(f"{directory.name}.writing-{os.getpid()}")
    try:
        if directory.exists() and any(directory.iterdir()):
            raise CheckpointError(f"--save {directory} is not empty; give a new directory")
        aside.mkdir(parents=True)
        _write_weights(aside, _stored(family, model, weights), dtype, shard_bytes)
        for name, content in tokenizer.items():
            if isinstance(content, Path):
                shutil.copyfile(content, aside / name)
            else:
                _write_text(aside / name, content)
        config = hugging_face_config(family, model, str(dtype).removeprefix("torch.")) | more_config
        _write_text(aside / CONFIG, json.dumps(config, indent=2) + "\n")
        sync_directory(aside)
        if directory.exists():
            directory.rmdir()
        os.rename(aside, directory)
        sync_directory(directory.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write {directory}: {error.strerror or error}. Free some space, or give another "
                              "--save") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return sorted(path.name for path in directory.iterdir())


def _stored(family: Family, model: Model, weights: Weights) -> dict[str, LazyTensor]:
    """Return the tensors under Hugging Face's names and in their shapes."""
    parts: dict[str, list[tuple[WeightName, LazyTensor]]] = {}
    for own, rule, name in weight_names(family, model):
        tensor = weights[own]
        if model.apply_layernorm_1p and is_norm_weight(own):
            tensor = changed(tensor, lambda x: x + 1)
        parts.setdefault(name, []).append((rule, tensor))
    stored = {}
    for name, group in parts.items():
        joined = rows_joined([tensor for _, tensor in sorted(group, key=lambda entry: entry[0].part)])
        stored[name] = transposed(joined) if group[0][0].transposed else joined
    return stored


def _write_weights(directory: Path, tensors: dict[str, LazyTensor], dtype: torch.dtype, shard_bytes: int) -> None:
    """Write one file, or several with an index that says which tensor is in which."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        count = tensor_bytes(tensor.shape, dtype)
        if shards[-1] and size + count > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += count
    total = sum(tensor_bytes(tensor.shape, dtype) for tensor in tensors.values())
    places: dict[str, str] = {}
    with progress_bar(total=total, unit="B", unit_scale=True, unit_divisor=1024, desc="writing") as bar:

        def rows(tensor: LazyTensor) -> Iterator[torch.Tensor]:
            for start, stop in tensor.row_ranges():
                part = tensor.read(start, stop)
                bar.update(part.numel() * dtype.itemsize)
                yield part

        for number, names in enumerate(shards, 1):
            file_name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            places |= dict.fromkeys(names, file_name)
            with (directory / file_name).open("wb") as file:
                write_safetensors(file, [(name, tensors[name].shape, rows(tensors[name])) for name in names], dtype)
                file.flush()
                os.fsync(file.fileno())
    if len(shards) > 1:
        _write_text(directory / INDEX, json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2))


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
