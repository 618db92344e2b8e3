"""ZeRO over the data- and sequence-parallel ranks together, through FSDP2.

Rajbhandari et al. (arXiv 1910.02054) by way of ``torch.distributed.fsdp.fully_shard``. The weights
mesh decides: stage 0 has a ``shard`` axis of 1 and copies over ``replicate``; the other stages
shard over all of fsdp or, with ``--fsdp-size N``, over N ranks and copy across them (hybrid).
Stage 0 in fp32 needs none of this: see ``gradients``.

| stage | after forward | gradients leave the rank | sharded |
|---|---|---|---|
| 0 | parameters kept | at the last microbatch | nothing |
| 1 | parameters kept | at the last microbatch | optimizer states (and fp32 master weights) |
| 2 | parameters kept | at every microbatch | also gradients |
| 3 | parameters dropped | at every microbatch | also parameters |

Gradients are summed, never averaged: the loss is divided once, by the global token count.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from megatron_sp.config.schema import Run
from megatron_sp.layout.sharding import uses_fsdp
from megatron_sp.parallel.mesh import ParallelMesh


class ZeroSharding:
    """Wraps the parts of a model, innermost first, then the model itself.

    Args:
        run: what is sharded and cast. With ``offload_optimizer`` master weights, gradients and optimizer
            states live in host memory; weights are fetched to be gathered, and the optimizer computes on the host.
    """

    def __init__(self, run: Run, mesh: ParallelMesh):
        parallel, precision, offload = run.parallel, run.precision, run.memory.offload_optimizer
        self.mesh = mesh.weights["replicate", "shard"]
        self.drop_after_forward = parallel.zero_stage == 3
        self.policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        if precision.dtype != "float32":
            reduce = torch.bfloat16 if precision.grad_reduce_in_bf16 else torch.float32
            self.policy = MixedPrecisionPolicy(getattr(torch, precision.dtype), reduce, cast_forward_inputs=False)
        self.offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if offload else OffloadPolicy()
        self.is_needed = uses_fsdp(run)

    def wrap(self, modules: nn.Module | Sequence[nn.Module], *, keep: bool = False) -> None:
        """Shard these modules' parameters as one unit.

        Args:
            keep: stay gathered after forward at every stage (needed again at once in backward, or shared).
        """
        if not self.is_needed:
            return
        drop = self.drop_after_forward and not keep
        unit = modules if isinstance(modules, nn.Module) else list(modules)
        fully_shard(unit, mesh=self.mesh, mp_policy=self.policy, offload_policy=self.offload,
                    reshard_after_forward=drop)
        for module in [unit] if isinstance(unit, nn.Module) else unit:
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)


def synchronize_gradients(model: nn.Module, zero_stage: int, *, is_last_microbatch: bool) -> None:
    """Decide before a backward pass whether its gradients are summed over ranks now."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(zero_stage >= 2 or is_last_microbatch)
