"""Build a model for a mesh: the strategy in one short, ordered function."""

from __future__ import annotations

import torch
from torch import nn

from megatron_sp.config.schema import Run
from megatron_sp.model.attention import AttentionPlan
from megatron_sp.model.attention_core import build_core
from megatron_sp.model.block import Block
from megatron_sp.model.gpt import GPT, Embedding
from megatron_sp.model.init import initialise
from megatron_sp.model.norm import Norm
from megatron_sp.parallel.heads import HeadSplit
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.sequence import first_query_head, parallel_attention
from megatron_sp.parallel.tensor import TensorRegion, VocabParallelOutput
from megatron_sp.parallel.zero import ZeroSharding


def plan_attention(run: Run, mesh: ParallelMesh) -> AttentionPlan:
    """The heads of this rank and the attention core wrapped for the mesh."""
    model = run.model
    heads = HeadSplit.of(model.num_attention_heads, model.num_query_groups, tp=mesh.size("tp"),
                         tp_rank=mesh.rank("tp"), ulysses=mesh.size("ulysses"))
    core = build_core(run.train.attention_backend, dropout=model.attention_dropout > 0)
    return AttentionPlan(heads, parallel_attention(core, heads, mesh), first_query_head(heads, mesh))


def assemble(run: Run, mesh: ParallelMesh, region: TensorRegion, dtype: torch.dtype) -> GPT:
    """All modules of this rank, without storage."""
    model, seed = run.model, run.train.seed
    tokens = run.data.seq_length // mesh.size("sp")
    first_token = mesh.rank("sp") * tokens + region.outside_tokens(tokens)[0]
    plan = plan_attention(run, mesh)
    full_recompute = run.train.recompute_granularity == "full"
    tied = not model.untie_embeddings_and_output_weights

    def block(layer: int) -> Block:
        return Block(model, layer, plan, seed=seed, first_token=first_token, recompute_in_backward=full_recompute,
                     region=region, dtype=dtype)

    with torch.device("meta"):
        return GPT(model, range(model.num_layers), block,
                   embedding=Embedding(model, seed=seed, first_token=first_token, region=region, dtype=dtype),
                   final_norm=Norm(model.hidden_size, model, region=region, dtype=dtype,
                                   partial_grad=region.megatron_sp),
                   output=VocabParallelOutput(model.vocab_size, model.padded_vocab_size, model.hidden_size,
                                              region=region, dtype=dtype, tied=tied))


def build_model(run: Run, mesh: ParallelMesh, dtype: torch.dtype = torch.float32) -> GPT:
    """The model of a resolved run, initialised, split over tp and sharded over fsdp.

    The order matters: storage is given to one part at a time and sharded at once, so that a rank
    never holds more than its shards and one whole part; parts are sharded before the model, whose
    own unit then holds what is left (tied embeddings, which both ends of the model need).

    Args:
        dtype: storage type; computation is in ``run.precision``'s type.
    """
    region = TensorRegion.of(mesh, run.parallel.megatron_sp)
    model = assemble(run, mesh, region, dtype)
    sharding = ZeroSharding(run.parallel, run.precision, mesh)

    def materialise(module: nn.Module, name: str) -> None:
        module.to_empty(device=mesh.device)
        initialise(module, name, run.model, run.train.seed, region)

    assert model.embedding is not None and model.final_norm is not None and model.output is not None
    for name, block in model.layers.items():
        materialise(block, f"layers.{name}")
        sharding.wrap(block)
    materialise(model.embedding, "embedding")
    materialise(model.final_norm, "final_norm")
    materialise(model.output, "output")
    if run.model.untie_embeddings_and_output_weights:
        sharding.wrap(model.embedding)
        sharding.wrap([model.final_norm, model.output], keep=True)
    sharding.wrap(model, keep=True)
    return model
