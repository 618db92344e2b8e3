"""Initial weights that do not depend on the layout.

Each parameter has a generator of its own, seeded by the run's seed and the parameter's name. The full parameter is
drawn on a CPU, and each rank keeps its part. So the same seed gives the same model under any parallelism and on any
device.

A generator gives one value after another, so a rank cannot draw only its part of a weight. Ranks on GPUs share the
work by weights instead: of n ranks that hold the same part of the model, each draws every n-th large weight and sends
it to the others. Three ranks with the weights 0 to 5::

    rank 0   draw 0 | send 0, receive 1, receive 2 | draw 3 | send 3, receive 4, receive 5
    rank 1   draw 1 | receive 0, send 1, receive 2 | draw 4 | receive 3, send 4, receive 5
    rank 2   draw 2 | receive 0, receive 1, send 2 | draw 5 | receive 3, receive 4, send 5
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from megatron_sp.config.schema import Model
from megatron_sp.parallel.collectives import broadcast
from megatron_sp.parallel.random import stable_key
from megatron_sp.parallel.tensor import TensorRegion, VocabParallelEmbedding, VocabParallelOutput

RESIDUAL_OUTPUTS = ("attention.output.weight", "mlp.down.weight")
#: Number of values from which on ranks share the drawing. A smaller weight is drawn in the time that sending it takes.
SHARED_FROM = 1 << 20
#: A part of the model, and its name there, which is part of the names of its parameters.
Part = tuple[nn.Module, str]


def parameter_seed(seed: int, name: str) -> int:
    """Return the seed of one parameter's generator."""
    return stable_key(seed, "initial weights", name)


def initial_value(name: str, shape: tuple[int, ...], model: Model, seed: int) -> torch.Tensor:
    """Return the initial value of the full parameter of this name, fp32 on the CPU.

    Args:
        shape: shape of the full parameter; for vocabulary weights without the padding rows.
    """
    if name.endswith("bias"):
        return torch.zeros(shape)
    if "norm." in name:
        return torch.zeros(shape) if model.apply_layernorm_1p else torch.ones(shape)
    generator = torch.Generator().manual_seed(parameter_seed(seed, name))
    own_std = model.embedding_init_method_std if name.startswith("embedding.") else 0.0
    if model.init_method_xavier_uniform and not own_std:
        return nn.init.xavier_uniform_(torch.empty(shape), generator=generator)
    std = own_std or model.init_method_std
    if name.endswith(RESIDUAL_OUTPUTS):
        std /= math.sqrt(2 * model.num_layers)
    return torch.empty(shape).normal_(0.0, std, generator=generator)


@torch.no_grad()
def fill_parameter(parameter: torch.Tensor, full: torch.Tensor, region: TensorRegion) -> None:
    """Write this tp rank's part of a full tensor into a parameter that FSDP has not sharded yet.

    Rows that only the parameter has (vocabulary padding) become zero.
    """
    local, part = parameter, full
    if isinstance(parameter, DTensor):  # tp > 1
        local, placement = parameter.to_local(), parameter.placements[0]
        if isinstance(placement, Shard):
            size, whole = local.shape[placement.dim], full.shape[placement.dim]
            first = min(region.rank * size, whole)  # the last ranks may hold nothing but padding
            part = full.narrow(placement.dim, first, min(size, whole - first))
    local[:len(part)].copy_(part)
    local[len(part):].zero_()


def full_parameters(part: Part) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
    """Yield each parameter's name in the model, the parameter, and its full shape without padding rows."""
    module, prefix = part
    padded = {id(inner.weight): inner.vocab_size for inner in module.modules()
              if isinstance(inner, (VocabParallelEmbedding, VocabParallelOutput))}
    for name, parameter in module.named_parameters():
        rows = padded.get(id(parameter), parameter.shape[0])
        yield f"{prefix}.{name}", parameter, (rows, *parameter.shape[1:])


class InitialWeights:
    """Gives the parts of a pipeline stage their initial weights, one part after another.

    Args:
        parts: all parts in the order in which ``fill`` gets them.
        device: where the weights will be.
        group: ranks that hold the same part of the model and share the drawing; None: this rank draws everything.
        shared_from: see ``SHARED_FROM``.
    """

    def __init__(self, model: Model, seed: int, region: TensorRegion, parts: Sequence[Part], device: torch.device,
                 group: dist.ProcessGroup | None = None, shared_from: int = SHARED_FROM):
        self.model, self.seed, self.region, self.device, self.group = model, seed, region, device, group
        self._shared = [(name, shape) for part in parts for name, _, shape in full_parameters(part)
                        if group is not None and math.prod(shape) >= shared_from]
        self._taken = 0  # of the shared weights
        self._own = torch.empty(0)  # the shared weight that this rank has drawn and not sent yet

    def fill(self, part: Part) -> None:
        """Write the initial weights into a part that has storage and is not sharded by FSDP yet."""
        for name, parameter, shape in full_parameters(part):
            fill_parameter(parameter, self._value(name, shape), self.region)

    def _value(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the full initial value; a shared one is on the device."""
        if self.group is None or self._taken == len(self._shared) or self._shared[self._taken] != (name, shape):
            return initial_value(name, shape, self.model, self.seed)
        source, mine = self._taken % dist.get_world_size(self.group), dist.get_rank(self.group)
        if source == 0 and self._taken + mine < len(self._shared):  # all ranks draw their next weight at the same time
            self._own = initial_value(*self._shared[self._taken + mine], self.model, self.seed)
        value = self._own.to(self.device) if source == mine else torch.empty(shape, device=self.device)
        self._taken += 1
        return broadcast(value, source, self.group)
