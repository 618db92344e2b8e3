"""Tensor parallelism: linear layers and embedding split by rows and columns over ``tp``.

Parameters are *stored* as DTensors on the tp mesh (at tp = 1 as plain tensors) and *computed on* as local tensors.
In forward and backward, ranks communicate only where a ``TensorRegion`` is entered and left (Shoeybi et al., arXiv
1909.08053, section 3). With ``megatron_sp`` the activations outside the region are split over the tokens (Korthikanti
et al., arXiv 2205.05198, section 4.2.2). Then, and where key/value heads are replicated, each rank's gradient of a
replicated parameter is a part of a sum, which ``gradients.sum_over_tensor_ranks`` makes after backward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from megatron_sp import torch_internals
from megatron_sp.parallel.collectives import copy_to_group, gather_sequence, reduce_from_group, reduce_scatter_sequence
from megatron_sp.parallel.mesh import ParallelMesh


@dataclass(frozen=True)
class TensorRegion:
    """The collectives at both ends of a tensor-parallel region, and the mesh on which its weights are stored.

    Inside the region every rank computes a part of the features for all tokens of its sequence shard. Outside, all
    tensor-parallel ranks hold the same activations or, with ``megatron_sp``, the activations of different tokens.

    Attributes:
        mesh: the tp axis of ``ParallelMesh.weights``.
        megatron_sp: whether ``--sequence-parallel`` is given.
        overlapped: write collectives and matrix products in the form in which torch's compiler recognises and overlaps
            them (``--tp-comm-overlap``).
    """

    mesh: DeviceMesh
    group: dist.ProcessGroup
    size: int
    rank: int
    megatron_sp: bool
    overlapped: bool = False

    @classmethod
    def of(cls, mesh: ParallelMesh, megatron_sp: bool, *, overlapped: bool = False) -> TensorRegion:
        size = mesh.size("tp")
        return cls(mesh.weights["tp"], mesh.group("tp"), size, mesh.rank("tp"), megatron_sp and size > 1, overlapped)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Give every rank all tokens: [b, t(/tp), h] -> [b, t, h]. Backward sums the gradients of the ranks."""
        if self.size == 1:
            return x
        if self.megatron_sp:
            return gather_sequence(x, self.group, pieces=self.overlapped)
        return copy_to_group(x, self.group)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Sum the partial results of the ranks: [b, t, h] -> [b, t(/tp), h]."""
        if self.size == 1:
            return x
        if self.megatron_sp:
            return reduce_scatter_sequence(x, self.group, pieces=self.overlapped)
        return reduce_from_group(x, self.group)

    def outside(self, x: torch.Tensor) -> torch.Tensor:
        """Return of the tokens inside the region those that this rank holds outside: [b, t] -> [b, t(/tp)]"""
        return x.chunk(self.size, dim=1)[self.rank] if self.megatron_sp else x

    def parameter(self, local_shape: tuple[int, ...], placement: Placement, dtype: torch.dtype) -> nn.Parameter:
        """Return an uninitialised parameter with this shape per rank; with more than one rank it is a DTensor."""
        local = torch.empty(local_shape, dtype=dtype)
        if self.size == 1:  # a DTensor's backward costs 0.2 ms each on a CPU
            return nn.Parameter(local)
        return nn.Parameter(DTensor.from_local(local, self.mesh, [placement], run_check=False))


def local_weight(parameter: torch.Tensor) -> torch.Tensor:
    """Return the part of a parameter that this rank computes with.

    Backward gives it this rank's own gradient, not a sum over ranks. Where the ranks that hold copies of a parameter
    see different tokens or heads, the module lists it in ``partial_over_tp``, and ``gradients.sum_over_tensor_ranks``
    adds the ranks' gradients up after backward.
    """
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class ColumnParallelLinear(nn.Module):
    """The weights of y = x W^T + b with the rows of W (output features) split over tp; used inside a region.

    ``products`` computes y, for all layers that have the same x together.

    Args:
        in_features, out_features: full sizes.
        replicate_rows: instead of splitting, keep W whole on every rank and compute only these
            output rows ``(start, stop)`` (key/value heads that tp does not divide). Their gradients are
            parts of a sum over tp.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool, region: TensorRegion, dtype: torch.dtype,
                 replicate_rows: tuple[int, int] | None = None):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.rows = replicate_rows
        rows = out_features if replicate_rows else out_features // region.size
        placement: Placement = Replicate() if replicate_rows else Shard(0)
        self.weight = region.parameter((rows, in_features), placement, dtype)
        self.bias = region.parameter((rows,), placement, dtype) if bias else None
        self.partial_over_tp = ("weight", "bias") if replicate_rows else ()

    def local(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weight [out/tp, in] and bias [out/tp] that this rank computes with."""
        weight = local_weight(self.weight)
        bias = None if self.bias is None else local_weight(self.bias)
        if self.rows is None:
            return weight, bias
        rows = slice(*self.rows)
        return weight[rows], None if bias is None else bias[rows]


def _any_layout() -> dict[str, Any]:
    """Return what tells torch's compiler not to copy an operator's arguments, where this torch can be told."""
    can_be_told = "tags" in inspect.signature(torch.library.custom_op).parameters
    return {"tags": (torch.Tag.flexible_layout,)} if can_be_told else {}


@torch.library.custom_op("megatron_sp::add_product", mutates_args=("total",), **_any_layout())
def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add the product of two matrices to ``total``, in place also in compiled code.

    ``torch.compile`` makes of ``addmm_`` an operator that returns a new tensor. It first copies ``total`` to it.
    """
    total.addmm_(a, b)


@add_product.register_fake
def _(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Tell torch's compiler that the operator returns nothing and keeps the shape of ``total``."""


class _SumInputGradient(torch.autograd.Function):
    """Returns the results of several products of one x unchanged; backward computes the gradient of x from all.

    Autograd would compute the gradient of each product and add them up, which reads and writes tensors of the size of x
    several times. Here each product adds to the result of the one before it or, with ``joined``, all are one product
    of the concatenated gradients and weights.

    Args of ``apply``: x; ``joined``; the weights, detached; the results of ``F.linear(x.detach(), weight)``.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, joined: bool,
                *weights_and_results: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.joined, count = joined, len(weights_and_results) // 2
        ctx.save_for_backward(*weights_and_results[:count])
        return tuple(y.view_as(y) for y in weights_and_results[count:])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        none = (None,) * len(grads)
        if not torch_internals.will_run(ctx, 0):
            return None, None, *none, *grads
        if ctx.joined:
            joined = torch.cat(grads, -1).flatten(0, -2) @ torch.cat(ctx.saved_tensors)
            return joined.view(*grads[0].shape[:-1], -1), None, *none, *grads
        total: torch.Tensor | None = None
        for grad, weight in zip(grads, ctx.saved_tensors):
            flat = grad.flatten(0, -2)
            if total is None:
                total = flat @ weight
            elif torch.compiler.is_compiling():
                add_product(total, flat, weight)
            else:
                total.addmm_(flat, weight)
        assert total is not None
        return total.view(*grads[0].shape[:-1], -1), None, *none, *grads


def products(x: torch.Tensor, *weights: tuple[torch.Tensor, torch.Tensor | None],
             joined: bool = False) -> tuple[torch.Tensor, ...]:
    """Return ``F.linear(x, weight, bias)`` for each weight [out, in] and bias [out]: [b, t, in] -> [b, t, out] each.

    The gradient of x, a sum over all weights, costs no more memory traffic than that of one product.

    Args:
        joined: compute the gradient of x as one product, which torch's compiler can overlap with the reduce-scatter
            that follows it. It copies the gradients and the weights.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return tuple(F.linear(x, weight, bias) for weight, bias in weights)
    results = [F.linear(x.detach(), weight, bias) for weight, bias in weights]
    return _SumInputGradient.apply(x, joined, *(weight.detach() for weight, _ in weights), *results)


class RowParallelLinear(nn.Module):
    """y = x W^T + b with the columns of W (input features) split over tp; leaves the region."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, region: TensorRegion, dtype: torch.dtype):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.region = region
        self.weight = region.parameter((out_features, in_features // region.size), Shard(1), dtype)
        self.bias = region.parameter((out_features,), Replicate(), dtype) if bias else None
        self.partial_over_tp = ("bias",) if region.megatron_sp else ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, t, in/tp] -> [b, t(/tp), out]"""
        if self.region.size == 1 and self.bias is not None:
            return F.linear(x, local_weight(self.weight), local_weight(self.bias))
        return self.finish(F.linear(x, local_weight(self.weight)))

    def finish(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum the product over the ranks and add the bias; for callers that compute the product tile by tile.

        Args:
            partial: x W^T of this rank's columns, [b, t, out]
        Returns:
            [b, t(/tp), out]
        """
        y = self.region.leave(partial)
        return y if self.bias is None else y + local_weight(self.bias)


class VocabParallelEmbedding(nn.Module):
    """Token embedding with the vocabulary split over tp; leaves the region.

    The weight has ``padded_size`` rows. The rows beyond ``vocab_size`` stay zero.
    """

    def __init__(self, vocab_size: int, padded_size: int, width: int, *, region: TensorRegion, dtype: torch.dtype):
        super().__init__()
        self.vocab_size, self.padded_size, self.width = vocab_size, padded_size, width
        self.region = region
        self.weight = region.parameter((padded_size // region.size, width), Shard(0), dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look up embeddings: [b, t] -> [b, t(/tp), h]."""
        weight = local_weight(self.weight)
        if self.region.size == 1:
            return F.embedding(tokens, weight)
        rows = weight.shape[0]
        local = tokens - self.region.rank * rows
        mine = (local >= 0) & (local < rows)
        embedded = F.embedding(local.clamp(0, rows - 1), weight) * mine.unsqueeze(-1)
        return self.region.leave(embedded)


class VocabParallelOutput(nn.Module):
    """Logits with the vocabulary split over tp; enters the region.

    Args:
        tied: whether the layer has no weight of its own and gets that of the embedding at each call.
    """

    def __init__(self, vocab_size: int, padded_size: int, width: int, *, region: TensorRegion, dtype: torch.dtype,
                 tied: bool):
        super().__init__()
        self.vocab_size, self.padded_size, self.width = vocab_size, padded_size, width
        self.region = region
        rows = padded_size // region.size
        self.weight = None if tied else region.parameter((rows, width), Shard(0), dtype)

    def forward(self, x: torch.Tensor, tied_weight: torch.Tensor | None = None,
                consume: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.linear) -> torch.Tensor:
        """Compute logits, [b, t(/tp), h] -> [b, t, v/tp], or something that needs them, such as a loss.

        Args:
            consume: gets x [b, t, h] and this rank's weight [v/tp, h]. Its result is returned.
        """
        weight = self.weight if self.weight is not None else tied_weight
        assert weight is not None
        return consume(self.region.enter(x), local_weight(weight))
