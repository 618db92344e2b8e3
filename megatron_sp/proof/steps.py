"""One training step in any layout, with whole gradients, and the same step by the reference."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_sp.config.schema import Run
from megatron_sp.data.batch import Microbatch
from megatron_sp.data.sampler import GlobalBatchSampler
from megatron_sp.model.build import build_model
from megatron_sp.parallel.layout import SequenceLayout
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.pipeline import Stages
from megatron_sp.train.forward_backward import build_engine
from megatron_sp.train.optimizer import clip_grad_norm
from tests.helpers.reference import Weights, reference_loss

# Gathering whole tensors is slow and meant to be: torch need not say so for every parameter.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

#: Gradients below this share of the model's largest one are compared with that share instead of with themselves.
FLOOR = 1e-3


@dataclass
class Step:
    """What one forward and backward pass over a global batch gives."""

    loss: float  # nats per valid token
    grad_norm: float
    gradients: Weights  # full tensors, vocabulary trimmed


def batch(run: Run, masked: str = "nothing", seed: int = 7) -> tuple[Tensor, Tensor]:
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


def step_in_layout(run: Run, weights: Weights, tokens: Tensor, labels: Tensor) -> Step:
    """On a rank: the step with the framework's model, in the type of ``weights``. Equal on every rank."""
    mesh = ParallelMesh.build(run.parallel)
    model = build_model(run, mesh, dtype=next(iter(weights.values())).dtype)
    load_full(model, weights)
    microbatches = local_microbatches(run, mesh, tokens, labels)
    num_tokens = mesh.sum_over(torch.tensor(float(sum(m.num_valid for m in microbatches))), "fsdp")
    loss = mesh.sum_over(build_engine(run, model, mesh).forward_backward(microbatches, num_tokens), "fsdp", "pp")
    grad_norm = clip_grad_norm(model, 0.0, mesh)
    gradients = {name: gather_full(name, parameter.grad, run) for name, parameter in named(model)}
    stages: list[Weights] = [{} for _ in range(mesh.size("pp"))]
    dist.all_gather_object(stages, gradients, mesh.group("pp"))
    whole: Weights = {}
    for stage in stages:
        for name, gradient in stage.items():
            assert name not in whole or torch.equal(whole[name], gradient), f"the copies of {name} differ"
            whole[name] = gradient
    return Step(float(loss), float(grad_norm), whole)


def reference_step(run: Run, weights: Weights, tokens: Tensor, labels: Tensor) -> Step:
    """The same step by the plain model."""
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    loss_sum, count = reference_loss(leaves, run, tokens, labels)
    loss = loss_sum / count
    loss.backward()
    gradients = {}
    for name, leaf in leaves.items():
        assert leaf.grad is not None, f"{name} takes no part in the reference"
        gradients[name] = leaf.grad
    norm = sum(float(grad.square().sum()) for grad in gradients.values()) ** 0.5
    return Step(float(loss.detach()), norm, gradients)


def differences(step: Step, expected: Step) -> dict[str, float]:
    """Relative difference of the loss, the gradient norm and of every gradient (largest element).

    A gradient of the wrong shape, a missing one and one too many count as infinitely different.
    """
    largest = max(float(grad.abs().max()) for grad in expected.gradients.values())
    found = {"loss": abs(step.loss / expected.loss - 1), "grad_norm": abs(step.grad_norm / expected.grad_norm - 1)}
    for name in step.gradients.keys() | expected.gradients.keys():
        ours, theirs = step.gradients.get(name), expected.gradients.get(name)
        if ours is None or theirs is None or ours.shape != theirs.shape:
            found[name] = float("inf")
            continue
        scale = max(float(theirs.abs().max()), FLOOR * largest)
        difference = float((ours - theirs).abs().max()) / scale
        found[name] = difference if difference == difference else float("inf")  # NaN
    return found


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
            assert isinstance(parameter, DTensor), f"{name} is not stored as a DTensor"
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
    assert isinstance(tensor, DTensor)
    full = tensor.full_tensor().detach()
    if name in ("embedding.word.weight", "output.weight"):
        assert not full[run.model.vocab_size:].any(), "padding of the vocabulary is not 0"
        full = full[:run.model.vocab_size]
    return full.clone()
