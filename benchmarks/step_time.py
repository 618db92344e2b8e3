#!/usr/bin/env python3
"""Compare time and memory of a training step: a plain PyTorch loop, megatron_sp on one process, and on two by Ulysses.

    python benchmarks/step_time.py --seq-lengths 2048 8192

The three programs ("plain", "ours" and "ours, ulysses 2") take turns making steps, so that other work on the machine
slows them equally. Their medians are compared. A step is forward, backward, clipping and fused AdamW in fp32, on
always the same batch of one sequence. Each program has its own processes, of one thread each, which sleep while another
program is measured. A process spins for a moment before its step: two processes that have just been woken may share a
core at first, which does not happen within a training.

The table shows the wall-clock time and the processor time of the slowest process. On an idle machine the two agree. On
a machine with other work the processor time varies less.

The exit status is 1 if a ratio misses its goal (``--goal-one``, ``--goal-split``), by wall-clock time or, with
``--by-cpu-time``, by processor time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_sp.output_files import write_json  # noqa: E402
from megatron_sp.runtime import run_program  # noqa: E402

AWAKE = 0.1  # seconds to spin before a step
SHAPE = dict(layers=4, hidden=256, heads=8, ffn=688, vocab=8192)


class Measured(NamedTuple):
    """The measurements of one step of a process."""

    wall: float  # seconds
    cpu: float   # seconds of processor time, all threads
    loss: float


def peak_megabytes() -> float:
    """Return the peak resident memory of this process so far, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB, on macOS bytes
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def plain_step(length: int) -> Callable[[], float]:
    """Return a function that makes one step of the plain PyTorch loop and returns the loss."""
    from benchmarks.plain_model import PlainModel, make_step

    tokens, labels = batch(length)
    return make_step(PlainModel(**SHAPE, seq_length=length), tokens, labels)


