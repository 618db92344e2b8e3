"""The training programs of ``measure.py``: ours, and plain loops around transformers' and torchtitan's models.

All of them train layers of Llama's type of the same sizes, in bf16 with fp32 master weights, with AdamW and clipping,
on the same random tokens. The two others use FSDP2 as their documents show it, recompute each layer in backward
where they are asked to, and compute output layer and loss in one piece. Each rank gives them a sequence of its own.
Ours splits a sequence over all ranks (Ulysses) and computes one for each rank in a step.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.llama_shape import LlamaShape
from benchmarks.traffic_layers import CausalAttention
from megatron_sp.config.load import load_run
from megatron_sp.config.resolve import with_vocab
from megatron_sp.config.schema import Run
from megatron_sp.data.batch import Microbatch
from megatron_sp.layout.tokens import SequenceLayout
from megatron_sp.model.attention.flash import FlashSearch, Wanted, find_flash_attention, restore_torchs_flash
from megatron_sp.model.build import build_model
from megatron_sp.model.child_trials import Outcome, try_in_children
from megatron_sp.model.kernels import choose_kernels
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.train.train_step import TrainStep

#: Makes one training step.
Step = Callable[[], None]


@dataclass(frozen=True)
class Shape(LlamaShape):
    """Sizes of a measured model."""

    def flags(self, layers: int, length: int, ranks: int) -> list[str]:
        """Return the flags of our run, without memory techniques."""
        return self.model_flags(layers) + (
            f"--micro-batch-size 1 --seq-length {length} --ulysses-size {ranks} --global-batch-size {ranks} "
            f"--zero-stage {3 if ranks > 1 else 0} --train-iters 1 --lr 1e-4 --mock-data --eval-iters 0").split()


#: Layers of a 1.2B model (12 h^2 weights each) and of Llama-3-8B.
SHAPES = {"1.2B": Shape(2048, 16, 16, 5504, 50304), "8B": Shape(4096, 32, 8, 14336, 128256)}
#: The same at toy size, for the dry run on a CPU.
TOY_SHAPES = {"1.2B": Shape(64, 4, 4, 176, 512), "8B": Shape(64, 8, 2, 224, 512)}


def our_run(shape: Shape, layers: int, length: int, further: str, *, on_gpu: bool) -> Run:
    """Return our resolved run.

    Args:
        further: flags of techniques.
        on_gpu: compute in bf16 with NCCL, else in fp32 with gloo.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    backend = ["--bf16"] if on_gpu else ["--distributed-backend", "gloo"]
    run, _ = load_run([*shape.flags(layers, length, ranks), *further.split(), *backend], ranks)
    return with_vocab(run, shape.vocab)


def find_once(wanted: Wanted, device: torch.device) -> FlashSearch:
    """Return the fastest version of flash attention. The same trials are made only once in this program."""
    return find_flash_attention(wanted, device, attempt=lambda *task: _trials(json.dumps(task)))


@functools.cache
def _trials(task: str) -> dict[str, Outcome]:
    return try_in_children(*json.loads(task))


