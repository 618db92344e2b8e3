"""The combinations of memory techniques that a plan tries, and the cheapest one that fits.

A combination's cost is its predicted step time; of combinations that cost the same, the one with fewer techniques comes
first. ``tools/plan.py`` asks for each layout, ``--memory-efficiency auto`` for the layout of the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_sp.config.rules.checks import check_problems
from megatron_sp.config.rules.memory import check_chunks, check_memory
from megatron_sp.config.schema import Memory, Run
from megatron_sp.layout.stages import stage_layers
from megatron_sp.plan.devices import Device
from megatron_sp.plan.memory import MemoryPlan, predict
from megatron_sp.plan.step_time import StepTime, predict_step_time

#: Share of a device's and of the host's memory that a plan may use: the rest is left to fragmentation and libraries.
USABLE = 0.92
#: Tokens of a tile of the feed-forward layer. More do not make a device faster.
MLP_TILE = {"gpu": 8192, "cpu": 1024}
#: Tokens per rank of a chunk of the sequence. Fewer would not keep a device busy.
CHUNK_TOKENS = {"gpu": (65536, 32768, 16384, 8192), "cpu": (8192, 4096, 2048, 1024, 512)}

#: The fields that turn techniques on, each with its flag, in the order in which messages list them.
FLAGS = {"recompute_granularity": "--recompute-granularity", "recompute_method": "--recompute-method",
         "recompute_num_layers": "--recompute-num-layers", "mlp_tile_size": "--mlp-tile-size",
         "attention_head_groups": "--attention-head-groups", "sequence_chunk_size": "--sequence-chunk-size",
         "offload_key_values": "--offload-key-values", "offload_activations": "--offload-activations",
         "offload_optimizer": "--offload-optimizer"}


@dataclass(frozen=True)
class Fit:
    """A run with memory techniques that fits its devices, and what is predicted for it."""

    run: Run
    memory: MemoryPlan
    time: StepTime


def technique_flags(memory: Memory) -> list[str]:
    """Return the command-line arguments that turn on the techniques of a run."""
    words: list[str] = []
    for name, flag in FLAGS.items():
        value = getattr(memory, name)
        if value == getattr(Memory(), name):
            continue
        words += [flag] if value is True or value == 1.0 and name == "offload_activations" else [flag, f"{value:g}" if (
            isinstance(value, float)) else str(value)]
    return words


def count(memory: Memory) -> int:
    """Return how many techniques are on."""
    return sum(getattr(memory, name) != getattr(Memory(), name) for name in FLAGS)


def cheapest(run: Run, device: Device, devices_per_node: int) -> Fit | None:
    """Return the run with the techniques that fit the device at the least predicted cost; None where none fits.

    Args:
        run: a resolved run with known vocabulary sizes. The techniques that ``memory.given`` names stay as they are.
    """
    priced = [(predict_step_time(tried, device, devices_per_node), tried) for tried in combinations(run, device.kind)]
    shortest = min((time.total for time, _ in priced), default=0.0)
    priced.sort(key=lambda each: _order(each, shortest))
    fitting = (Fit(tried, memory, time) for time, tried in priced
               if device.holds(memory := predict(tried, device=device.kind), USABLE)
               and not check_problems(tried, True))
    best = next(fitting, None)
    if best is None:
        return None
    fits = [best, *_recomputing_fewer_layers(priced, best, device, devices_per_node)]
    return min(fits, key=lambda fit: _order((fit.time, fit.run), shortest))


def combinations(run: Run, kind: str, *, any_length: bool = False) -> list[Run]:
    """Return the run with each combination of techniques that its rules allow.

    Args:
        kind: "gpu" or "cpu". On a CPU no technique moves anything to the host, which is the same memory.
        any_length: the length of the sequence is still open, so that no size of a chunk has to divide it.
    """
    memory = run.memory
    chosen = [*_whole_sequence(kind), *_in_chunks(kind, _chunk_sizes(run, kind, any_length))]
    if kind == "gpu":
        chosen += [each | {"offload_optimizer": True} for each in chosen]
    tried = dict.fromkeys(replace(memory, **{name: value for name, value in each.items() if name not in memory.given})
                          for each in chosen)
    runs = (replace(run, memory=each) for each in tried)
    return [each for each in runs if not check_memory(each) and (any_length or not check_chunks(each))]


def _whole_sequence(kind: str) -> Iterator[dict[str, Any]]:
    """Yield combinations without chunks.

    Head groups are tried only together with the techniques before them in the list, because alone they do not pay.
    """
    tile, host = {"mlp_tile_size": MLP_TILE[kind]}, {"offload_activations": 1.0}
    yield from ({}, tile)
    for granularity in ("selective", "full"):
        recomputed: dict[str, Any] = {"recompute_granularity": granularity}
        yield from (recomputed, recomputed | tile)
        if kind == "gpu":
            yield from (recomputed | host, recomputed | tile | host)
    grouped = recomputed | tile | {"attention_head_groups": 2}
    yield from (grouped, grouped | host) if kind == "gpu" else (grouped,)


def _in_chunks(kind: str, sizes: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Yield combinations with chunks. A smaller chunk saves what tiles and offload inside a chunk would."""
    for size in sizes:
        for granularity in ("", "selective", "full"):
            chunks: dict[str, Any] = {"sequence_chunk_size": size, "recompute_granularity": granularity}
            yield chunks
            if kind == "gpu":
                yield chunks | {"offload_key_values": True}


