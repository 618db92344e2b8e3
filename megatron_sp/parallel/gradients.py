"""Sums of gradients that FSDP does not make, once a step after the last microbatch, in fp32.

``sum_over_copies``: ZeRO stage 0 in fp32. Every data- and sequence-parallel rank holds a whole copy of the model.
Nothing is sharded and nothing cast, so there is nothing for FSDP to do.

``sum_over_tensor_ranks``: weights that every tensor-parallel rank holds whole while it sees only a part of the
tokens or heads, such as norm weights under ``--sequence-parallel``. FSDP would sum these over ``tp`` as DTensors in
the type of the computation, so in bf16, before it casts to fp32. Here they are summed afterwards: FSDP has cast and
sharded the gradients, so the sum is in fp32 and sends only shards.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_sp.parallel.mesh import ParallelMesh


def sum_over_copies(model: nn.Module, mesh: ParallelMesh) -> None:
    """Replace all gradients by their sums over the fsdp ranks."""
    mesh.channel("fsdp").sum_in_place(list(_contiguous_gradients(model.parameters())))


def sum_over_tensor_ranks(model: nn.Module, mesh: ParallelMesh) -> None:
    """Replace the gradients that are parts of a sum over ``tp`` by that sum."""
    if mesh.size("tp") > 1:
        mesh.channel("tp").sum_in_place(list(_contiguous_gradients(partial_parameters(model))))


def partial_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters whose gradients on the ranks of ``tp`` are parts of a sum.

    A module names its own in the attribute ``partial_over_tp``. (Parameters cannot carry a mark: FSDP replaces them.)
    """
    for module in model.modules():
        for name in getattr(module, "partial_over_tp", ()):
            parameter = getattr(module, name)
            if parameter is not None:
                yield parameter


def _contiguous_gradients(parameters: Iterator[nn.Parameter]) -> Iterator[torch.Tensor]:
    """This rank's part of each gradient that exists; one that is not contiguous is replaced by a copy that is."""
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        if not local.is_contiguous():
            local = local.contiguous()
            parameter.grad = DTensor.from_local(
                local, grad.device_mesh, grad.placements, run_check=False) if isinstance(grad, DTensor) else local
        yield local
