"""Build a run's model on a mesh: modules without storage, then storage, initial weights and sharding, part by part."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from megatron_sp.activations.offload import ActivationOffload
from megatron_sp.activations.results import ResultsOnHost
from megatron_sp.config.schema import Run
from megatron_sp.layout.heads import HeadSplit, are_equal_groups
from megatron_sp.layout.masks.windows import layer_windows
from megatron_sp.layout.patterns.choice import layer_patterns
from megatron_sp.layout.recomputation import recompute_unit, recomputed_layers
from megatron_sp.layout.schedules import stages_of_rank
from megatron_sp.layout.stages import stage_layers
from megatron_sp.model.attention.chunk_attention import ChunkAttention
from megatron_sp.model.attention.patterns import NumberedHeads
from megatron_sp.model.attention.self_attention import AttentionPlan
from megatron_sp.model.attention.unfused import attend_in_query_blocks
from megatron_sp.model.block import Block
from megatron_sp.model.gpt import GPT, Embedding
from megatron_sp.model.init import InitialWeights, Part
from megatron_sp.model.kernels import Kernels, choose_kernels
from megatron_sp.model.norm import Norm
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.pipeline import Stages, TiedWeights
from megatron_sp.parallel.sequence import first_query_head, match_heads, match_heads_in_kernel, parallel_attention
from megatron_sp.parallel.tensor import TensorRegion, VocabParallelOutput, local_weight
from megatron_sp.parallel.ulysses import Core
from megatron_sp.parallel.zero import ZeroSharding
from megatron_sp.progress import progress_bar


def plan_attention(run: Run, mesh: ParallelMesh, kernels: Kernels) -> AttentionPlan:
    """Return all heads of this rank and an attention core for them, wrapped for the mesh."""
    model = run.model
    heads = HeadSplit.of(model.num_attention_heads, model.num_query_groups, tp=mesh.size("tp"),
                         tp_rank=mesh.rank("tp"), ulysses=mesh.size("ulysses"))
    return plan_heads(run, mesh, kernels, heads)


def plan_head_groups(run: Run, mesh: ParallelMesh, kernels: Kernels, plan: AttentionPlan) -> list[AttentionPlan]:
    """Return the same heads cut into the groups of ``--attention-head-groups``; an empty list without the flag."""
    count = run.memory.attention_head_groups
    return [plan_heads(run, mesh, kernels, heads) for heads in plan.heads.in_groups(count)] if count > 1 else []


def plan_heads(run: Run, mesh: ParallelMesh, kernels: Kernels, heads: HeadSplit) -> AttentionPlan:
    """Return these heads and an attention core for them, wrapped for the mesh."""
    patterns, once = any(layer_patterns(run.model)), kernels.results.once

    def core(part: HeadSplit) -> Core:
        indices = part.kv_indices(mesh.rank("ulysses"))
        whole, first_head = match_heads(kernels.core, indices, mesh.device), first_query_head(part, mesh)
        if not run.memory.sequence_chunk_size:
            return NumberedHeads(whole, first_head) if patterns else whole
        return ChunkAttention(whole, match_heads_in_kernel(kernels.block_kernel, indices, mesh.device),
                              match_heads(partial(attend_in_query_blocks, once=once), indices, mesh.device), first_head,
                              (kernels.block_kernel, () if are_equal_groups(indices) else indices))

    overlap = 1 if run.memory.attention_head_groups > 1 else run.parallel.ulysses_overlap_groups
    if run.memory.sequence_chunk_size and not heads.can_cut_keys(2):
        overlap = overlap or 1  # with two groups, each would store the same keys and values for later chunks
    stays_uncompiled = run.train.compile and attends_outside_of_graph(run, mesh, overlap)
    wrapped = parallel_attention(core, kernels.block_kernel, heads, mesh, overlap=overlap,
                                 compiled=run.train.compile and not stays_uncompiled, once=once)
    if stays_uncompiled:
        wrapped = torch.compiler.disable(wrapped)
    return AttentionPlan(heads, wrapped, first_query_head(heads, mesh))


def attends_outside_of_graph(run: Run, mesh: ParallelMesh, overlap: int) -> bool:
    """Return whether attention of a compiled layer, with its exchange, must stay uncompiled.

    - Documents differ in each microbatch, so Dynamo would compile again for each microbatch.
    - Windows, patterns, chunks and dropout attend in a Python loop of many small kernel calls, which Dynamo would have
      to trace.
    - A ring and exchanges of head groups send while they attend, in an order that a compiler would change.

    Args:
        overlap: number of head groups; 0 where the user names none.
    """
    model = run.model
    has_loop = bool(any(layer_windows(model)) or any(layer_patterns(model)) or run.memory.sequence_chunk_size
                    or model.attention_dropout)
    return run.data.reset_attention_mask or has_loop or overlap > 1 or mesh.size("ring") > 1


@dataclass(frozen=True)
class StagePlan:
    """The part of the model that one pipeline stage holds; without pipeline, all of it."""

    layers: range
    is_first: bool = True
    is_last: bool = True


def plan_stages(run: Run) -> list[StagePlan]:
    """Return the stages of the whole pipeline in order."""
    layers = stage_layers(run.model, run.parallel)
    last = len(layers) - 1
    return [StagePlan(stage, number == 0, number == last) for number, stage in enumerate(layers)]


def assemble(run: Run, stage: StagePlan, mesh: ParallelMesh, region: TensorRegion, dtype: torch.dtype,
             kernels: Kernels) -> GPT:
    """Return all modules of a stage, with parameters on the meta device, which takes no memory."""
    model, seed = run.model, run.train.seed
    plan = plan_attention(run, mesh, kernels)
    groups = plan_head_groups(run, mesh, kernels, plan)
    memory = run.memory
    unit, recomputed = recompute_unit(memory), recomputed_layers(memory, stage.layers)
    # With tied embeddings, a last stage that does not hold the embedding has a copy of it (pipeline.TiedWeights).
    tied = not model.untie_embeddings_and_output_weights and stage.is_first

    num_offloaded = round(memory.offload_activations * len(stage.layers))
    results_on_host = ResultsOnHost()

    def block(layer: int) -> Block:
        granularity = memory.recompute_granularity if layer in recomputed and unit == 1 else ""
        offloaded = layer - stage.layers.start < num_offloaded
        return Block(model, layer, plan, groups, seed=seed, recompute_granularity=granularity,
                     mlp_tile=memory.mlp_tile_size, results=kernels.results,
                     results_on_host=results_on_host if offloaded else None, region=region, dtype=dtype,
                     norm_kernels=kernels.norms, compiled=run.train.compile)

    embedding = final_norm = output = None
    with torch.device("meta"):
        if stage.is_first:
            embedding = Embedding(model, seed=seed, region=region, dtype=dtype)
        if stage.is_last:
            final_norm = Norm(model.hidden_size, model, region=region, dtype=dtype, partial_grad=region.megatron_sp,
                              kernels=kernels.norms)
            output = VocabParallelOutput(model.vocab_size, model.padded_vocab_size, model.hidden_size, region=region,
                                         dtype=dtype, tied=tied)
        return GPT(model, stage.layers, block, embedding=embedding, final_norm=final_norm, output=output,
                   loss_tile=memory.loss_tile_size, products_in_fp32=kernels.products_in_fp32, unit=unit,
                   offload=ActivationOffload(memory.offload_activations, len(stage.layers) // unit)
                   if memory.offload_activations else None, region=region)


def build_stage(run: Run, stage: StagePlan, mesh: ParallelMesh, dtype: torch.dtype, kernels: Kernels) -> GPT:
    """Return one stage, initialised, split over tp and sharded over fsdp.

    The order matters. Each part gets storage and is sharded before the next one gets storage, so that a rank never
    holds more than its shards and one whole part. Parts are sharded before the stage as a whole: FSDP then gathers
    with the stage what no part has taken, which is a tied embedding, since both ends of the model need it.
    """
    region = TensorRegion.of(mesh, run.parallel.megatron_sp, overlapped=kernels.overlaps_tensor)
    model = assemble(run, stage, mesh, region, dtype, kernels)
    sharding = ZeroSharding(run, mesh)
    is_tied = not run.model.untie_embeddings_and_output_weights
    layers: list[Part] = [(block, f"layers.{name}") for name, block in model.layers.items()]
    embedding: list[Part] = [] if model.embedding is None else [(model.embedding, "embedding")]
    end: list[Part] = []
    if model.final_norm is not None and model.output is not None:
        # The copy of a tied embedding gets the embedding's initial values, because it is drawn from the same name.
        end = [(model.final_norm, "final_norm"), (model.output, "embedding.word" if is_tied else "output")]
    share = mesh.device.type == "cuda" and mesh.size("fsdp") > 1
    initial = InitialWeights(run.model, run.train.seed, region, [*layers, *embedding, *end], mesh.device,
                             mesh.group("fsdp") if share else None)

    def materialise(part: Part) -> None:
        part[0].to_empty(device=mesh.device)
        initial.fill(part)

    layer_size = 0
    with progress_bar(layers, desc="building the model", unit="layer", delay=5, leave=False,
                      disable=mesh.global_rank != 0) as bar:
        for part in bar:
            materialise(part)
            layer_size = sum(local_weight(p).numel() for p in part[0].parameters())
            sharding.wrap(part[0])
    sharding.gather_ahead(list(model.layers.values()), layer_size)
    shared = is_tied and stage.is_first and stage.is_last
    for part in embedding:
        materialise(part)
        if not shared:
            sharding.wrap(part[0], backward_needs_weights=False)
    for part in end:
        materialise(part)
    if end and not shared:
        sharding.wrap([module for module, _ in end], keep_gathered=True)
    sharding.wrap(model, keep_gathered=True)
    return model


def build_model(run: Run, mesh: ParallelMesh, dtype: torch.dtype = torch.float32,
                kernels: Kernels | None = None) -> GPT | Stages:
    """Return the model of a resolved run, or the stages of it that this pipeline rank holds.

    Args:
        dtype: type of the stored weights; the model computes in the type of ``run.precision``.
        kernels: None chooses them here.
    """
    plans, kernels = plan_stages(run), kernels or choose_kernels(run, mesh.device, mesh.group("tp"))
    if mesh.size("pp") == 1:
        return build_stage(run, plans[0], mesh, dtype, kernels)
    parallel = run.parallel
    numbers = stages_of_rank(parallel.pipeline_schedule, parallel.pp, parallel.stages_per_rank, mesh.rank("pp"))
    stages = Stages([build_stage(run, plans[number], mesh, dtype, kernels) for number in numbers], numbers, len(plans))
    if not run.model.untie_embeddings_and_output_weights:
        stages.tied = tied_weights(stages, mesh)
    return stages


def tied_weights(stages: Stages, mesh: ParallelMesh) -> TiedWeights:
    """Return this rank's copies of the embedding, which the first and the last stage of the pipeline use."""
    parts = [part for part in stages if isinstance(part, GPT)]
    first = [part.embedding.word.weight for part in parts if part.embedding is not None]
    last = [part.output.weight for part in parts if part.output is not None]
    both_here = bool(first and last)
    return TiedWeights(first[0] if first else None, last[0] if last else None,
                       None if both_here else mesh.pipeline_ends_group(), mesh.device)
