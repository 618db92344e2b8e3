"""Build a model for a mesh: the strategy in one short, ordered function."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from megatron_sp.activations.offload import ActivationOffload
from megatron_sp.config.schema import Run
from megatron_sp.layout.heads import HeadSplit
from megatron_sp.layout.schedules import stages_of_rank
from megatron_sp.layout.stages import stage_layers
from megatron_sp.model.attention.block_kernels import block_kernel
from megatron_sp.model.attention.cores import AttentionCore, SDPACore, build_core
from megatron_sp.model.attention.module import AttentionPlan
from megatron_sp.model.block import Block
from megatron_sp.model.gpt import GPT, Embedding
from megatron_sp.model.init import initialise
from megatron_sp.model.norm import Norm
from megatron_sp.model.other_kernels import NormKernels, norm_kernels
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.pipeline import Stages, TiedWeights
from megatron_sp.parallel.sequence import first_query_head, parallel_attention
from megatron_sp.parallel.tensor import TensorRegion, VocabParallelOutput
from megatron_sp.parallel.zero import ZeroSharding


def plan_attention(run: Run, mesh: ParallelMesh) -> AttentionPlan:
    """The heads of this rank and the attention core wrapped for the mesh."""
    model = run.model
    heads = HeadSplit.of(model.num_attention_heads, model.num_query_groups, tp=mesh.size("tp"),
                         tp_rank=mesh.rank("tp"), ulysses=mesh.size("ulysses"))
    return plan_heads(run, mesh, heads)


def plan_head_groups(run: Run, mesh: ParallelMesh, plan: AttentionPlan) -> list[AttentionPlan]:
    """The same heads in runs, for ``--attention-head-groups``; none without it."""
    count = run.memory.attention_head_groups
    return [plan_heads(run, mesh, heads) for heads in plan.heads.in_groups(count)] if count > 1 else []


def plan_heads(run: Run, mesh: ParallelMesh, heads: HeadSplit) -> AttentionPlan:
    """A core wrapped for these heads."""
    core, kernel = attention_core(run, mesh.device), block_kernel(mesh.device)
    overlap = 1 if run.memory.attention_head_groups > 1 else run.parallel.ulysses_overlap_groups
    wrapped = parallel_attention(core, kernel, heads, mesh, overlap=overlap, compiled=run.train.compile)
    return AttentionPlan(heads, wrapped, first_query_head(heads, mesh))


@dataclass(frozen=True)
class StagePlan:
    """The part of the model that one pipeline stage holds; without pipeline, all of it."""

    layers: range
    is_first: bool = True
    is_last: bool = True


def plan_stages(run: Run) -> list[StagePlan]:
    """The stages of the whole pipeline in order."""
    layers = stage_layers(run.model, run.parallel)
    last = len(layers) - 1
    return [StagePlan(mine, number == 0, number == last) for number, mine in enumerate(layers)]


def assemble(run: Run, stage: StagePlan, mesh: ParallelMesh, region: TensorRegion, dtype: torch.dtype) -> GPT:
    """All modules of a stage, without storage."""
    model, seed = run.model, run.train.seed
    tokens = run.data.seq_length // mesh.size("sp")
    first_token = mesh.rank("sp") * tokens + region.outside_tokens(tokens)[0]
    plan = plan_attention(run, mesh)
    memory = run.memory
    unit = memory.recompute_num_layers if memory.recompute_granularity and memory.recompute_method == "uniform" else 1
    recomputed = stage.layers if memory.recompute_method == "uniform" else stage.layers[:memory.recompute_num_layers]
    groups = plan_head_groups(run, mesh, plan)
    # A last stage without the embedding holds a copy of the tied weight (pipeline.TiedWeights).
    tied = not model.untie_embeddings_and_output_weights and stage.is_first

    def block(layer: int) -> Block:
        granularity = memory.recompute_granularity if layer in recomputed and unit == 1 else ""
        return Block(model, layer, plan, groups, seed=seed, first_token=first_token,
                     recompute_granularity=granularity, mlp_tile=memory.mlp_tile_size, region=region, dtype=dtype)

    embedding = final_norm = output = None
    with torch.device("meta"):
        if stage.is_first:
            embedding = Embedding(model, seed=seed, first_token=first_token, region=region, dtype=dtype)
        if stage.is_last:
            final_norm = Norm(model.hidden_size, model, region=region, dtype=dtype, partial_grad=region.megatron_sp)
            output = VocabParallelOutput(model.vocab_size, model.padded_vocab_size, model.hidden_size, region=region,
                                         dtype=dtype, tied=tied)
        return GPT(model, stage.layers, block, embedding=embedding, final_norm=final_norm, output=output,
                   loss_tile=memory.loss_tile_size, unit=unit,
                   offload=ActivationOffload(memory.offload_activations, len(stage.layers) // unit)
                   if memory.offload_activations else None)


def build_stage(run: Run, stage: StagePlan, mesh: ParallelMesh, dtype: torch.dtype = torch.float32) -> GPT:
    """One stage: initialised, split over tp and sharded over fsdp.

    The order matters: storage is given to one part at a time and sharded at once, so that a rank
    never holds more than its shards and one whole part; parts are sharded before the stage, whose
    own unit then holds what is left (a tied embedding, which both ends of the model need).
    """
    region = TensorRegion.of(mesh, run.parallel.megatron_sp)
    model = assemble(run, stage, mesh, region, dtype)
    sharding = ZeroSharding(run, mesh)
    is_tied = not run.model.untie_embeddings_and_output_weights

    def materialise(module: nn.Module, name: str) -> None:
        module.to_empty(device=mesh.device)
        initialise(module, name, run.model, run.train.seed, region)

    use_kernels(model, run, mesh.device)
    for name, block in model.layers.items():
        materialise(block, f"layers.{name}")
        sharding.wrap(block)
    shared = is_tied and stage.is_first and stage.is_last
    if model.embedding is not None:
        materialise(model.embedding, "embedding")
        if not shared:
            sharding.wrap(model.embedding)
    if model.final_norm is not None and model.output is not None:
        materialise(model.final_norm, "final_norm")
        materialise(model.output, "embedding.word" if is_tied else "output")  # a copy is drawn as the original
        if not shared:
            sharding.wrap([model.final_norm, model.output], keep=True)
    sharding.wrap(model, keep=True)
    return model


def use_kernels(model: GPT, run: Run, device: torch.device) -> None:
    """Other packages' norms for ``--fused-kernels``; layers compiled for ``--compile``.

    Only a layer's arithmetic is compiled: recomputation and FSDP's hooks stay around it.
    """
    kernels = fused_norms(run, device)
    for module in model.modules():
        if isinstance(module, Norm):
            module.kernels = kernels
        if run.train.compile and isinstance(module, Block):
            module.compute = torch.compile(module.compute)  # type: ignore[method-assign]


def attention_core(run: Run, device: torch.device) -> AttentionCore:
    """The core that ``--attention-core`` means here."""
    half_head_dim = run.model.head_dim if run.precision.dtype != "float32" else 0
    return build_core(run.train.attention_backend, dropout=run.model.attention_dropout > 0, device=device,
                      half_head_dim=half_head_dim)


def fused_norms(run: Run, device: torch.device) -> NormKernels:
    """The norms that ``--fused-kernels`` means here; compiled layers have torch's unless others are named."""
    choice = run.train.fused_kernels
    return norm_kernels("torch" if choice == "auto" and run.train.compile else choice, device)


