"""Initial weights that do not depend on the layout.

Each parameter has a generator of its own, seeded by the run's seed and the parameter's name. Every rank draws the full
parameter on the CPU and keeps its part. So the same seed gives the same model under any parallelism and on any device.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from megatron_sp.config.schema import Model
from megatron_sp.parallel.random import stable_key
from megatron_sp.parallel.tensor import TensorRegion, VocabParallelEmbedding, VocabParallelOutput

RESIDUAL_OUTPUTS = ("attention.output.weight", "mlp.down.weight")


def parameter_seed(seed: int, name: str) -> int:
    """Return the seed of one parameter's generator."""
    return stable_key(seed, "initial weights", name)


def initial_value(name: str, shape: tuple[int, ...], model: Model, seed: int) -> torch.Tensor:
    """Return the initial value of the full parameter of this name, fp32 on the CPU.

    Args:
        shape: of the full parameter; for vocabulary weights without the padding rows.
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


def fill_parameter(parameter: torch.Tensor, full: torch.Tensor, region: TensorRegion) -> None:
    """Write this tp rank's part of a full tensor into a parameter that FSDP has not sharded yet.

    Rows that only the parameter has (vocabulary padding) become zero.
    """
    missing = parameter.shape[0] - full.shape[0]
    if missing:
        full = torch.cat((full, full.new_zeros(missing, *full.shape[1:])))
    with torch.no_grad():
        if not isinstance(parameter, DTensor):  # tp = 1
            parameter.copy_(full)
            return
        placement = parameter.placements[0]
        if isinstance(placement, Shard):
            full = full.chunk(region.size, placement.dim)[region.rank]
        parameter.to_local().copy_(full)


def initialise(module: nn.Module, prefix: str, model: Model, seed: int, region: TensorRegion) -> None:
    """Draw every parameter of a module that has storage and is not sharded by FSDP yet.

    Args:
        prefix: name of the module in the whole model; it is part of each parameter's seed.
    """
    padded = {id(part.weight): part.vocab_size for part in module.modules()
              if isinstance(part, (VocabParallelEmbedding, VocabParallelOutput))}
    for name, parameter in module.named_parameters():
        rows = padded.get(id(parameter), parameter.shape[0])
        value = initial_value(f"{prefix}.{name}", (rows, *parameter.shape[1:]), model, seed)
        fill_parameter(parameter, value, region)