def batch(length: int) -> tuple[Any, Any]:
    """Return random tokens and their labels for one sequence, ``[1, s]`` each."""
    import torch

    text = torch.randint(0, SHAPE["vocab"], (1, length + 1), generator=torch.Generator().manual_seed(1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def our_step(length: int, rank: int, world: int, zero_stage: int, store: str) -> Callable[[], float]:
    """Return a function that makes one step of real training (``train.train_step``) on the same batch."""
    import torch
    import torch.distributed as dist

    from megatron_sp.config.load import load_run
    from megatron_sp.config.resolve import with_vocab
    from megatron_sp.data.batch import Microbatch
    from megatron_sp.layout.tokens import SequenceLayout
    from megatron_sp.model.build import build_model
    from megatron_sp.parallel.mesh import ParallelMesh
    from megatron_sp.train.train_step import TrainStep

    flags = (f"--num-layers {SHAPE['layers']} --hidden-size {SHAPE['hidden']} --num-attention-heads {SHAPE['heads']} "
             f"--ffn-hidden-size {SHAPE['ffn']} --swiglu --normalization RMSNorm --position-embedding-type rope "
             "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
             f"--seq-length {length} --ulysses-size {world} --zero-stage {zero_stage} --micro-batch-size 1 "
             "--train-iters 1000 --lr 1e-3 --lr-decay-style constant --mock-data --tokenizer-type NullTokenizer "
             f"--vocab-size {SHAPE['vocab']}")
    run = with_vocab(load_run(flags.split(), world)[0], SHAPE["vocab"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = ParallelMesh.build(run.parallel)
    whole_step = TrainStep.build(run, build_model(run, mesh), mesh)
    tokens, labels = batch(length)
    positions = torch.from_numpy(SequenceLayout.of(run, length).positions(mesh.rank("sp")))
    mine = Microbatch(tokens[:, positions].contiguous(), labels[:, positions].contiguous(), positions.unsqueeze(0),
                      torch.zeros(1, dtype=torch.int64), len(positions))

    def step() -> float:
        totals, _ = whole_step.train([mine], scheduler_samples=0)
        return totals.loss

    return step


def work(pipe: Connection, build: Callable[[], Callable[[], float]]) -> None:
    """Run a process: build the program, then make one step for each "step" that arrives through the pipe."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(1)
    before = peak_megabytes()
    step = build()
    pipe.send(before)
    while pipe.recv() == "step":
        awake = time.perf_counter() + AWAKE
        while time.perf_counter() < awake:
            pass
        wall, cpu = time.perf_counter(), time.process_time()
        loss = step()
        pipe.send(Measured(time.perf_counter() - wall, time.process_time() - cpu, loss))
    pipe.send(peak_megabytes())


class Program:
    """A measured program: one or more processes that make steps together."""

    def __init__(self, name: str, builders: list[Callable[[], Callable[[], float]]]):
        self.name, self.steps = name, []  # type: str, list[Measured]
        context = multiprocessing.get_context("fork")  # safe and cheap, since this process has not imported torch
        self.pipes, self.processes = [], []
        for build in builders:
            here, there = context.Pipe()
            process = context.Process(target=work, args=(there, build), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)
        self.before = [pipe.recv() for pipe in self.pipes]
        self.peak: list[float] = []

    def step(self, *, keep: bool) -> None:
        """Make one step on all processes. With ``keep``, record the time of the slowest."""
        for pipe in self.pipes:
            pipe.send("step")
        found = [pipe.recv() for pipe in self.pipes]
        if keep:
            self.steps.append(Measured(max(f.wall for f in found), max(f.cpu for f in found), found[0].loss))

    def finish(self) -> None:
        """Stop the processes and note their peak memory."""
        for pipe in self.pipes:
            pipe.send("stop")
        self.peak = [pipe.recv() for pipe in self.pipes]
        for process in self.processes:
            process.join()

    def median(self, field: str) -> float:
        """Return the median of a field of ``Measured`` over all recorded steps."""
        return statistics.median(getattr(step, field) for step in self.steps)


def measure(length: int, repeats: int, zero_stage: int, scratch: Path) -> list[Program]:
    """Measure all programs at one sequence length, in turn, and return them."""
    one, two = str(scratch / f"one{length}"), str(scratch / f"two{length}")
    programs = [
        Program("plain", [lambda: plain_step(length)]),
        Program("ours", [lambda: our_step(length, 0, 1, zero_stage, one)]),
        Program("ours, ulysses 2", [lambda rank=rank: our_step(length, rank, 2, zero_stage, two)  # type: ignore[misc]
                                    for rank in range(2)])]
    for turn in range(-1, repeats):  # the first turn warms up
        for program in programs:
            program.step(keep=turn >= 0)
    for program in programs:
        program.finish()
    return programs


def show(length: int, programs: list[Program]) -> dict[str, Any]:
    """Print a table of all programs and return its figures and the ratios between programs."""
    print(f"\nsequence {length}: medians of {len(programs[0].steps)} steps")
    print(f"{'':<18}{'s/step':>9}{'tokens/s':>11}{'cpu s':>9}{'peak MB per process':>22}{'of which model':>16}")
    rows = {}
    for program in programs:
        wall, cpu = program.median("wall"), program.median("cpu")
        own = max(program.peak) - max(program.before)
        rows[program.name] = dict(seconds=wall, tokens_per_second=length / wall, cpu_seconds=cpu,
                                  peak_megabytes=max(program.peak), model_megabytes=own,
                                  all_seconds=[step.wall for step in program.steps],
                                  all_cpu_seconds=[step.cpu for step in program.steps])
        print(f"{program.name:<18}{wall:>9.3f}{length / wall:>11.0f}{cpu:>9.3f}{max(program.peak):>22.0f}{own:>16.0f}")
    plain, one, two = programs
    ratios = {kind: (plain.median(kind) / one.median(kind), one.median(kind) / two.median(kind))
              for kind in ("wall", "cpu")}
    for kind, (first, second) in ratios.items():
        print(f"by {kind + ' time:':<11} ours / plain {first:.3f}, ulysses 2 / ours {second:.3f}")
    return dict(seq_length=length, programs=rows, ratios=ratios)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-lengths", type=int, nargs="+", default=[2048, 8192], help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=7,
                        help="measured steps of each program (default: %(default)s)")
    parser.add_argument("--zero-stage", type=int, default=0,
                        help="ZeRO stage of megatron_sp (default: %(default)s)")
    parser.add_argument("--goal-one", type=float, default=0.97,
                        help="least speed of ours relative to plain (default: %(default)s)")
    parser.add_argument("--goal-split", type=float, default=1.8,
                        help="least speed of ulysses 2 relative to ours (default: %(default)s)")
    parser.add_argument("--by-cpu-time", action="store_true",
                        help="compare processor time with the goals instead of wall-clock time")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    arguments = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the start; 1 thread per process, fp32")
    print(", ".join(f"{name} {value}" for name, value in SHAPE.items()))
    with tempfile.TemporaryDirectory() as scratch:
        found = [show(length, measure(length, arguments.repeats, arguments.zero_stage, Path(scratch)))
                 for length in arguments.seq_lengths]
    print(f"\nload {os.getloadavg()[0]:.1f} at the end")
    if arguments.json:
        write_json(arguments.json, found, "--json")
    kind = "cpu" if arguments.by_cpu_time else "wall"
    reached = all(result["ratios"][kind][0] >= arguments.goal_one and
                  result["ratios"][kind][1] >= arguments.goal_split for result in found)
    print(f"goals (ours / plain >= {arguments.goal_one:g}, ulysses 2 / ours >= {arguments.goal_split:g}) "
          f"{'reached' if reached else 'missed'} by {kind} time")
    return 0 if reached else 1


if __name__ == "__main__":
    run_program(main)
