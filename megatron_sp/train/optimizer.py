"""Optimizer, its parameter groups, and the global gradient norm.

Parameters and gradients are DTensors on ``(tp,)``, ``(replicate, shard)`` or both together, or plain
tensors where nothing splits them; optimizer and norm work on each rank's local part. A norm over the
whole model counts each element once: a rank's sum of squares is divided by the number of ranks that
hold the same elements, and summed over the world.

Each operation here takes all tensors of a parameter group at once (torch's fused and foreach operators), because on a
GPU the time of a step with many small tensors is the time to launch its kernels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron_sp.config.schema import Run
from megatron_sp.errors import TrainingError
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.pipeline import own_parameters

#: Added to the norm before dividing by it, as ``torch.nn.utils.clip_grad_norm_`` does.
CLIP_EPSILON = 1e-6


class GradientScale(NamedTuple):
    """What an update does with the gradients, as scalars on the device of the weights; the host need not know them.

    Attributes:
        divisor: fp64; the gradients are divided by it before use.
        rounded: the divisor in fp32.
        skip: fp32; 1 where the update must change no weight and no state, else 0.
    """

    divisor: torch.Tensor
    rounded: torch.Tensor
    skip: torch.Tensor

    def arguments(self, grads: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Return the arguments with which torch's fused optimizers apply it; gradients in fp64 are divided here.

        The fused optimizers divide by an fp32 number, which is not exact enough for fp64.
        """
        if grads and grads[0].dtype == torch.float64:
            torch._foreach_div_(list(grads), torch.where(self.skip > 0, 1.0, self.divisor))
            return {"found_inf": self.skip}
        return {"grad_scale": self.rounded, "found_inf": self.skip}


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW, computed on this rank's elements of DTensors as on plain tensors.

    torch's own class would give the DTensors to the fused operator. DTensor caches the sharding of a result by the
    operator's arguments. The learning rate is one of them and changes, so DTensor would derive the sharding again in
    every step. The constructor's arguments and the states of each parameter are those of torch's class.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, *,  # type: ignore[override]
             scale: GradientScale | None = None) -> None:
        """Update the weights that have a gradient, with one fused operator for each parameter group."""
        assert closure is None
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            states = [self._state_of(p) for p in params]
            beta1, beta2 = group["betas"]
            grads = _local_parts(p.grad for p in params)
            adamw(_local_parts(params), grads,
                  _local_parts(state["exp_avg"] for state in states),
                  _local_parts(state["exp_avg_sq"] for state in states), [], [state["step"] for state in states],
                  fused=True, amsgrad=False, maximize=False, beta1=beta1, beta2=beta2, lr=group["lr"],
                  weight_decay=group["weight_decay"], eps=group["eps"],
                  **(scale.arguments(grads) if scale else {}))

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = zeros_beside(parameter), zeros_beside(parameter)
        return state


class SGD(torch.optim.SGD):
    """torch's fused SGD, computed on this rank's elements of DTensors as on plain tensors; see ``AdamW``."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, *,  # type: ignore[override]
             scale: GradientScale | None = None) -> None:
        """Update the weights that have a gradient, with one fused operator for each parameter group."""
        assert closure is None
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            momenta: list[Any] = [None] * len(params)
            if group["momentum"]:
                momenta = _local_parts(self._momentum_of(p) for p in params)
            grads = _local_parts(p.grad for p in params)
            sgd(_local_parts(params), grads, momenta, fused=True, lr=group["lr"],
                weight_decay=group["weight_decay"], momentum=group["momentum"], dampening=0.0, nesterov=False,
                maximize=False, **(scale.arguments(grads) if scale else {}))

    def _momentum_of(self, parameter: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = zeros_beside(parameter)  # so the first momentum is the first gradient
        return state["momentum_buffer"]


def zeros_beside(parameter: torch.Tensor) -> torch.Tensor:
    """Return zeros of a parameter's shape, split and placed like it."""
    zeros = torch.zeros_like(local_part(parameter))
    if not isinstance(parameter, DTensor):
        return zeros
    return DTensor.from_local(zeros, parameter.device_mesh, parameter.placements, run_check=False,
                              shape=parameter.shape, stride=parameter.stride())


def _local_parts(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [local_part(tensor) for tensor in tensors]


def build_optimizer(run: Run, model: nn.Module) -> AdamW | SGD:
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
        return SGD(groups, lr=run.schedule.lr, momentum=flags.sgd_momentum, fused=True)
    return AdamW(groups, lr=run.schedule.lr, betas=(flags.adam_beta1, flags.adam_beta2), eps=flags.adam_eps, fused=True)


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
    parts = [_squared_norm_of(tensors) if copies == 1 else _squared_norm_of(tensors) / copies
             for copies, tensors in by_copies.items()]
    total = functools.reduce(torch.add, parts) if parts else torch.zeros((), dtype=torch.float64)
    return total.to(mesh.device)  # offloaded tensors are on the CPU


def _squared_norm_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of tensors on one device, in fp64.

    On a CPU torch adds squares in fp32 one after another, with a relative error of 1e-3 at 3e7 elements.
    """
    norms = torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float64))
    return norms.dot(norms)


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
