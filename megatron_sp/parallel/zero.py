"""ZeRO over the data- and sequence-parallel ranks together, through FSDP2.

Source: Rajbhandari et al. (arXiv 1910.02054), with ``torch.distributed.fsdp.fully_shard``. The axes ``replicate`` and
``shard`` of ``ParallelMesh.weights`` say over which ranks weights are sharded. In stage 0 each rank has a whole copy
(``shard`` has size 1). The other stages shard over all ranks of the fsdp view. With ``--fsdp-size N`` they shard over
groups of N ranks, and every group has a copy (hybrid sharding). Stage 0 in fp32 does not use FSDP: see ``gradients``.

| stage | weights are gathered | gradients are summed over the ranks of a shard | what is sharded |
|---|---|---|---|
| 0 | (nothing to gather) | (every rank has all) | nothing |
| 1 | once a step | in the last backward of a step | optimizer states and fp32 master weights |
| 2 | once a step | in every backward | gradients too |
| 3 | for every forward and every backward | in every backward | parameters too |

A step has a backward for each microbatch and, with ``--sequence-chunk-size``, for each of its chunks. Over the copies
of a shard (stage 0, hybrid sharding) gradients are summed in the last backward of a step. In a pipeline, where
microbatches take turns, all stages sum in the last backward, and stage 3 keeps weights after a backward until the next
forward has used them.

Gradients are summed, never averaged, because the loss is already divided by the global token count.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from megatron_sp.config.schema import Run
from megatron_sp.layout.recomputation import recompute_unit
from megatron_sp.layout.sharding import layers_ahead, uses_fsdp
from megatron_sp.parallel.mesh import ParallelMesh


class ZeroSharding:
    """Shards a model with FSDP2. Callers wrap the parts of the model first, then the model itself.

    Args:
        run: says what is sharded and in which type the model computes. With ``offload_optimizer`` master weights,
            gradients and optimizer states are in host memory. FSDP copies weights to the device to gather them, and
            the optimizer computes on the host.
    """

    def __init__(self, run: Run, mesh: ParallelMesh):
        parallel, precision, offload = run.parallel, run.precision, run.memory.offload_optimizer
        # With an axis of copies FSDP would sum gradients over it, even where there is only one copy.
        self.mesh = mesh.weights["replicate", "shard"] if mesh.weights["replicate"].size() > 1 else \
            mesh.weights["shard"]
        self.reshard_after_forward = parallel.zero_stage == 3
        self.policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        if precision.dtype != "float32":
            reduce = torch.bfloat16 if precision.grad_reduce_in_bf16 else torch.float32
            self.policy = MixedPrecisionPolicy(getattr(torch, precision.dtype), reduce, cast_forward_inputs=False)
        self.offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if offload else OffloadPolicy()
        self.is_needed = uses_fsdp(run)
        self.unit = recompute_unit(run.memory)

    def wrap(self, modules: nn.Module | Sequence[nn.Module], *, keep_gathered: bool = False,
             backward_needs_weights: bool = True) -> None:
        """Shard the parameters of these modules as one unit, which FSDP gathers and frees together.

        Args:
            keep_gathered: keep the gathered parameters after forward in stage 3 too. For the modules that backward
                needs first, and for parameters that two modules share.
            backward_needs_weights: False for an embedding, whose backward reads only the tokens. It is then not
                gathered again for backward.
        """
        if not self.is_needed:
            return
        unit = modules if isinstance(modules, nn.Module) else list(modules)
        fully_shard(unit, mesh=self.mesh, mp_policy=self.policy, offload_policy=self.offload,
                    reshard_after_forward=self.reshard_after_forward and not keep_gathered)
        for module in [unit] if isinstance(unit, nn.Module) else unit:
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                module.set_unshard_in_backward(backward_needs_weights)

    def gather_ahead(self, layers: Sequence[nn.Module], num_parameters: int) -> None:
        """In stage 3, gather the next layers while a layer computes: one layer ahead, or two where they are small.

        FSDP's own order is one layer ahead in backward, and in forward as soon as the host comes to the next layer.

        Layers that are recomputed together run forward again in backward. Then the layer after them has been used and
        freed already, and nobody would free it a second time. So only the last of them, for which FSDP starts no
        gather in that second run, gathers the layers after them.

        Args:
            layers: in the order of the forward pass, each wrapped as one unit.
            num_parameters: number of parameters of one layer on this tensor-parallel rank.
        """
        units: list[FSDPModule] = [layer for layer in layers if isinstance(layer, FSDPModule)]
        if not (self.is_needed and self.reshard_after_forward and units):
            return
        element = (self.policy.param_dtype or torch.float32).itemsize
        count = layers_ahead(element * num_parameters)
        for index, unit in enumerate(units):
            is_last, following = (index + 1) % self.unit == 0, (index // self.unit + 1) * self.unit
            unit.set_modules_to_forward_prefetch(
                units[index + 1:index + 1 + count if is_last else min(index + 1 + count, following)])
            unit.set_modules_to_backward_prefetch(units[max(index - count, 0):index][::-1])


def prepare_backward(model: nn.Module, zero_stage: int, *, is_last: bool) -> None:
    """Tell FSDP what to do in the next backward pass: sum its gradients over the ranks, free the gathered weights.

    The module's table says what each stage does.

    Args:
        is_last: whether this is the last backward pass of a step. It always sums and frees.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(zero_stage >= 2 or is_last)
        model.set_requires_all_reduce(is_last)
        model.set_reshard_after_backward(zero_stage == 3 or is_last)
