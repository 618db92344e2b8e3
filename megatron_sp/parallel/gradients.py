"""Sum the gradients that FSDP does not sum over the ranks, in fp32, once a step after the last microbatch.

``sum_over_copies`` is for ZeRO stage 0 in fp32. There every data- and sequence-parallel rank holds a whole copy of the
model, and FSDP is not used, because nothing is sharded or cast.

``sum_over_tensor_ranks`` is for weights that every tensor-parallel rank holds whole, although it sees only a part of
the tokens or heads. Norm weights under ``--sequence-parallel`` are an example. FSDP would sum the gradients of such
DTensors over ``tp`` before it casts them to fp32, which means in bf16. Here they are summed after FSDP has cast and
sharded them. Therefore the sum is in fp32, and ranks send only shards.
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
    """Replace each gradient of which every tensor-parallel rank has only a part by the sum of the parts."""
    if mesh.size("tp") > 1:
        mesh.channel("tp").sum_in_place(list(_contiguous_gradients(partial_parameters(model))))


def partial_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters whose gradients must be summed over the tensor-parallel ranks.

    A module lists the names of such parameters in its attribute ``partial_over_tp``. An attribute of the parameter
    itself would be lost, because FSDP replaces the parameter.
    """
    for module in model.modules():
        for name in getattr(module, "partial_over_tp", ()):
            parameter = getattr(module, name)
            if parameter is not None:
                yield parameter


def _contiguous_gradients(parameters: Iterator[nn.Parameter]) -> Iterator[torch.Tensor]:
    """Yield this rank's shard of each gradient that exists, contiguous, as sums in place need it.

    A gradient whose shard is not contiguous is replaced by a copy that is.
    """
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
