"""Ranks that share the drawing of initial weights get the weights that each would draw alone."""

from __future__ import annotations

from unittest import mock

import torch

from megatron_sp.model import init
from megatron_sp.model.build import build_model
from megatron_sp.model.gpt import GPT
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.tensor import TensorRegion, local_weight
from tests.helpers.configs import STYLES, tiny_run
from tests.helpers.spawn import RunRanks

FROM = 2000  # values: the matrices of the model have more, its norms and biases have fewer


def shared(flags: str, world: int) -> tuple[list[str], list[str], int]:
    """Return the weights that differ from those drawn alone, what this rank drew, and the number of shared weights."""
    run = tiny_run(f"{STYLES['llama']} --seq-length 48 --global-batch-size 6 {flags}".split(), world)
    mesh = ParallelMesh.build(run.parallel)
    model, region = build_model(run, mesh), TensorRegion.of(mesh, run.parallel.megatron_sp)
    assert isinstance(model, GPT) and model.embedding is not None and model.output is not None
    alone = {name: local_weight(parameter).clone() for name, parameter in model.named_parameters()}
    parts: list[init.Part] = [*((block, f"layers.{name}") for name, block in model.layers.items()),
                              (model.embedding, "embedding"), (model.output, "output")]
    weights = init.InitialWeights(run.model, run.train.seed, region, parts, mesh.device, mesh.group("fsdp"), FROM)
    with mock.patch.object(init, "initial_value", wraps=init.initial_value) as draw:
        for part in parts:
            with torch.no_grad():
                for parameter in part[0].parameters():
                    local_weight(parameter).fill_(torch.nan)
            weights.fill(part)
    drawn = [call.args[0] for call in draw.call_args_list]
    large = [name for part in parts for name, _, shape in init.full_parameters(part) if len(shape) > 1]
    differ = [name for name, parameter in model.named_parameters()
              if not torch.equal(local_weight(parameter), alone[name])]
    return differ, [name for name in drawn if name in large], len(large)


def test_ranks_share_the_drawing_and_change_no_weight(ranks: RunRanks) -> None:
    for flags, world, sharing in (("--zero-stage 0", 3, 3), ("--tensor-model-parallel-size 2 --zero-stage 0", 2, 1)):
        found = ranks(shared, world, flags, world)
        assert [differ for differ, _, _ in found] == [[]] * world
        counts, large = [len(drawn) for _, drawn, _ in found], found[0][2]
        assert sum(counts) == large * world // sharing
        assert max(counts) == -(-large // sharing)
