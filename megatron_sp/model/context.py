"""What a forward knows of its tokens beside their hidden states: one object, which goes through all layers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from megatron_sp.activations.key_values import Earlier
from megatron_sp.config.schema import Model
from megatron_sp.layout.masks.attention_mask import AttentionMask
from megatron_sp.model.rotary import Rotation, rotation
from megatron_sp.parallel.random import token_keys
from megatron_sp.parallel.tensor import TensorRegion


@dataclass(frozen=True, eq=False)
class Context:
    """The tokens of one forward: t tokens of each of b samples, those of this rank or of a chunk of them.

    It travels as a Python object and not as tensors: torch's pipeline, which splits tensors into microbatches, and
    FSDP, which moves them to its device, leave it alone. So its tensors are on the model's device from the start.

    Attributes:
        positions: int64 [b, t], for rotary and learned positions.
        sample_ids: number of each sample in the order of the training, int64 [b]; dropout depends on it. None where
            nothing is dropped.
        mask: which keys each query may see, for the whole sequences.
        earlier: keys and values of earlier tokens of the same samples; None where the sequences begin with these.
        places: number of each token in its sequence, int64 [b, t]; dropout depends on it. None where it equals
            ``positions``.
        rotation: cosines and sines of the positions, from ``with_rotation``.
        token_keys: ``random.token_keys`` of the tokens between tensor-parallel regions, [2, b, t(/tp)], from
            ``with_dropout``; None where nothing is dropped.
    """

    positions: torch.Tensor
    sample_ids: torch.Tensor | None = None
    mask: AttentionMask = field(default_factory=AttentionMask)
    earlier: Earlier | None = None
    places: torch.Tensor | None = None
    rotation: Rotation | None = None
    token_keys: torch.Tensor | None = None

    @property
    def needs_output(self) -> bool:
        """Return whether the caller needs losses or logits. In the first pass of a chunked training it does not."""
        return self.earlier is None or self.earlier.needs_output

    def with_dropout(self, model: Model, region: TensorRegion) -> Context:
        """Return this with the keys of dropout, if the model drops anything in training.

        Args:
            region: says which tokens this rank holds between tensor-parallel regions.
        """
        if max(model.hidden_dropout, model.attention_dropout) == 0:
            return self
        assert self.sample_ids is not None, "dropout needs the numbers of the samples"
        places = region.outside(self.positions if self.places is None else self.places)
        return replace(self, token_keys=token_keys(self.sample_ids, places))

    def with_rotation(self, model: Model, dtype: torch.dtype) -> Context:
        """Return this with the rotation of the positions, if the model has rotary ones.

        Args:
            dtype: type of the hidden states.
        """
        if model.position_embedding_type != "rope":
            return self
        return replace(self, rotation=rotation(model, self.positions, dtype))
