"""Describe model and optimizer as full tensors by name, of which each rank holds a piece.

A checkpoint knows no layout: it stores full tensors. A parameter is a plain tensor or a DTensor, split over tp and then
by FSDP (dim 0 of the tp-local tensor) over the ranks that share its weights. ``Piece`` says where a rank's part lies in
the full tensor **without padding**: vocabulary tensors have exactly V rows here, whatever tp padded them to. So any
layout can read what any other wrote::

    embedding.word.weight, V = 97 rows, tp 2 pads to 128:     rank 0 holds rows 0-63, all real
                                                              rank 1 holds rows 64-127: 64-96 real, 31 of padding
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from megatron_sp.config.schema import Model

#: The parameters whose first dimension is the (padded) vocabulary.
EMBEDDING, OUTPUT = "embedding.word.weight", "output.weight"

#: Per-parameter optimizer state shaped like the parameter, by optimizer.
MOMENTS = {"AdamW": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",)}


@dataclass(frozen=True)
class Piece:
    """A rank's part of a full tensor; torch.distributed.checkpoint writes it and fills it.

    Attributes:
        data: the rank's elements, a view of the parameter: loading writes into the parameter through it.
        shape: shape of the full tensor, without padding.
        offset: index of the first element of ``data`` in the full tensor.
        padding: the local rows beyond the last row of the full tensor, a view; None for tensors without padding.
    """

    data: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    padding: torch.Tensor | None = None

    @property
    def chunks(self) -> list[ChunkStorageMetadata]:
        """The part of the full tensor that this piece covers, as torch describes it; none when the piece is empty."""
        if self.data.numel() == 0:
            return []
        return [ChunkStorageMetadata(torch.Size(self.offset), self.data.shape)]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.data)
        return [WriteItem(index=MetadataIndex(name, chunk.offsets), type=WriteItemType.SHARD,
                          tensor_data=TensorWriteData(chunk, properties, torch.Size(self.shape)))
                for chunk in self.chunks]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self.chunks


class PieceSavePlanner(DefaultSavePlanner):
    """Saves a dict of pieces by name. Of equal copies one is written; gaps and overlaps between pieces are refused."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].data


class PieceLoadPlanner(DefaultLoadPlanner):
    """Fills a dict of pieces by name in place."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None,
                       is_coordinator: bool = False) -> None:
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].data


def chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of one of ``parts`` chunks as ``torch.chunk`` cuts them (trailing ones may be empty)."""
    size = -(-length // parts)
    return min(index * size, length), min((index + 1) * size, length)


def locate(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return a rank's elements of a parameter or moment, and their offset in the full tensor with padding.

    The innermost mesh axis is tp. The axes before it are FSDP's, which splits the tp-local tensor. So the offset is
    computed from the innermost axis outwards.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach(), (0,) * tensor.ndim
    start, stop = [0] * tensor.ndim, list(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    for place, parts, index in reversed(list(zip(tensor.placements, tensor.device_mesh.shape, coordinate))):
        if place.is_replicate():
            continue
        dim = place.dim  # type: ignore[attr-defined]
        first, last = chunk(stop[dim] - start[dim], parts, index)
        start[dim], stop[dim] = start[dim] + first, start[dim] + last
    local = tensor.to_local().detach()
    assert tuple(local.shape) == tuple(b - a for a, b in zip(start, stop)), (tensor.shape, tensor.placements)
    return local, tuple(start)


def piece_of(tensor: torch.Tensor, vocab_size: int | None) -> Piece:
    """Return the piece of a tensor that this rank holds.

    Args:
        vocab_size: number of rows without padding, for tensors with one row a vocabulary entry; None for all others.
    """
    local, offset = locate(tensor)
    if vocab_size is None:
        return Piece(local, tuple(tensor.shape), offset)
    rows = min(max(vocab_size - offset[0], 0), local.shape[0])
    return Piece(local[:rows], (vocab_size, *tensor.shape[1:]), offset, local[rows:])


def logical_parameters(model: nn.Module, config: Model) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield this rank's parameters with their name in the checkpoint.

    The last pipeline stage holds a copy of tied embeddings as its output weight. Both copies get the embedding's name.
    """
    tied = not config.untie_embeddings_and_output_weights
    for name, p in model.named_parameters():
        yield (EMBEDDING if tied and name == OUTPUT else name), p


def model_pieces(model: nn.Module, config: Model) -> dict[str, Piece]:
    """Return this rank's pieces of the parameters as ``model.NAME``; of two tied copies on one rank, the first."""
    pieces: dict[str, Piece] = {}
    for name, p in logical_parameters(model, config):
        pieces.setdefault(f"model.{name}", piece_of(p, config.vocab_size if name in (EMBEDDING, OUTPUT) else None))
    return pieces


def optimizer_pieces(model: nn.Module, optimizer: torch.optim.Optimizer, config: Model) -> dict[str, Piece]:
    """Return this rank's pieces of the optimizer's state as ``optimizer.NAME.KEY``; empty before the first step."""
    pieces: dict[str, Piece] = {}
    for name, p in logical_parameters(model, config):
        for key, value in optimizer.state.get(p, {}).items():
            if value is not None:
                vocabulary = name in (EMBEDDING, OUTPUT) and value.ndim > 0
                pieces.setdefault(f"optimizer.{name}.{key}", piece_of(value, config.vocab_size if vocabulary else None))
    return pieces


def create_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer that has made no step zeros of the right shapes, for loading to fill."""
    kind = type(optimizer).__name__
    for p in model.parameters():
        state: dict[str, torch.Tensor] = {key: torch.zeros_like(p) for key in MOMENTS[kind]}
        if kind == "AdamW":
            # where the optimizer itself would put it: fused kernels count steps on the device
            device = p.device if optimizer.defaults["fused"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        optimizer.state[p] = state


def finish_loading(model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Model,
                   pieces: dict[str, Piece]) -> None:
    """Set what no checkpoint holds: zeros in the padding, and the second copy of a tied weight on this rank."""
    for piece in pieces.values():
        if piece.padding is not None:
            piece.padding.zero_()
    firsts: dict[str, nn.Parameter] = {}
    for name, p in logical_parameters(model, config):
        first = firsts.setdefault(name, p)
        if first is not p:
            locate(p)[0].copy_(locate(first)[0])
            for key, value in (optimizer.state.get(p, {}) if optimizer else {}).items():
                locate(value)[0].copy_(locate(optimizer.state[first][key])[0])  # type: ignore[union-attr]
