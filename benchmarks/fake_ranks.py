"""Run a training step of any layout in one process, and count what rank 0 does.

The process plays rank 0. The other ranks do not exist: a fake process group accepts every collective and sends nothing.

- ``count_step`` runs forward and backward on the "meta" device, where tensors have no values. So a read of a value by
  the host is an error, and copies between host and device can be seen. FSDP and pipelines do not work on "meta".
- ``count_sharded_step`` runs a whole step with FSDP on the CPU. What other ranks would send is whatever the memory
  holds, so the values mean nothing. Reads can be seen and copies cannot.

Both take a fraction of a second on a small model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_sp.config.load import load_run
from megatron_sp.config.resolve import with_vocab
from megatron_sp.config.schema import Run
from megatron_sp.data.batch import Microbatch
from megatron_sp.layout.masks.attention_mask import CAUSAL, AttentionMask
from megatron_sp.model.build import assemble, build_model, plan_stages
from megatron_sp.model.kernels import choose_kernels
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.tensor import TensorRegion
from megatron_sp.proof.traffic import Traffic, gpu_kernels
from megatron_sp.train.forward_backward import build_engine
from megatron_sp.train.train_step import TrainStep

META = torch.device("meta")
LLAMA = ("--hidden-size 96 --num-attention-heads 12 --kv-channels 8 --group-query-attention --num-query-groups 4 "
         "--ffn-hidden-size 96 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
         "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --fused-kernels torch "
         "--seq-length 96 --micro-batch-size 2 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
         "--vocab-size 96 --no-shared-memory")


@contextmanager
def fake_group(world: int) -> Iterator[None]:
    """Make a process group of ``world`` ranks, of which this process is rank 0."""
    dist.init_process_group("cpu:fake,meta:fake", store=FakeStore(), rank=0, world_size=world)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_of(flags: str, world: int, layers: int) -> Run:
    """Return a resolved run of a model of Llama's type in a layout."""
    run, _ = load_run(f"--num-layers {layers} {LLAMA} {flags}".split(), world)
    return with_vocab(run, run.model.vocab_size)


def batch_of(run: Run, mesh: ParallelMesh, mask: AttentionMask = CAUSAL) -> Microbatch:
    """Return a microbatch of this rank; on the CPU all its tokens are 0."""
    tokens = torch.zeros(run.train.micro_batch_size, run.data.seq_length // mesh.size("sp"), dtype=torch.int64,
                         device=mesh.device)
    return Microbatch(tokens, tokens, tokens, torch.arange(len(tokens), device=tokens.device), tokens.numel(), mask)


def counter(mesh: ParallelMesh) -> Traffic:
    """Return a counter that names the process groups of a mesh; where two axes have the same ranks, after the last."""
    names = ("world", "fsdp", "dp", "sp", "pp", "ring", "ulysses", "tp")
    called = {str(mesh.weights[axis].get_group().group_name): f"fsdp, {axis}" for axis in ("replicate", "shard")}
    return Traffic(called | {str(mesh.group(name).group_name): name for name in names})


def count_step(flags: str, world: int, *, layers: int = 2, microbatches: int = 2,
               mask: AttentionMask = CAUSAL) -> Traffic:
    """Return the traffic of forward and backward of a step of a model of Llama's type, without FSDP and pipeline.

    Raises:
        RuntimeError, NotImplementedError: the host would read a value from the device.
    """
    with fake_group(world):
        run = run_of(flags, world, layers)
        mesh = ParallelMesh.build(run.parallel, META)
        region = TensorRegion.of(mesh, run.parallel.megatron_sp)
        model = assemble(run, plan_stages(run)[0], mesh, region, torch.float32,
                         choose_kernels(run, torch.device("cpu")))
        engine, batch = build_engine(run, model, mesh), batch_of(run, mesh, mask)
        with counter(mesh) as traffic, gpu_kernels(traffic):
            engine.forward_backward([batch] * microbatches, 1.0)
    return traffic


def count_sharded_step(flags: str, world: int, *, layers: int = 2, microbatches: int = 2) -> Traffic:
    """Return the traffic of a whole training step, which is not the first, on the CPU; without a pipeline."""
    with fake_group(world):
        run = run_of(flags, world, layers)
        mesh = ParallelMesh.build(run.parallel)
        step = TrainStep.build(run, build_model(run, mesh), mesh)
        batches = [batch_of(run, mesh)] * microbatches
        step.train(batches, scheduler_samples=0)
        with counter(mesh) as traffic:
            step.train(batches, scheduler_samples=0)
    return traffic
