"""Run forward and backward of a training step of any layout in one process, on tensors without values.

The process plays rank 0. The other ranks do not exist: a fake process group accepts every collective and sends nothing.
Tensors are on the "meta" device, so a read of a value by the host is an error, and copies between host and device can
be seen. A whole step takes a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_sp.config.load import load_run
from megatron_sp.config.resolve import with_vocab
from megatron_sp.data.batch import Microbatch
from megatron_sp.layout.masks.attention_mask import CAUSAL, AttentionMask
from megatron_sp.model.build import assemble, plan_stages
from megatron_sp.model.kernels import choose_kernels
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.tensor import TensorRegion
from megatron_sp.proof.traffic import Traffic, gpu_kernels
from megatron_sp.train.forward_backward import build_engine

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


def count_step(flags: str, world: int, *, layers: int = 2, microbatches: int = 2,
               mask: AttentionMask = CAUSAL) -> Traffic:
    """Return the traffic of forward and backward of a step of a model of Llama's type, without FSDP and pipeline.

    Raises:
        RuntimeError, NotImplementedError: the host would read a value from the device.
    """
    with fake_group(world):
        run, _ = load_run(f"--num-layers {layers} {LLAMA} {flags}".split(), world)
        run = with_vocab(run, run.model.vocab_size)
        mesh = ParallelMesh.build(run.parallel, META)
        region = TensorRegion.of(mesh, run.parallel.megatron_sp)
        model = assemble(run, plan_stages(run)[0], mesh, region, torch.float32,
                         choose_kernels(run, torch.device("cpu")))
        engine = build_engine(run, model, mesh)
        tokens = torch.empty(run.train.micro_batch_size, run.data.seq_length // mesh.size("sp"), dtype=torch.int64,
                             device=META)
        batch = Microbatch(tokens, tokens, tokens, tuple(range(len(tokens))), tokens.numel(), mask)
        with Traffic({mesh.group(name).group_name: name for name in ("fsdp", "tp")}) as traffic, gpu_kernels(traffic):
            engine.forward_backward([batch] * microbatches, 1.0)
    return traffic
