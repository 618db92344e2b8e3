"""What each ZeRO stage promises to shard, counted in bytes per rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megatron_sp.model.build import build_model
from megatron_sp.model.context import Context
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.zero import prepare_backward
from tests.helpers.configs import tiny_run
from tests.helpers.spawn import RunRanks

WORLD = 4
MODEL = ("--num-layers 2 --hidden-size 64 --num-attention-heads 4 --swiglu --normalization RMSNorm "
         "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights "
         "--make-vocab-size-divisible-by 8 --ulysses-size 2 --micro-batch-size 1").split()


def num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes held; tensors that share one buffer count it once."""
    storages = [(x.to_local() if isinstance(x, DTensor) else x).untyped_storage() for x in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def gathered_bytes(model: torch.nn.Module) -> int:
    """Bytes of the gathered parameters that a rank holds right now."""
    groups = {id(group): group for module in model.modules() if isinstance(module, FSDPModule)
              for group in module._get_fsdp_state()._fsdp_param_groups}
    gathered = [getattr(parameter, "_unsharded_param", None) for group in groups.values()
                for parameter in group.fsdp_params]
    return num_bytes([parameter for parameter in gathered if parameter is not None])


def measure(flags: list[str]) -> dict[str, int]:
    run = tiny_run([*MODEL, *flags], WORLD)
    mesh = ParallelMesh.build(run.parallel)
    model = build_model(run, mesh)
    parameters = list(model.parameters())  # the sharded ones; between forward and backward the model has gathered ones
    optimizer = torch.optim.AdamW(parameters, fused=True)
    full = sum(parameter.numel() * 4 for parameter in parameters)
    found = {"full": full, "parameters": num_bytes(parameters)}
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    for microbatch in range(2):
        prepare_backward(model, run.parallel.zero_stage, is_last=microbatch == 1)
        loss = model(tokens, Context(torch.arange(32).expand(1, -1)), labels=tokens)
        if microbatch == 0:
            found["gathered after forward"] = gathered_bytes(model)
        loss.sum().backward()
        if microbatch == 0:
            gradients = [p.grad for p in parameters if p.grad is not None]
            found["sharded gradients after the first microbatch"] = num_bytes(gradients)
    found["gradients"] = num_bytes([p.grad for p in parameters if p.grad is not None])
    optimizer.step()
    states = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    found["optimizer"] = num_bytes(states)
    mesh.destroy()
    return found


def close_to(value: int, expected: float) -> bool:
    return abs(value - expected) <= 0.03 * expected  # shards of odd sizes are padded


def test_each_stage_shards_what_it_promises(ranks: RunRanks) -> None:
    for rank in ranks(measure, WORLD, ["--zero-stage", "0"]):
        assert rank["parameters"] == rank["full"] and rank["optimizer"] == 2 * rank["full"]
        assert rank["gradients"] == rank["full"]
    for stage in ("1", "2", "3"):
        for rank in ranks(measure, WORLD, ["--zero-stage", stage]):
            shard = rank["full"] / WORLD
            assert close_to(rank["parameters"], shard) and close_to(rank["optimizer"], 2 * shard), (stage, rank)
            assert close_to(rank["gradients"], shard), (stage, rank)
            early = rank["sharded gradients after the first microbatch"]
            assert early == 0 if stage == "1" else close_to(early, shard), (stage, rank)
            kept = rank["gathered after forward"]
            output = 104 * 64 * 4 + 64 * 4  # stage 3 keeps only the last unit: backward needs it first
            assert close_to(kept, rank["full"]) if stage != "3" else kept <= output * 1.03, (stage, rank)


def test_hybrid_sharding_shards_within_and_copies_across(ranks: RunRanks) -> None:
    for rank in ranks(measure, WORLD, ["--zero-stage", "3", "--fsdp-size", "2"]):
        assert close_to(rank["parameters"], rank["full"] / 2)
        assert close_to(rank["optimizer"], rank["full"])
