"""Look into checkpoints without a process group: what they hold, whether they are whole, how two of them differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_sp.checkpoint import files
from megatron_sp.checkpoint.files import DamagedCheckpoint, FoundCheckpoint
from megatron_sp.checkpoint.metadata import CheckpointReader
from megatron_sp.checkpoint.state_file import read_state
from megatron_sp.checkpoint.verification import FULL, damaged_files, read_tensors
from megatron_sp.errors import CheckpointError


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds besides the values of its tensors.

    Attributes:
        state: the content of ``state.json``.
        manifest: size and checksum of each file by name.
        tensors: shape, type and chunks of each tensor by name.
    """

    path: Path
    state: dict[str, Any]
    manifest: dict[str, dict[str, Any]]
    tensors: dict[str, TensorStorageMetadata]

    @classmethod
    def read(cls, path: Path) -> Contents:
        """Return the contents of a checkpoint directory.

        Raises:
            CheckpointError: it is damaged or cannot be read.
        """
        manifest = files.read_manifest(path)
        return cls(path, read_state(path), manifest, read_tensors(path, manifest))

    @property
    def num_bytes(self) -> int:
        return sum(entry["bytes"] for entry in self.manifest.values())

    @property
    def num_parameters(self) -> int:
        return sum(entry.size.numel() for name, entry in self.tensors.items() if name.startswith("model."))

    def summary(self) -> dict[str, Any]:
        """Return the facts about the run at this checkpoint as plain JSON values."""
        config, counters = self.state["config"], self.state["train"]
        parallel, precision = config.get("parallel", {}), config["precision"]
        kind = "bf16" if precision.get("bf16") else "fp16" if precision.get("fp16") else "fp32"
        return {
            "path": str(self.path), "iteration": self.state["iteration"],
            "consumed_samples": counters["consumed_samples"], "consumed_tokens": counters["consumed_tokens"],
            "skipped_iterations": counters.get("skipped_iterations", 0), "precision": kind,
            "loss_scale": self.state["loss_scaler"].get("scale"), "optimizer": self.state["optimizer"],
            "layout": {name: parallel.get(name) for name in LAYOUT}, "seed": config["train"].get("seed"),
            "seq_length": config["data"].get("seq_length"),
            "micro_batch_size": config["train"].get("micro_batch_size"),
            "global_batch_size": config["train"].get("global_batch_size"),
            "vocab_size": self.state["vocab_size"], "tokenizer": config["data"].get("tokenizer_type"),
            "tokenizer_files": [name for name in self.manifest if name.startswith(f"{files.TOKENIZER}/")],
            "model": config["model"], "parameters": self.num_parameters, "tensors": len(self.tensors),
            "files": len(self.manifest) + 1, "bytes": self.num_bytes}


#: Fields of the configuration's section ``parallel`` that say under which layout a checkpoint was saved.
LAYOUT = ("world_size", "tp", "pp", "stages_per_rank", "pipeline_schedule", "ulysses", "ring", "zero_stage",
          "fsdp_size", "megatron_sp")


@dataclass(frozen=True)
class TensorRow:
    """One line of a table of tensors; the values are None unless they were read."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    norm: float | None = None
    largest: float | None = None
    not_finite: int = 0


def tensor_rows(contents: Contents, *, values: bool) -> Iterator[TensorRow]:
    """Yield a row for each tensor, by name. With ``values`` one tensor at a time is read, so memory stays small."""
    reader = CheckpointReader(contents.path, contents.manifest)
    for name, entry in sorted(contents.tensors.items(), key=lambda item: _sort_key(item[0])):
        dtype = entry.properties.dtype
        size = entry.size.numel() * torch.empty((), dtype=dtype).element_size()
        row = TensorRow(name, tuple(entry.size), str(dtype).removeprefix("torch."), size)
        if values:
            tensor = reader.read_tensor(name).double()
            finite = tensor.isfinite()
            norm, largest = float(tensor.norm()), float(tensor.abs().max()) if tensor.numel() else 0.0
            row = TensorRow(row.name, row.shape, row.dtype, row.num_bytes, norm, largest, int((~finite).sum()))
        yield row


def _sort_key(name: str) -> tuple[Any, ...]:
    """Order weights before optimizer states, and layer 2 before layer 10."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split("."))