def _chunk_sizes(run: Run, kind: str, any_length: bool) -> tuple[int, ...]:
    """Return sizes of chunks, the largest first: ``CHUNK_TOKENS`` for each rank, or a little less to divide the length.
    """
    if run.parallel.ring > 1:
        return ()
    if run.memory.sequence_chunk_size:
        return (run.memory.sequence_chunk_size,)
    length, found = run.data.seq_length, []
    for tokens in CHUNK_TOKENS[kind]:
        most = tokens * run.parallel.ulysses
        if any_length:
            found.append(most)
            continue
        fewest = max(2, -(-length // most))
        divisor = next((number for number in range(fewest, 2 * fewest + 1) if length % number == 0), 0)
        found += [length // divisor] if divisor else []
    return tuple(dict.fromkeys(found))


def _order(priced: tuple[StepTime, Run], shortest: float) -> tuple[float, int, int]:
    """Return the sort key of a candidate: step time in steps of 0.1% of the shortest, number of techniques, chunks.

    So of equally fast candidates the one with fewer techniques comes first, then the one with larger chunks.
    """
    time, run = priced
    return (round(time.total / max(shortest, 1e-9), 3), count(run.memory), -run.memory.sequence_chunk_size)


def _recomputing_fewer_layers(priced: list[tuple[StepTime, Run]], best: Fit, device: Device,
                              devices_per_node: int) -> Iterator[Fit]:
    """Yield fits in which only the first layers of each stage are recomputed: as few as fit the device."""
    if {"recompute_method", "recompute_num_layers"} & set(best.run.memory.given):
        return
    layers = max(len(stage) for stage in stage_layers(best.run.model, best.run.parallel))
    for _, run in priced:
        memory = run.memory
        if not memory.recompute_granularity or memory.offload_activations or memory.sequence_chunk_size or (
                memory.attention_head_groups > 1):
            continue
        low, high, found = 0, layers, None
        while high - low > 1:
            middle = (low + high) // 2
            tried = replace(run, memory=replace(memory, recompute_method="block", recompute_num_layers=middle))
            if device.holds(plan := predict(tried, device=device.kind), USABLE):
                high, found = middle, (tried, plan)
            else:
                low = middle
        if found and not check_problems(found[0], True):
            yield Fit(*found, predict_step_time(found[0], device, devices_per_node))