def kernels_in_words(run: Run, device: torch.device) -> str:
    """One line on what a run computes with."""
    if run.parallel.ring > 1:
        words = f"{block_kernel(device).description} (blocks of a ring)"
    else:
        core = attention_core(run, device)
        words = core.description
        if run.model.attention_dropout > 0 and isinstance(core, SDPACore):
            words = "unfused in query blocks (because of --attention-dropout)"
    return (f"kernels: attention {words}; norms {fused_norms(run, device).name}; optimizer torch"
            f"{' (fused)' if run.optimizer.optimizer != 'sgd' else ''}; "
            f"layers {'compiled' if run.train.compile else 'not compiled'}")


def build_model(run: Run, mesh: ParallelMesh, dtype: torch.dtype = torch.float32) -> GPT | Stages:
    """The model of a resolved run, or this pipeline rank's stages of it.

    Args:
        dtype: storage type; computation is in ``run.precision``'s type.
    """
    plans = plan_stages(run)
    if mesh.size("pp") == 1:
        return build_stage(run, plans[0], mesh, dtype)
    parallel = run.parallel
    numbers = stages_of_rank(parallel.pipeline_schedule, parallel.pp, parallel.stages_per_rank, mesh.rank("pp"))
    stages = Stages([build_stage(run, plans[number], mesh, dtype) for number in numbers], numbers, len(plans))
    if not run.model.untie_embeddings_and_output_weights:
        stages.tied = tied_weights(stages, mesh)
    return stages


def tied_weights(stages: Stages, mesh: ParallelMesh) -> TiedWeights:
    """This rank's copies of the embedding that both ends of the pipeline use."""
    parts = [part for part in stages if isinstance(part, GPT)]
    first = [part.embedding.word.weight for part in parts if part.embedding is not None]
    last = [part.output.weight for part in parts if part.output is not None]
    both_here = bool(first and last)
    return TiedWeights(first[0] if first else None, last[0] if last else None,
                       None if both_here else mesh.ends_group())
