"""Sum the gradients of a model of which every data- and sequence-parallel rank holds a whole copy.

That is ZeRO stage 0 in fp32: nothing is sharded and nothing cast, so there is nothing for FSDP to do. The
sum is taken once a step, after the last microbatch, through shared memory where the ranks have it and
otherwise by all-reduces of bounded buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_sp.layout.sharding import GRADIENT_BUCKET
from megatron_sp.parallel.mesh import ParallelMesh


def local_gradients(model: nn.Module) -> list[torch.Tensor]:
    """This rank's gradients, contiguous, without those that are missing."""
    found = []
    for p in model.parameters():
        if p.grad is None:
            continue
        local = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        if not local.is_contiguous():
            local = local.contiguous()
            p.grad = DTensor.from_local(local, p.grad.device_mesh, p.grad.placements, run_check=False) if isinstance(
                p.grad, DTensor) else local
        found.append(local)
    return found


def sum_gradients(model: nn.Module, mesh: ParallelMesh) -> None:
    """Add up the gradients of all fsdp ranks, in place; each rank then holds the sum."""
    gradients = local_gradients(model)
    link = mesh.link("fsdp")
    if link is not None:
        link.all_reduce(gradients)
        return
    for bucket in _buckets(gradients):
        _all_reduce(bucket, mesh.group("fsdp"))


def _all_reduce(bucket: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    if len(bucket) == 1:
        dist.all_reduce(bucket[0], group=group)
        return
    flat = torch.cat([gradient.view(-1) for gradient in bucket])
    dist.all_reduce(flat, group=group)
    torch._foreach_copy_([gradient.view(-1) for gradient in bucket],
                         list(flat.split([gradient.numel() for gradient in bucket])))


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Runs of tensors of one type that fit a bucket; a larger tensor is one by itself."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.nbytes > GRADIENT_BUCKET or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
