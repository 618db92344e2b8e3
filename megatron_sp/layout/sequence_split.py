"""How ``--sequence-split N`` divides N ranks into a Ulysses size and a ring size. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_sp.config.schema import Model, Parallel

#: Devices per node where neither the launcher nor the command line says how many there are.
DEVICES_PER_NODE = 8


@dataclass(frozen=True)
class SequenceSplit:
    """A Ulysses size and a ring size, and in ``why`` one sentence with the reason for them."""

    ulysses: int
    ring: int
    why: str


def split_sequence(size: int, *, heads: int, kv_heads: int, tp: int, devices_per_node: int) -> SequenceSplit:
    """Choose the largest Ulysses size that is cheap, and a ring for the remaining factor.

    Ulysses uses the usual attention kernels. But every rank needs a head, computation waits for the all-to-all, and a
    key/value head that several ranks need is sent to each of them. So the Ulysses size is the largest divisor of
    ``size`` that meets three conditions. It divides the query heads of a tensor-parallel rank. Its ranks times the
    tensor-parallel ranks fit into one node. And no key/value head has to be copied. A ring sends to one neighbour while
    it computes, so the ring is the axis that crosses nodes.

    Args:
        size: ranks that share one sequence.
        heads, kv_heads: query and key/value heads of the model.
        tp: tensor-parallel size.
        devices_per_node: ranks with fast links between them.
    """
    own, own_kv = max(1, heads // tp), max(1, kv_heads // tp)
    room = max(1, devices_per_node // tp)
    limits = [
        (lambda u: size % u == 0, ""),
        (lambda u: own % u == 0, f"it must divide the {own} query heads per tensor-parallel rank"),
        (lambda u: u <= room, f"with tensor parallelism {tp} only {room} fit into a node of {devices_per_node}"),
        (lambda u: own_kv % u == 0, f"more would copy the {own_kv} key/value heads per tensor-parallel rank"),
    ]
    found, reasons = list(range(size, 0, -1)), list[str]()
    for holds, reason in limits:
        fewer = [u for u in found if holds(u)]
        if fewer[0] != found[0] and reason:
            reasons.append(reason)
        found = fewer
    ulysses = found[0]
    ring = size // ulysses
    if ring == 1:
        why = "every rank gets whole heads inside one node"
    else:
        why = f"Ulysses is at most {ulysses} here ({'; '.join(reasons)}), the ring takes the rest"
    return SequenceSplit(ulysses, ring, why)


def split_of(parallel: Parallel, model: Model) -> SequenceSplit | None:
    """Return the split that ``--sequence-split`` asks for; None without it, or where the heads are not known."""
    if parallel.sequence_split < 1 or min(model.num_attention_heads, model.num_query_groups, parallel.tp) < 1:
        return None
    return split_sequence(parallel.sequence_split, heads=model.num_attention_heads, kv_heads=model.num_query_groups,
                          tp=parallel.tp, devices_per_node=parallel.devices_per_node or DEVICES_PER_NODE)


def with_split(parallel: Parallel, model: Model) -> Parallel:
    """Return the section with ``ulysses`` and ``ring`` filled in, unless the user gave them."""
    split = split_of(parallel, model)
    if split is None or parallel.sp > 1:
        return parallel
    return replace(parallel, ulysses=split.ulysses, ring=split.ring)


def split_problem(parallel: Parallel) -> str:
    """Return a sentence for the user when the split contradicts ``--ulysses-size`` or ``--ring-size``, else ""."""
    if parallel.sequence_split in (0, parallel.sp) or parallel.sp < 1:
        return ""
    return (f"--sequence-split {parallel.sequence_split} chooses both sizes, but --ulysses-size {parallel.ulysses} x "
            f"--ring-size {parallel.ring} = {parallel.sp} are given; leave out the one or the others.")


def split_note(parallel: Parallel, model: Model) -> str:
    """Return a sentence that says which split was chosen and why; "" when none was chosen."""
    split = split_of(parallel, model)
    if split is None or (split.ulysses, split.ring) != (parallel.ulysses, parallel.ring):
        return ""
    return (f"--sequence-split {parallel.sequence_split}: --ulysses-size {split.ulysses}, --ring-size {split.ring}; "
            f"{split.why}.")
