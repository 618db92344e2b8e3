"""Find the rank, microbatch and parameter in which a loss or gradient that is not finite appeared first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from megatron_sp.train.optimizer import local_part


def describe_failure(model: nn.Module, microbatch_losses: Sequence[torch.Tensor]) -> str:
    """Return one sentence with the ranks whose loss is not finite, or else whose gradients are not. All ranks call it.

    Args:
        microbatch_losses: this rank's losses of the step, scalars.
    """
    bad_losses = [index for index, loss in enumerate(microbatch_losses) if not torch.isfinite(loss)]
    bad_gradients = [name for name, p in model.named_parameters()
                     if p.grad is not None and not torch.isfinite(local_part(p.grad)).all()]
    own = (bad_losses[0] if bad_losses else None, bad_gradients[0] if bad_gradients else None)
    found: list[tuple[int | None, str | None]] = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
    losses = [f"rank {rank} (microbatch {bad + 1})" for rank, (bad, _) in enumerate(found) if bad is not None]
    if losses:
        return f"The loss is not finite on {', '.join(losses)}"
    gradients = [f"rank {rank} (first {bad})" for rank, (_, bad) in enumerate(found) if bad is not None]
    if gradients:
        return f"The losses are finite; gradients are not on {', '.join(gradients)}"
    return "Each rank's loss and gradients are finite, but their sum is not"
