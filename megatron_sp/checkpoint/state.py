"""Describe model and optimizer as full tensors by name, of which each rank holds a piece.

A checkpoint does not depend on the layout, because it stores full tensors. In memory a parameter is a plain tensor or a
DTensor, split over tp and then by FSDP (dim 0 of the tp-local tensor). A ``Piece`` is the part that one rank holds,
with its place in the full tensor **without padding**: vocabulary tensors have exactly V rows here, and the rows that tp
adds are left out. So any layout can read what any other wrote::

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

#: For each optimizer, the keys of its states that have the parameter's shape.
MOMENTS = {"AdamW": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",)}


@dataclass(frozen=True)
class Piece:
    """The part of a full tensor that this rank holds, in the form that torch.distributed.checkpoint saves and loads.

    Attributes:
        data: the rank's elements without padding, a view of the parameter. So loading into it fills the parameter.
        shape: shape of the full tensor, without padding.
        offset: index of the first element of ``data`` in the full tensor.
        padding: a view of the rank's padding rows; None for tensors that are never padded.
    """

    data: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    padding: torch.Tensor | None = None

    @property
    def chunks(self) -> list[ChunkStorageMetadata]:
        """Return offset and shape of the piece in torch's form; an empty list for an empty piece."""
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
    """Plans the save of a dict of pieces by name.

    torch writes one of several equal copies, and refuses pieces that overlap or leave gaps in the full tensor.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].data


class PieceLoadPlanner(DefaultLoadPlanner):
    """Plans the load of a dict of pieces by name: the tensors of the checkpoint are copied into each ``Piece.data``."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None,
                       is_coordinator: bool = False) -> None:
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].data


def chunk_bounds(length: int, parts: int, index: int) -> tuple[int, int]:
    """Return start and stop of chunk ``index`` when ``torch.chunk`` cuts ``length`` elements into ``parts`` chunks.

    The last chunks may be shorter, or empty.
    """
    size = -(-length // parts)
    return min(index * size, length), min((index + 1) * size, length)


def local_part_and_offset(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return a rank's elements of a parameter or moment, and their offset in the full tensor with padding.

    The innermost mesh axis is tp. The axes before it are FSDP's, and FSDP splits the tp-local tensor. So the loop goes
    from the innermost axis outwards, and each axis narrows the range that the axis before left.
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
        first, last = chunk_bounds(stop[dim] - start[dim], parts, index)
        start[dim], stop[dim] = start[dim] + first, start[dim] + last
    local = tensor.to_local().detach()
    assert tuple(local.shape) == tuple(b - a for a, b in zip(start, stop)), (tensor.shape, tensor.placements)
    return local, tuple(start)


def piece_of(tensor: torch.Tensor, vocab_size: int | None) -> Piece:
    """Return the piece of a tensor that this rank holds.

    Args:
        vocab_size: number of rows without padding, for tensors with one row a vocabulary entry; None for all others.
    """
    local, offset = local_part_and_offset(tensor)
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
    """Return this rank's pieces of the parameters, by the name ``model.NAME``.

    When a rank holds two copies of a tied weight, only the first is among them.
    """
    pieces: dict[str, Piece] = {}
    for name, p in logical_parameters(model, config):
        pieces.setdefault(f"model.{name}", piece_of(p, config.vocab_size if name in (EMBEDDING, OUTPUT) else None))
    return pieces


def optimizer_pieces(model: nn.Module, optimizer: torch.optim.Optimizer, config: Model) -> dict[str, Piece]:
    """Return this rank's pieces of the optimizer's state, by the name ``optimizer.NAME.KEY``; empty before a step."""
    pieces: dict[str, Piece] = {}
    for name, p in logical_parameters(model, config):
        for key, value in optimizer.state.get(p, {}).items():
            if value is not None:
                vocabulary = name in (EMBEDDING, OUTPUT) and value.ndim > 0
                pieces.setdefault(f"optimizer.{name}.{key}", piece_of(value, config.vocab_size if vocabulary else None))
    return pieces


def create_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer that has made no step a state of zeros, so that loading has tensors to fill."""
    kind = type(optimizer).__name__
    for p in model.parameters():
        state: dict[str, torch.Tensor] = {key: torch.zeros_like(p) for key in MOMENTS[kind]}
        if kind == "AdamW":
            # The same device that the optimizer itself would choose: fused kernels need the step count on the device.
            device = p.device if optimizer.defaults["fused"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        optimizer.state[p] = state


def finish_loading(model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Model,
                   pieces: dict[str, Piece]) -> None:
    """Fill what the checkpoint does not hold: zeros in the padding, and this rank's second copy of a tied weight."""
    for piece in pieces.values():
        if piece.padding is not None:
            piece.padding.zero_()
    firsts: dict[str, nn.Parameter] = {}
    for name, p in logical_parameters(model, config):
        first = firsts.setdefault(name, p)
        if first is not p:
            local_part_and_offset(p)[0].copy_(local_part_and_offset(first)[0])
            if optimizer is None:
                continue
            for key, value in optimizer.state.get(p, {}).items():
                local_part_and_offset(value)[0].copy_(local_part_and_offset(optimizer.state[first][key])[0])