def our_step(run: Run, device: torch.device) -> Step:
    """Return a step of real training (``train.train_step``)."""
    mesh = ParallelMesh.build(run.parallel, device)
    kernels = choose_kernels(run, device, mesh.group("tp"), find=find_once)
    whole = TrainStep.build(run, build_model(run, mesh, kernels=kernels), mesh)
    length = run.data.seq_length
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, run.model.vocab_size, (1, length + 1), generator=generator)
    positions = torch.from_numpy(SequenceLayout.of(run).positions(mesh.rank("sp")))
    batch = Microbatch(text[:, positions].contiguous(), text[:, positions + 1].contiguous(), positions.unsqueeze(0),
                       torch.zeros(1, dtype=torch.int64), len(positions)).to(device)
    microbatches = [batch] * (run.train.global_batch_size // run.parallel.dp)

    def step() -> None:
        whole.train(microbatches, scheduler_samples=0)

    return step


def transformers_step(shape: Shape, layers: int, length: int, device: torch.device, recompute: bool) -> Step:
    """Return a step of a plain loop around transformers' Llama with FSDP2."""
    from transformers import LlamaConfig, LlamaForCausalLM

    restore_torchs_flash()  # a version that our run put in its place would compute this program's attention too
    config = LlamaConfig(hidden_size=shape.hidden, num_attention_heads=shape.heads, num_hidden_layers=layers,
                         num_key_value_heads=shape.kv_heads, intermediate_size=shape.ffn, vocab_size=shape.vocab,
                         max_position_embeddings=length, use_cache=False)
    config._attn_implementation = "sdpa"
    with device:
        model = LlamaForCausalLM(config)
    if recompute:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    model.train()
    return _fsdp_step(model, list(model.model.layers), lambda tokens: model(input_ids=tokens).logits, shape, length,
                      device)


def torchtitan_step(shape: Shape, layers: int, length: int, device: torch.device, recompute: bool) -> Step:
    """Return a step of a plain loop around torchtitan's Llama 3 with FSDP2.

    Raises:
        ImportError: torchtitan or a package that it needs is not installed, or it is another version.
    """
    restore_torchs_flash()
    llama, common = (importlib.import_module(f"torchtitan.models.{name}") for name in ("llama3", "common"))
    try:
        width = shape.hidden // shape.heads
        rope = llama.ComplexRoPE.Config(dim=width, max_seq_len=length, theta=500000)
        parts = llama._build_llama3_layers(n_layers=layers, dim=shape.hidden, n_heads=shape.heads,
                                           n_kv_heads=shape.kv_heads, hidden_dim=shape.ffn, rope=rope,
                                           attn_backend="varlen")
        config = llama.Llama3Model.Config(
            dim=shape.hidden, vocab_size=shape.vocab, layers=parts,
            tok_embeddings=common.Embedding.Config(num_embeddings=shape.vocab, embedding_dim=shape.hidden,
                                                   param_init=llama._EMBEDDING_INIT),
            norm=common.RMSNorm.Config(normalized_shape=shape.hidden, param_init=llama._NORM_INIT),
            lm_head=common.Linear.Config(in_features=shape.hidden, out_features=shape.vocab,
                                         param_init=llama._output_linear_init(shape.hidden)))
    except (AttributeError, TypeError) as error:
        raise ImportError(f"this torchtitan builds its models in another way ({error})") from None
    with device:
        model = config.build()
    model.init_states()
    for layer in model.layers.values():
        # torch's fused attention; torchtitan's own expects packed documents
        layer.attention.inner_attention = CausalAttention()
    if recompute:
        wrapper = importlib.import_module("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
        for name, layer in list(model.layers.items()):
            model.layers[name] = wrapper.checkpoint_wrapper(layer)
    return _fsdp_step(model, list(model.layers.values()), model, shape, length, device)


def _fsdp_step(model: nn.Module, layers: list[nn.Module], logits: Callable[[torch.Tensor], torch.Tensor], shape: Shape,
               length: int, device: torch.device) -> Step:
    """Return a training step of a model that FSDP2 shards: each layer, then the rest."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if (
        device.type == "cuda") else MixedPrecisionPolicy()
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    text = torch.randint(0, shape.vocab, (1, length + 1), generator=torch.Generator().manual_seed(1)).to(device)
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def step() -> None:
        F.cross_entropy(logits(tokens).flatten(0, 1).float(), labels.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


#: Other programs by name. Their arguments are shape, layers, length, device, and whether layers are recomputed.
OTHERS: dict[str, Callable[[Shape, int, int, torch.device, bool], Step]] = {
    "transformers + FSDP2": transformers_step, "torchtitan's model + FSDP2": torchtitan_step}

#: Kind of a kernel -> texts in the names of such kernels, in lower case. The first kind with a matching text is taken.
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("communication", ("nccl", "gloo", "all_gather", "reduce_scatter", "all_reduce", "all_to_all")),
    ("attention", ("flash", "fmha", "attention", "sdpa", "cudnn_generated")),
    ("matrix product", ("gemm", "nvjet", "cutlass", "cublas", "wgmma", "::mm", "::addmm", "::bmm", "::baddbmm")),
    ("copy", ("memcpy", "memset")))


def kind_of(name: str) -> str:
    """Return the kind of a kernel, or on a CPU of an operator, by its name; "other" for elementwise ones and the rest.
    """
    lower = name.lower()
    return next((kind for kind, parts in KINDS if any(part in lower for part in parts)), "other")


def shares(times: dict[str, float]) -> dict[str, float]:
    """Return the share of each kind in the time of all kernels.

    Args:
        times: time by the name of a kernel.
    """
    whole = sum(times.values())
    found = dict.fromkeys([*(kind for kind, _ in KINDS), "other"], 0.0)
    for name, time in times.items():
        found[kind_of(name)] += time / whole if whole else 0.0
    return found


def kernel_times(step: Step, device: torch.device) -> dict[str, float]:
    """Return the microseconds of each kernel of a step, on a CPU of each operator without those that it calls."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in profiler.key_averages():
        spent: Any = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        times[event.key] = times.get(event.key, 0.0) + float(spent)
    return {name: time for name, time in times.items() if time > 0}
