"""ZeRO stage 3 gathers the weights of the next layers while a layer computes: two where layers are small, else one."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_sp.layout import sharding
from megatron_sp.model.block import Block
from megatron_sp.model.build import build_model
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.proof.data import batch, local_microbatches
from megatron_sp.train.train_step import TrainStep
from tests.distributed.parallel.test_zero_collectives import MODEL
from tests.helpers.configs import tiny_run
from tests.helpers.spawn import RunRanks

LAYERS = 5


class GathersBefore(TorchDispatchMode):
    """Notes how many all-gathers had been started when each layer began to compute, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.gathers, self.noted = 0, dict[str, int]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.gathers += function._schema.name == "c10d::_allgather_base_"
        return function(*args, **(kwargs or {}))

    def watch(self, number: int, block: Block) -> None:
        """Note the gathers when the first products of the layer run: forward, and its last products in backward."""
        def forward(module: Any, args: Any) -> None:
            self.noted[f"forward {number}"] = self.gathers

        def backward(module: Any, grads: Any) -> None:
            self.noted[f"backward {number}"] = self.gathers

        block.post_attention_norm.register_forward_pre_hook(forward)  # beside FSDP's hooks, not before them
        block.post_attention_norm.register_full_backward_pre_hook(backward)


def gathers_before(small_layer: int, flags: str = "") -> dict[str, int]:
    """On a rank: return the gathers before each layer of a step, and at its end."""
    run = tiny_run((MODEL.replace("--num-layers 2", f"--num-layers {LAYERS}") + f"--zero-stage 3 {flags}").split(), 2)
    mesh = ParallelMesh.build(run.parallel)
    with mock.patch.object(sharding, "SMALL_LAYER", small_layer):
        model = build_model(run, mesh)
    step = TrainStep.build(run, model, mesh)
    with GathersBefore() as gathers:
        for number, block in enumerate(module for module in model.modules() if isinstance(module, Block)):
            gathers.watch(number, block)
        step.compute_gradients(local_microbatches(run, mesh, *batch(run))[:1])
    return gathers.noted | {"end": gathers.gathers}


@pytest.mark.parametrize(("small_layer", "ahead"), [(1 << 20, 2), (0, 1)])
def test_layers_are_gathered_ahead(ranks: RunRanks, small_layer: int, ahead: int) -> None:
    last = LAYERS - 1
    # The embedding is gathered before the layers, the output layer after them. Backward gathers all layers again.
    forward = {f"forward {layer}": 1 + min(layer + 1 + ahead, LAYERS) for layer in range(LAYERS)}
    start = 1 + LAYERS + 1
    backward = {f"backward {layer}": start + min(last - layer + 1 + ahead, LAYERS) for layer in range(LAYERS)}
    for noted in ranks(gathers_before, 2, small_layer):
        assert noted == forward | backward | {"end": start + LAYERS}


def test_layers_that_are_recomputed_together_gather_none_that_backward_has_freed(ranks: RunRanks) -> None:
    flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"
    for noted in ranks(gathers_before, 2, 1 << 20, flags):
        assert noted["end"] == 1 + LAYERS + 1 + LAYERS
