"""Decide which rank writes which tensor, and copy this rank's part to host memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from megatron_sp.checkpoint.agreement import gather, scatter_from_rank_zero
from megatron_sp.checkpoint.saving.tensor_file import TensorWriter
from megatron_sp.checkpoint.state import Piece, PieceSavePlanner


@dataclass(frozen=True)
class WritePlan:
    """What this rank writes.

    Attributes:
        own: the pieces that this rank writes, and into which file. When several ranks hold equal copies of a piece,
            only one of them writes it.
        metadata: on rank 0, the names, shapes and types of all tensors of the checkpoint; None on the other ranks.
    """

    own: SavePlan
    metadata: Metadata | None

    @property
    def names(self) -> list[str]:
        return [item.index.fqn for item in self.own.items]


class Planner:
    """Decides which rank writes which piece.

    The decision is kept for later saves, as long as the pieces stay the same.
    """

    def __init__(self) -> None:
        self._plan: WritePlan | None = None
        self._shapes: dict[str, tuple[object, ...]] = {}

    def plan(self, pieces: dict[str, Piece]) -> WritePlan:
        """Return what this rank writes of its pieces. All ranks call it.

        Raises:
            CheckpointError: on all ranks, when the pieces do not make up the full tensors.
        """
        shapes: dict[str, tuple[object, ...]] = {
            name: (piece.shape, piece.offset, tuple(piece.data.shape), piece.data.dtype)
            for name, piece in pieces.items()}
        if all(gather(self._plan is not None and shapes == self._shapes)):
            assert self._plan is not None
            return self._plan
        self._plan, self._shapes = _plan_together(pieces), shapes
        return self._plan


def _plan_together(pieces: dict[str, Piece]) -> WritePlan:
    planner = PieceSavePlanner()
    planner.set_up_planner(pieces, is_coordinator=dist.get_rank() == 0)
    metadata: list[Metadata] = []

    def divide(plans: list[SavePlan]) -> list[SavePlan]:
        """Choose one rank for each piece, check that no tensor has gaps, and name each rank's file."""
        divided, described = planner.create_global_plan(plans)
        metadata.append(described)
        return TensorWriter.name_files(divided)

    own = scatter_from_rank_zero("cannot plan the save", planner.create_local_plan(), divide)
    return WritePlan(planner.finish_plan(own), metadata[0] if metadata else None)


class Staging:
    """Host memory that holds a copy of what this rank writes, so that training may change the originals meanwhile.

    The memory is kept for the next save. On a GPU it is page-locked, because copies into such memory are faster.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, pieces: dict[str, Piece], plan: WritePlan) -> dict[str, Piece]:
        """Return copies of the pieces that the plan names. They stay unchanged until the next call."""
        copies = {name: self._copy(name, pieces[name]) for name in plan.names}
        if any(piece.data.is_cuda for piece in pieces.values()):
            torch.cuda.current_stream().synchronize()
        for name in self._buffers.keys() - copies.keys():
            del self._buffers[name]
        return copies

    def _copy(self, name: str, piece: Piece) -> Piece:
        buffer, data = self._buffers.get(name), piece.data
        if buffer is None or buffer.shape != data.shape or buffer.dtype != data.dtype:
            buffer = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
            self._buffers[name] = buffer
        buffer.copy_(data, non_blocking=True)
        return replace(piece, data=buffer, padding=None)
