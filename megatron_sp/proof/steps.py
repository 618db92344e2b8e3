"""Training steps in any layout, with whole gradients and weights, and their comparison with the plain model's."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_sp.config.schema import Run
from megatron_sp.data.batch import Microbatch
from megatron_sp.data.sampler import GlobalBatchSampler
from megatron_sp.layout.tokens import SequenceLayout
from megatron_sp.model.build import build_model
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.pipeline import Stages
from megatron_sp.proof.reference import Batch, Drop, Step, Weights, keep_all, reference_training
from megatron_sp.train.forward_backward import build_engine
from megatron_sp.train.optimizer import build_optimizer, clip_factor, clip_grad_norm, scale_gradients

# Gathering whole tensors is slow and meant to be: torch need not say so for every parameter.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

#: Makes a model: ``build_model`` or, to prove that the proof works, something that goes wrong.
Build = Callable[..., nn.Module]

#: Gradients below this share of the model's largest one are compared with that share instead of with themselves.
FLOOR = 1e-3


def batch(run: Run, masked: str = "nothing", seed: int = 7) -> Batch:
    """A global batch of random tokens and their labels, each ``[B, s]`` int64.

    Args:
        masked: which labels are -100. ``nothing``; ``eod``: predictions from a token 0; ``late half``: the second
            half of each sequence (whole shards at sp 2 and 4); ``a sample``: every second sequence; ``all but one``:
            all labels but one; ``ragged``: a different number in each sequence, at random.
    """
    size, length = run.train.global_batch_size, run.data.seq_length
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, run.model.vocab_size, (size, length + 1), generator=generator)
    if masked == "eod":
        text[torch.rand(text.shape, generator=generator) < 0.2] = 0
    tokens, labels = text[:, :-1].clone(), text[:, 1:].clone()
    hidden = torch.zeros(size, length, dtype=torch.bool)
    if masked == "eod":
        hidden = tokens == 0
    elif masked == "late half":
        hidden[:, length // 2:] = True
    elif masked == "a sample":
        hidden[1::2] = True
    elif masked == "all but one":
        hidden[:] = True
        hidden[-1, length // 2 + 1] = False
    elif masked == "ragged":
        hidden = torch.rand(size, length, generator=generator) < torch.linspace(0.1, 0.9, size).unsqueeze(1)
    else:
        assert masked == "nothing", masked
    return tokens, labels.masked_fill(hidden, -100)


def local_microbatches(run: Run, mesh: ParallelMesh, tokens: Tensor, labels: Tensor) -> list[Microbatch]:
    """This rank's share of a global batch."""
    layout = SequenceLayout.of(run.parallel, run.data.seq_length)
    positions = torch.from_numpy(np.asarray(layout.positions(mesh.rank("sp"))))  # [s/sp]
    shares = GlobalBatchSampler.microbatches(0, len(tokens), run.train.micro_batch_size, mesh.rank("dp"),
                                             mesh.size("dp"))
    microbatches = []
    for ids in shares:
        mine = labels[ids][:, positions]
        microbatches.append(Microbatch(
            tokens=tokens[ids][:, positions], labels=mine, positions=positions.expand(len(ids), -1).contiguous(),
            sample_ids=torch.tensor(ids), num_valid=int((mine != -100).sum())))
    return microbatches


def train_in_layout(run: Run, weights: Weights, batches: Sequence[Batch], *, build: Build = build_model,
                    mesh: ParallelMesh | None = None, details: bool = True) -> list[Step]:
    """On a rank: one training step per batch with the framework's model, in the type of ``weights``.

    The learning rate stays at its peak. Equal on every rank.

    Args:
        build: makes the model; default: as every program does.
        mesh: of ``run.parallel``; default: made here.
        details: also whole gradients, and whole weights after each step; else weights of the last step only.
    """
    mesh = mesh or ParallelMesh.build(run.parallel)
    model = build(run, mesh, dtype=next(iter(weights.values())).dtype)
    load_full(model, weights)
    engine, optimizer = build_engine(run, model, mesh), build_optimizer(run, model)
    steps = []
    for number, (tokens, labels) in enumerate(batches, start=1):
        microbatches = local_microbatches(run, mesh, tokens, labels)
        num_tokens = mesh.sum_over(torch.tensor(float(sum(m.num_valid for m in microbatches))), "fsdp")
        loss = mesh.sum_over(engine.forward_backward(microbatches, num_tokens), "fsdp", "pp")
        norm = clip_grad_norm(model, 0.0, mesh)
        gradients = whole_tensors(run, model, mesh, lambda parameter: parameter.grad) if details else {}
        scale_gradients(model, clip_factor(float(norm), run.optimizer.clip_grad))
        optimizer.step()
        optimizer.zero_grad()
        wanted = details or number == len(batches)
        after = whole_tensors(run, model, mesh, lambda parameter: parameter) if wanted else {}
        steps.append(Step(float(loss), float(norm), gradients, after))
    return steps


