"""Report what a run will do before it starts: layout, batch, FLOPs, communication, memory and step time.

``pretrain_gpt.py --dry-run`` prints it on a login node: it needs no torch, GPU, data, tokenizer or checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from megatron_sp.config.resolve import resolve, with_vocab
from megatron_sp.config.rules.checks import check_problems
from megatron_sp.config.schema import Run
from megatron_sp.layout.batch_size import BatchSize
from megatron_sp.layout.grid import Grid
from megatron_sp.layout.patterns.choice import seen_in_words
from megatron_sp.layout.schedules import stages_of_rank
from megatron_sp.layout.stages import stage_layers
from megatron_sp.layout.tiles import num_chunks
from megatron_sp.layout.tokens import SequenceLayout
from megatron_sp.plan.communication import Traffic, step_traffic
from megatron_sp.plan.devices import GIB, Device
from megatron_sp.plan.flops import repeats_of, sequence_flops
from megatron_sp.plan.memory import LABELS, MemoryPlan, predict
from megatron_sp.plan.sizes import Weights
from megatron_sp.plan.step_time import StepTime, predict_step_time

#: Largest numbers of nodes, and of ranks per node, that the picture shows.
NODES_SHOWN, RANKS_SHOWN = 4, 8


@dataclass(frozen=True)
class Report:
    """A plan of a run; ``text`` is for people, ``to_dict`` for programs."""

    run: Run
    device: Device
    devices_per_node: int
    memory: MemoryPlan
    time: StepTime
    traffic: list[Traffic]
    longest: int

    @property
    def host_at_longest(self) -> int:
        """Return the bytes of host memory that a process needs at the longest sequence that fits the device."""
        return predict(with_length(self.run, self.longest), device=self.device.kind).host if self.longest else 0

    @property
    def limited_by(self) -> str:
        """Return which memory limits the length, "device" or "host": the one that a longer sequence exceeds first."""
        longer = predict(with_length(self.run, self.longest * 17 // 16 + 1), device=self.device.kind)
        return "host" if longer.total <= self.device.memory and longer.host > self.device.host_memory else "device"

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is at most the memory of the device, and that of the host."""
        return self.device.holds(self.memory)

    @property
    def processes_per_node(self) -> int:
        """Return how many processes share a node's host memory."""
        return min(self.run.parallel.world_size, self.devices_per_node)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures by name, in bytes, seconds, tokens and FLOPs without prefixes such as giga."""
        run, parallel = self.run, self.run.parallel
        flops = sequence_flops(run.model, run.data.seq_length)
        iterations, samples = _length(run)
        return {
            "world_size": parallel.world_size, "nodes": -(-parallel.world_size // self.devices_per_node),
            "layout": {"tp": parallel.tp, "pp": parallel.pp, "dp": parallel.dp, "ulysses": parallel.ulysses,
                       "ring": parallel.ring, "zero_stage": parallel.zero_stage, "fsdp_size": parallel.fsdp_size},
            "layers_per_stage": [len(layers) for layers in stage_layers(run.model, parallel)],
            "parameters": parameters(run), "parameters_per_rank": _parameters_of_ranks(run),
            "batch": {"global": BatchSize.of(run).last, "micro": run.train.micro_batch_size,
                      "data_parallel": parallel.dp, "microbatches": _microbatches(run),
                      "tokens_per_rank": run.data.seq_length // parallel.sp, "chunks": num_chunks(run)},
            "iterations": iterations, "samples": samples, "tokens": samples * run.data.seq_length,
            "attention_counted": "causal half" + seen_in_words(run.model) + (
                ", as if each sequence were one document" if run.data.reset_attention_mask else ""),
            "flops_per_step": run.train.global_batch_size * flops.train(),
            "hardware_flops_per_step": run.train.global_batch_size * flops.train(repeats=repeats_of(run)),
            "communication": [{"axis": each.axis, "ranks": each.size, "bytes_per_step": round(each.sent),
                               "what": each.what} for each in self.traffic],
            "pipeline_bubble": self.time.bubble,
            "memory": {"device": self.device.name, "limit": self.device.memory, "peak": self.memory.total,
                       "host": self.memory.host, "host_limit": self.device.host_memory, "fits": self.fits,
                       "host_of_a_node": self.memory.host * self.processes_per_node, "moment": self.memory.moment,
                       "pipeline_rank": self.memory.rank, "components": self.memory.components},
            "longest_sequence_that_fits": self.longest, "host_at_longest_sequence": self.host_at_longest,
            "length_limited_by": self.limited_by,
            "step_time": {"seconds": self.time.total, "compute": self.time.compute, "exposed": self.time.exposed,
                          "host": self.time.host, "mfu": self.time.mfu},
        }

    def text(self) -> str:
        """Return the plan as lines for a terminal."""
        facts = self.to_dict()
        blocks = [_layout_lines(self), _batch_lines(facts), _work_lines(facts), _memory_lines(self),
                  _time_lines(self)]
        return "\n".join(line for block in blocks for line in block)


def plan_run(run: Run, device: Device, devices_per_node: int = 8) -> Report:
    """Return the plan of a resolved run with vocabulary sizes."""
    return Report(run, device, devices_per_node, predict(run, device=device.kind),
                  predict_step_time(run, device, devices_per_node), step_traffic(run), longest_sequence(run, device))


def longest_sequence(run: Run, device: Device, usable: float = 1.0) -> int:
    """Return the longest sequence, in tokens, whose predicted peak fits in this layout; 0 for none.

    Memory grows with the length, so the answer is found by bisection, among the lengths that the layout divides.

    Args:
        usable: share of the device's and of the host's memory that may be used.
    """
    step = SequenceLayout.of(with_length(run, run.memory.sequence_chunk_size or run.data.seq_length)).divisor
    step *= run.parallel.tp if run.parallel.megatron_sp else 1
    step *= max(1, 1024 // step)
    low, high = 0, 1

    def fits(multiple: int) -> bool:
        return device.holds(predict(with_length(run, multiple * step), device=device.kind), usable)

    while fits(high) and high < 1 << 24:
        low, high = high, 2 * high
    while high - low > max(1, low // 256):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * step


def with_length(run: Run, length: int) -> Run:
    """Return the run with another sequence length; learned positions grow with it."""
    return replace(run, data=replace(run.data, seq_length=length),
                   model=replace(run.model, max_position_embeddings=max(length, run.model.max_position_embeddings)))


def with_known_vocabulary(run: Run, fallback: int) -> Run:
    """Return the run with vocabulary sizes, from the flags or else this many tokens."""
    return with_vocab(run, run.model.vocab_size or fallback)


def is_valid(run: Run, world_size: int) -> bool:
    """Return whether a run passes all configuration checks."""
    return not check_problems(resolve(run, world_size))


def parameters(run: Run) -> int:
    """Return the number of parameters of the whole model, vocabulary padded."""
    one = replace(run, parallel=replace(run.parallel, tp=1, pp=1, ulysses=1, ring=1, megatron_sp=False))
    weights = Weights.of(one)
    return run.model.num_layers * weights.layer + weights.embedding + weights.output


def _parameters_of_ranks(run: Run) -> list[int]:
    """Return the parameters of each pipeline rank, in order, before ZeRO shards them."""
    weights, layers, parallel = Weights.of(run), stage_layers(run.model, run.parallel), run.parallel
    found = []
    for rank in range(parallel.pp):
        numbers = stages_of_rank(parallel.pipeline_schedule, parallel.pp, parallel.stages_per_rank, rank)
        total = sum(len(layers[number]) for number in numbers) * weights.layer
        total += weights.embedding if 0 in numbers else 0
        if len(layers) - 1 in numbers:
            total += weights.output + (weights.embedding if weights.is_tied and 0 not in numbers else 0)
        found.append(total)
    return found


def _microbatches(run: Run) -> int:
    return max(1, BatchSize.of(run).last // max(1, run.train.micro_batch_size * run.parallel.dp))


def _length(run: Run) -> tuple[int, int]:
    """Return the iterations and samples of the whole run."""
    sizes = BatchSize.of(run)
    if run.train.train_samples:
        return sizes.iterations(0, run.train.train_samples), run.train.train_samples
    return run.train.train_iters, sizes.samples(run.train.train_iters)


def _readable(size: float) -> str:
    """Return bytes in MiB or GiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{math.ceil(size / 2**20)} MiB"