def damages_of(path: Path, verify: str = FULL) -> list[str]:
    """Return a sentence for everything that is wrong with one checkpoint directory; empty when it is whole.

    Args:
        verify: compare sizes and checksums (FULL), or sizes alone (SIZE).
    """
    try:
        manifest = files.read_manifest(path)
        found = damaged_files(path, manifest.items(), verify)
        if not found:
            read_state(path)
            read_tensors(path, manifest)
        return found + [f"{path / name} is not listed in {files.MANIFEST}; nothing reads it"
                        for name in files.unlisted_files(path, manifest)]
    except DamagedCheckpoint as error:
        return [str(error)]


def iterations_on_disk(directory: Path) -> dict[int, Path]:
    """Return every ``iter_N`` of a ``--save`` directory by N, whole or not.

    Raises:
        CheckpointError: there is none.
    """
    found = files.complete_checkpoints(directory) | files.iteration_directories(directory)
    if not found:
        raise CheckpointError(f"{directory} holds no checkpoint (no directory iter_N); give the --save directory of a "
                              "run, or one checkpoint in it")
    return dict(sorted(found.items()))


def named_checkpoint(directory: Path, iteration: int | None = None) -> FoundCheckpoint:
    """Return the checkpoint that a path and ``--ckpt-step`` name.

    Raises:
        CheckpointError: there is none.
    """
    found = files.find_checkpoint(directory, iteration)
    if found is None:
        raise CheckpointError(f"{directory} holds no checkpoint; give the --save directory of a run, or one checkpoint "
                              "in it")
    return found


@dataclass(frozen=True)
class TensorDifference:
    """How one tensor of two checkpoints differs.

    Attributes:
        largest: largest absolute difference; None where the tensors cannot be compared.
        relative: norm of the difference, divided by the first tensor's norm.
        text: why the tensors cannot be compared, or "".
    """

    name: str
    largest: float | None = None
    relative: float | None = None
    text: str = ""

    @property
    def is_equal(self) -> bool:
        return not self.text and self.largest == 0.0


def tensor_differences(first: Contents, second: Contents) -> Iterator[TensorDifference]:
    """Compare the tensors of two checkpoints, one at a time. Equal means bitwise equal; NaN equals NaN."""
    readers = [CheckpointReader(each.path, each.manifest) for each in (first, second)]
    for name in sorted(first.tensors.keys() | second.tensors.keys(), key=_sort_key):
        if name not in first.tensors or name not in second.tensors:
            yield TensorDifference(name, text=f"only in the {'second' if name not in first.tensors else 'first'}")
            continue
        one, other = first.tensors[name], second.tensors[name]
        if one.size != other.size or one.properties.dtype != other.properties.dtype:
            yield TensorDifference(name, text=f"{_kind(one)} in the first, {_kind(other)} in the second")
            continue
        a, b = (reader.read_tensor(name) for reader in readers)
        if torch.equal(a.view(torch.uint8) if a.ndim else a, b.view(torch.uint8) if b.ndim else b):
            yield TensorDifference(name, 0.0, 0.0)
            continue
        difference, norm = (a.double() - b.double()), float(a.double().norm())
        distance = float(difference.norm())
        yield TensorDifference(name, float(difference.abs().max()), distance / norm if norm else math.inf)


def _kind(entry: TensorStorageMetadata) -> str:
    return f"{str(entry.properties.dtype).removeprefix('torch.')} {list(entry.size)}"


def setting_differences(first: Contents, second: Contents) -> list[tuple[str, Any, Any]]:
    """Return counters and flags in which two checkpoints differ: ``section.name`` and both values."""
    sides = [each.state["config"] | {"counters": each.state["train"], "schedule (as used)": each.state["schedule"],
                                     "loss scaler": each.state["loss_scaler"]} for each in (first, second)]
    found = []
    for section in sides[0] | sides[1]:
        one, other = (side.get(section, {}) for side in sides)
        found += [(f"{section}.{name}", one.get(name), other.get(name)) for name in one | other
                  if one.get(name) != other.get(name)]
    return found
