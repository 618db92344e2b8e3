"""Check that the copies of a weight are equal, bit by bit (``--check-replicas``).

Several ranks hold copies of the same weight: data- and sequence-parallel ranks (ZeRO stage 0, hybrid sharding), ranks
along ``tp`` (norms, biases, key/value heads that tp does not divide), and the first and last pipeline stage with tied
embeddings. The optimizer's moments have the same copies. Each rank hashes the bits of each copy to one number, and one
reduction for each group of ranks compares the numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_sp.errors import TrainingError
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.pipeline import Stages
from megatron_sp.train.optimizer import local_part

EMBEDDING = "embedding.word.weight"
#: Number of elements that are hashed at a time.
PIECE = 1 << 20
#: 2^64 / golden ratio as a signed number. Multiplied with it, neighbouring positions give very different numbers.
_GOLDEN = -7046029254386353131
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Copies(NamedTuple):
    """Hashes of the tensors of which every rank of one group has a copy.

    Attributes:
        axis: the kind of copies, as the error message names it.
        group: the ranks that hold a copy.
        hashes: this rank's hash of each tensor, by name.
    """

    axis: str
    group: dist.ProcessGroup
    hashes: dict[str, torch.Tensor]


def bit_hash(tensor: torch.Tensor) -> torch.Tensor:
    """Return a hash of all bits of a tensor, an int64 scalar. When exactly one element changes, so does the hash."""
    bits = tensor.detach().contiguous().reshape(-1).view(_BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), PIECE):
        piece = bits[start:start + PIECE].long()
        place = torch.arange(start, start + piece.numel(), device=piece.device) * _GOLDEN
        total += (piece * ((place ^ (place >> 29)) | 1)).sum()  # odd factors can be inverted modulo 2^64
    return total


def check_replicas(model: nn.Module, mesh: ParallelMesh, iteration: int,
                   optimizer: torch.optim.Optimizer | None = None) -> None:
    """Compare all copies of weights and optimizer moments. All ranks call it and get the same result.

    Raises:
        TrainingError: naming the first weights that differ and the ranks that hold them.
    """
    different = [(copies, names) for copies in _copies(model, mesh, optimizer)
                 if (names := _different(copies, mesh.device))]
    unlike_here = _tied_copies_here_differ(model)
    if not float(mesh.sum_over(float(len(different) + unlike_here), "world")):
        return
    own = {(copies.axis, tuple(dist.get_process_group_ranks(copies.group)), name): int(copies.hashes[name])
           for copies, names in different for name in names}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (own, unlike_here))
    found: dict[tuple[str, tuple[int, ...], str], dict[int, int]] = defaultdict(dict)
    for rank, (part, _) in enumerate(gathered):
        for key, value in part.items():
            found[key][rank] = value
    listed = [f"{name}: {_in_words(hashes)} ({axis})" for (axis, _, name), hashes in found.items()]
    listed += [f"{EMBEDDING}: its two tied copies on rank {rank} differ" for rank, (_, bad) in enumerate(gathered)
               if bad]
    more = f"; and {len(listed) - 5} more" if len(listed) > 5 else ""
    raise TrainingError(
        f"iteration {iteration}: --check-replicas found copies of weights that are not equal. {'; '.join(listed[:5])}"
        f"{more}. Nothing trained after the last check that passed can be trusted: look for a faulty device or memory, "
        "then go back to an earlier checkpoint with --ckpt-step")


def _with_moments(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each weight, then its optimizer states of the same shape, which are sharded and copied like the weight."""
    for name, p in model.named_parameters():
        yield name, p
        for key, value in (optimizer.state.get(p, {}) if optimizer is not None else {}).items():
            if isinstance(value, torch.Tensor) and value.shape == p.shape and value.ndim:
                yield f"{name} ({key})", value


def _copies(model: nn.Module, mesh: ParallelMesh, optimizer: torch.optim.Optimizer | None) -> Iterator[Copies]:
    """Yield this rank's tensors that have copies, grouped by the ranks that hold the copies.

    All ranks of a group yield in the same order, because the comparison of each item is a collective.
    """
    hashes: dict[str, torch.Tensor] = {}
    over: dict[str, tuple[dist.ProcessGroup, list[str]]] = {}
    for name, p in _with_moments(model, optimizer):
        names = (p.device_mesh.mesh_dim_names or ()) if isinstance(p, DTensor) else ()
        if "shard" not in names and mesh.size("fsdp") > 1:  # whole copies, outside FSDP
            hashes[name] = bit_hash(local_part(p))
            over.setdefault("replicate", (mesh.group("fsdp"), []))[1].append(name)
        if not isinstance(p, DTensor):
            continue
        for dim, (axis, place) in enumerate(zip(names, p.placements)):
            if place.is_replicate() and p.device_mesh.size(dim) > 1:
                if name not in hashes:
                    hashes[name] = bit_hash(local_part(p))
                over.setdefault(axis, (p.device_mesh.get_group(dim), []))[1].append(name)
    descriptions = {"tp": "copies over tensor-parallel ranks",
                    "replicate": "copies over data- and sequence-parallel ranks"}
    for axis in sorted(over):
        group, of_axis = over[axis]
        yield Copies(descriptions.get(axis, axis), group, {name: hashes[name] for name in of_axis})
    tied = model.tied if isinstance(model, Stages) else None
    if tied is not None and tied.group is not None:
        copy = tied.first if tied.first is not None else tied.last
        if copy is not None:
            yield Copies("tied copies at both ends of the pipeline", tied.group,
                         {EMBEDDING: bit_hash(local_part(copy))})


def _tied_copies_here_differ(model: nn.Module) -> bool:
    """Return whether this rank holds first and last stage of the pipeline, and their tied weights are not equal."""
    tied = model.tied if isinstance(model, Stages) else None
    if tied is None or tied.first is None or tied.last is None:
        return False
    return int(bit_hash(local_part(tied.first))) != int(bit_hash(local_part(tied.last)))


def _different(copies: Copies, device: torch.device) -> list[str]:
    """Return the names of the copies that are not equal within the group.

    Args:
        device: device of the group's collectives. Hashes of offloaded tensors are moved to it from host memory.
    """
    own = torch.stack([tensor_hash.to(device) for tensor_hash in copies.hashes.values()])
    # One MIN of x and ~x gives both extremes: the complement of the second result is the maximum of x. All hashes
    # are equal when minimum and maximum are.
    extremes = torch.stack([own, ~own])
    dist.all_reduce(extremes, dist.ReduceOp.MIN, group=copies.group)
    equal = extremes[0] == ~extremes[1]
    return [name for name, same in zip(copies.hashes, equal.tolist()) if not same]


def _in_words(hashes: dict[int, int]) -> str:
    """Return which ranks differ from the majority, such as "rank 3 differs from ranks 0, 1, 2"."""
    by_value: dict[int, list[int]] = defaultdict(list)
    for rank, value in sorted(hashes.items()):
        by_value[value].append(rank)
    usual, *others = sorted(by_value.values(), key=lambda ranks: (-len(ranks), ranks))
    verb = "differs" if sum(map(len, others)) == 1 else "differ"
    return f"{' and '.join(_ranks(ranks) for ranks in others)} {verb} from {_ranks(usual)}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