def _layout_lines(report: Report) -> list[str]:
    run, parallel = report.run, report.run.parallel
    degrees = {"data parallel": parallel.dp, "pipeline": parallel.pp, "ring": parallel.ring,
               "Ulysses": parallel.ulysses, "tensor": parallel.tp}
    layers = [len(stage) for stage in stage_layers(run.model, parallel)]
    each = _parameters_of_ranks(run)
    least, most = (f"{size / 1e9:.3f}" for size in (min(each), max(each)))
    shown = f"{least} B" if least == most else f"{least} to {most} B"
    return [f"layout: {parallel.world_size} ranks = " + " x ".join(f"{name} {size}" for name, size in degrees.items())
            + f"; ZeRO stage {parallel.zero_stage}", *_picture(report),
            f"model: {parameters(run) / 1e9:.3f} B parameters, {shown} per rank before sharding; "
            + (f"layers per stage {' '.join(map(str, layers))}" if len(layers) > 1 else f"{layers[0]} layers")]


def _picture(report: Report) -> list[str]:
    """Draw the ranks of the first nodes, each with its place on the axes that have more than one rank."""
    parallel, per_node = report.run.parallel, report.devices_per_node
    grid, names = Grid(parallel), {"pp": "p", "dp": "d", "ring": "r", "ulysses": "u", "tp": "t"}
    used = [axis for axis in names if getattr(parallel, axis) > 1]
    if not used:
        return []
    lines = []
    for node in range(min(NODES_SHOWN, -(-parallel.world_size // per_node))):
        ranks = range(node * per_node, min((node + 1) * per_node, parallel.world_size))
        places = [grid.coordinates(rank) for rank in ranks[:RANKS_SHOWN]]
        cells = ["".join(f"{names[axis]}{place[axis]}" for axis in used) for place in places]
        lines.append(f"  node {node}: [ " + " | ".join(cells) + (" | ..." if len(ranks) > RANKS_SHOWN else "") + " ]")
    if parallel.world_size > NODES_SHOWN * per_node:
        lines.append(f"  ... {-(-parallel.world_size // per_node)} nodes of {per_node}")
    legend = ", ".join(f"{names[axis]} {word}" for axis, word in (
        ("pp", "pipeline"), ("dp", "data"), ("ring", "ring"), ("ulysses", "Ulysses"), ("tp", "tensor")) if axis in used)
    return [*lines, f"  ({legend})"]


def _batch_lines(facts: dict[str, Any]) -> list[str]:
    batch = facts["batch"]
    return [f"batch: {batch['global']} sequences = micro-batch {batch['micro']} x data parallel "
            f"{batch['data_parallel']} x {batch['microbatches']} microbatches; {batch['tokens_per_rank']:,} tokens of "
            "each sequence per rank" + (f", in {batch['chunks']} chunks" if batch["chunks"] > 1 else ""),
            f"length: {facts['iterations']:,} steps, {facts['samples']:,} samples, {facts['tokens']:,} tokens"]


def _work_lines(facts: dict[str, Any]) -> list[str]:
    lines = [f"work: {facts['flops_per_step'] / 1e15:.3g} PFLOP per step (attention: {facts['attention_counted']}), "
             f"{facts['hardware_flops_per_step'] / 1e15:.3g} with recomputation"]
    for each in facts["communication"]:
        lines.append(f"communication over {each['axis']} ({each['ranks']} ranks): {_readable(each['bytes_per_step'])} "
                     f"sent per rank and step: {each['what']}")
    if facts["pipeline_bubble"]:
        lines.append(f"pipeline bubble: {100 * facts['pipeline_bubble']:.1f}% of the step")
    return lines


def _memory_lines(report: Report) -> list[str]:
    memory, device = report.memory, report.device
    verdict = "fits" if report.fits else "does NOT fit"
    lines = [f"memory: {_readable(memory.total)} of {device.memory / GIB:.1f} GiB ({device.name}): {verdict}; the "
             f"peak is at the {memory.moment}"
             + (f" on pipeline rank {memory.rank}" if report.run.parallel.pp > 1 else "")]
    lines += [f"  {LABELS.get(name, name) + ' ':.<26} {_readable(size)}"
              for name, size in memory.components.items() if size]
    if memory.host:
        lines.append(_host_line(report))
    return [*lines, _longest_line(report)]


def _host_line(report: Report) -> str:
    """Return what a process and a node hold in host memory, and how much the node has."""
    host, processes = report.memory.host, report.processes_per_node
    line = f"  {'in host memory ':.<26} {_readable(host)}"
    if report.device.kind == "cpu":
        return f"{line} more of the same memory"
    node = f"{_readable(processes * host)} on a node of {processes}; " if processes > 1 else ""
    verdict = "fits" if host <= report.device.host_memory else "does NOT fit"
    return f"{line} a process, {node}{verdict} {_readable(processes * report.device.host_memory)} a node"


def _longest_line(report: Report) -> str:
    """Return the longest sequence of the layout, and whether it is the host that limits it."""
    host = report.host_at_longest
    return (f"longest sequence that fits in this layout: {report.longest:,} tokens"
            + (f", with {_readable(host)} of host memory a process" if host else "")
            + (", which is what limits it" if host and report.limited_by == "host" else ""))


def _time_lines(report: Report) -> list[str]:
    time = report.time
    parts = [f"compute {time.compute:.3g} s", *(f"{axis} {seconds:.2g} s" for axis, seconds in time.exposed.items()
                                                if seconds > 0), *([f"host {time.host:.2g} s"] if time.host else [])]
    return [f"step time (estimate, see docs): {time.total:.3g} s = {' + '.join(parts)}"
            + (f", / (1 - {time.bubble:.2f}) for the bubble" if time.bubble else "") + f"; MFU {100 * time.mfu:.0f}%"]
