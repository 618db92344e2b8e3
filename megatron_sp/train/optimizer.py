"""Optimizer, its parameter groups, and the global gradient norm.

Parameters and gradients are DTensors on ``(tp,)``, ``(replicate, shard)`` or both together, or plain
tensors where nothing splits them; optimizer and norm work on each rank's local part. A norm over the
whole model counts each element once: a rank's sum of squares is divided by the number of ranks that
hold the same elements, and summed over the world.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_sp.config.schema import Run
from megatron_sp.errors import TrainingError
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.pipeline import own_parameters

#: Added to the norm before dividing by it, as ``torch.nn.utils.clip_grad_norm_`` does.
CLIP_EPSILON = 1e-6
#: Number of elements whose squares torch adds in fp32; the sums of such rows are added in fp64 (``_squared_norm_of``).
NORM_ROW = 1 << 14


def build_optimizer(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW or SGD with weight decay on matrices only, not on biases and norm weights.

    Each parameter group has an entry ``decay``, which tells the schedule whether to set the group's weight decay.
    AdamW's weight decay is decoupled from the gradient. SGD's is added to the gradient, as in torch and Megatron.
    """
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    flags = run.optimizer
    groups = [{"params": params, "decay": decay, "weight_decay": flags.weight_decay if decay else 0.0}
              for params, decay in ((decayed, True), (others, False)) if params]
    if flags.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=run.schedule.lr, momentum=flags.sgd_momentum)
    return torch.optim.AdamW(groups, lr=run.schedule.lr, betas=(flags.adam_beta1, flags.adam_beta2),
                             eps=flags.adam_eps, fused=True)


def require_all_gradients(model: nn.Module) -> None:
    """Raise TrainingError when a parameter has no gradient, because the step would train only a part of the model."""
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    if missing:
        raise TrainingError(f"{len(missing)} parameters got no gradient, first {missing[0]}: backward did not reach "
                            "them; this is a bug in the model or its parallel schedule")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements of a DTensor, or the tensor itself when it is none, detached from autograd."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def num_copies(parameter: torch.Tensor, mesh: ParallelMesh) -> int:
    """Return the number of ranks of a pipeline stage that hold the same elements of a parameter as this rank."""
    ranks = mesh.size("world") // mesh.size("pp")
    if not isinstance(parameter, DTensor):
        return ranks
    sizes = parameter.device_mesh.shape
    shards = math.prod(size for size, place in zip(sizes, parameter.placements) if not place.is_replicate())
    return ranks // shards


def squared_norm(model: nn.Module, mesh: ParallelMesh, *, of_gradients: bool = True) -> torch.Tensor:
    """Return this rank's share of the squared norm of all gradients (or weights), an fp64 scalar.

    The sum of the shares over all ranks is the squared norm of the full tensors.
    """
    by_copies: dict[int, list[torch.Tensor]] = {}
    for _, p in own_parameters(model):
        value = p.grad if of_gradients else p
        assert value is not None
        by_copies.setdefault(num_copies(p, mesh), []).append(local_part(value))
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for copies, tensors in by_copies.items():
        total += (_squared_norm_of(tensors) / copies).to(total.device)  # offloaded tensors are on the CPU
    return total


def _squared_norm_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of tensors on one device, in fp64.

    On a CPU torch adds the squares of a tensor in fp32 one after another, with a relative error of 1e-3 at 3e7
    elements. Here torch adds rows of ``NORM_ROW`` elements, and the rows are added in fp64. The error is 1e-7 then, and
    the time is the same.
    """
    norms = [torch.zeros(1, device=tensors[0].device, dtype=torch.float64)]
    for tensor in tensors:
        flat = tensor.reshape(-1)
        whole = flat.numel() // NORM_ROW * NORM_ROW
        norms.append(torch.linalg.vector_norm(flat[:whole].view(-1, NORM_ROW), dim=1).double())
        norms.append(torch.linalg.vector_norm(flat[whole:]).double().view(1))
    return torch.cat(norms).square().sum()


def num_zeros(model: nn.Module, mesh: ParallelMesh) -> torch.Tensor:
    """Return this rank's share of the number of zeros in the gradient, an fp64 scalar."""
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for _, p in own_parameters(model):
        assert p.grad is not None
        part = local_part(p.grad)
        total += ((part.numel() - part.count_nonzero()).double() / num_copies(p, mesh)).to(total.device)
    return total


def scale_gradients(model: nn.Module, factor: float) -> None:
    """Multiply all gradients in place."""
    if factor != 1.0:
        torch._foreach_mul_([local_part(p.grad) for p in model.parameters() if p.grad is not None], factor)


def clip_factor(norm: float, clip: float) -> float:
    """Return the factor that brings gradients with this norm down to a norm of at most ``clip`` (0: no limit)."""
    return min(1.0, clip / (norm + CLIP_EPSILON)) if clip > 0 else 1.0


def clip_grad_norm(model: nn.Module, clip: float, mesh: ParallelMesh) -> torch.Tensor:
    """Clip all gradients by their global norm.

    Returns:
        The norm before clipping, fp64 scalar, equal on every rank.
    """
    require_all_gradients(model)
    norm = mesh.sum_over(squared_norm(model, mesh), "world").sqrt()
    scale_gradients(model, clip_factor(float(norm), clip))
    return norm
