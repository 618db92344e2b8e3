"""Fill a model on any layout from lazy tensors: each rank reads the rows that it holds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from megatron_sp.checkpoint.agreement import on_every_rank
from megatron_sp.checkpoint.state import finish_loading, model_pieces
from megatron_sp.config.schema import Model
from megatron_sp.convert.lazy import Weights
from megatron_sp.progress import progress_bar


def fill_model(model: nn.Module, config: Model, read: Callable[[], Weights], source: str, *, shows: bool) -> None:
    """Fill the parameters of a model from the files of another system. All ranks call it.

    Args:
        config: the flags of the whole model.
        read: returns the weights of the whole model under this package's names. Every rank calls it.
        source: the directory, for messages.
        shows: whether this rank shows a progress bar.

    Raises:
        CheckpointError: on all ranks, when the weights cannot be read or are not those of the model.
    """
    pieces = model_pieces(model, config)

    def fill() -> None:
        weights = read()
        with torch.no_grad(), progress_bar(pieces.items(), unit="tensor", desc=f"reading {source}",
                                           disable=not shows) as bar:
            for name, piece in bar:
                if piece.data.numel() == 0:
                    continue
                tensor, first = weights[name.removeprefix("model.")], piece.offset[0]
                columns = [slice(at, at + size) for at, size in zip(piece.offset[1:], piece.data.shape[1:])]
                for start, stop in tensor.row_ranges():
                    a, b = max(start, first), min(stop, first + piece.data.shape[0])
                    if a < b:
                        piece.data[a - first:b - first].copy_(tensor.read(a, b)[(slice(None), *columns)])
        finish_loading(model, None, config, pieces)

    on_every_rank(f"cannot read {source}", fill)