def step_in_layout(run: Run, weights: Weights, tokens: Tensor, labels: Tensor, *, build: Build = build_model,
                   mesh: ParallelMesh | None = None) -> Step:
    """On a rank: forward and backward of one global batch, without an update. Equal on every rank."""
    mesh = mesh or ParallelMesh.build(run.parallel)
    model = build(run, mesh, dtype=next(iter(weights.values())).dtype)
    load_full(model, weights)
    microbatches = local_microbatches(run, mesh, tokens, labels)
    num_tokens = mesh.sum_over(torch.tensor(float(sum(m.num_valid for m in microbatches))), "fsdp")
    loss = mesh.sum_over(build_engine(run, model, mesh).forward_backward(microbatches, num_tokens), "fsdp", "pp")
    norm = clip_grad_norm(model, 0.0, mesh)
    return Step(float(loss), float(norm), whole_tensors(run, model, mesh, lambda parameter: parameter.grad))


def whole_tensors(run: Run, model: nn.Module, mesh: ParallelMesh,
                  of: Callable[[nn.Parameter], Tensor | None]) -> Weights:
    """``of`` every parameter in full, from all stages, by logical name; NaN where copies of a tied weight differ."""
    mine = [(name, gather_full(name, of(parameter), run)) for name, parameter in named(model)]
    stages: list[list[tuple[str, Tensor]]] = [mine]
    if mesh.size("pp") > 1:
        stages = [[] for _ in range(mesh.size("pp"))]
        dist.all_gather_object(stages, mine, mesh.group("pp"))
    whole: Weights = {}
    for name, tensor in (pair for stage in stages for pair in stage):
        same = name not in whole or torch.equal(whole[name], tensor)
        whole[name] = tensor if same else torch.full_like(tensor, math.nan)
    return whole


def reference_step(run: Run, weights: Weights, tokens: Tensor, labels: Tensor, drop: Drop = keep_all) -> Step:
    """The same step by the plain model."""
    return reference_training(weights, run, [(tokens, labels)], drop)[0]


def differences(step: Step, expected: Step) -> dict[str, float]:
    """Relative difference of the loss, the gradient norm and of every gradient (largest element).

    A gradient of the wrong shape, a missing one and one too many count as infinitely different.
    """
    found = {"loss": abs(step.loss / expected.loss - 1), "grad_norm": abs(step.grad_norm / expected.grad_norm - 1)}
    return {name: _finite(value) for name, value in found.items()} | tensor_differences(step.gradients,
                                                                                       expected.gradients)


def tensor_differences(ours: Weights, theirs: Weights) -> dict[str, float]:
    """Largest difference of each tensor over its largest element (or over ``FLOOR`` of the largest of all)."""
    largest = max(float(tensor.abs().max()) for tensor in theirs.values())
    found = {}
    for name in ours.keys() | theirs.keys():
        mine, want = ours.get(name), theirs.get(name)
        if mine is None or want is None or mine.shape != want.shape:
            found[name] = math.inf
            continue
        scale = max(float(want.abs().max()), FLOOR * largest)
        found[name] = _finite(float((mine - want).abs().max()) / scale)
    return found


def _finite(difference: float) -> float:
    """NaN counts as infinitely different."""
    return difference if difference == difference else math.inf


def named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by their logical names: a second copy of the tied embedding has the first one's."""
    copy = model.tied.last if isinstance(model, Stages) and model.tied is not None else None
    for name, parameter in model.named_parameters():
        yield "embedding.word.weight" if parameter is copy else name, parameter


def load_full(model: nn.Module, weights: Weights) -> None:
    """Set every parameter to its part of a full tensor, whatever its sharding; padding rows become 0.

    Which part a rank holds is found by writing numbers into the shards and gathering them, so that
    no rule about the layout is repeated here.
    """
    parameters = list(named(model))
    names = {name for name, _ in parameters}
    assert names <= weights.keys() if isinstance(model, Stages) else names == weights.keys(), names ^ weights.keys()
    rank = dist.get_rank()
    with torch.no_grad():
        for name, parameter in parameters:
            full = torch.zeros(parameter.shape, dtype=parameter.dtype)
            assert full.shape[1:] == weights[name].shape[1:], name
            full[:len(weights[name])] = weights[name]
            if not isinstance(parameter, DTensor):
                parameter.copy_(full)
                continue
            local = parameter.to_local()
            local.copy_(torch.arange(local.numel()).view(local.shape) + rank * full.numel())
            places = parameter.full_tensor().long() - rank * full.numel()  # exact: tests stay far below 2^24
            mine = (places >= 0) & (places < full.numel())
            values = torch.full((local.numel(),), float("nan"), dtype=full.dtype)
            values[places[mine]] = full[mine]
            local.copy_(values.view(local.shape))


def gather_full(name: str, tensor: Tensor | None, run: Run) -> Tensor:
    """The parameter of this name or its gradient, in full, without the padding of the vocabulary.

    Raises:
        AssertionError: padding rows are not 0.
    """
    assert tensor is not None, name
    full = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
    if name in ("embedding.word.weight", "output.weight"):
        assert not full[run.model.vocab_size:].any(), "padding of the vocabulary is not 0"
        full = full[:run.model.vocab_size]
    return full.clone()
