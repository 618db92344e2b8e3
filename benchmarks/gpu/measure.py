#!/usr/bin/env python3
"""Measure one GPU or several: speed beside other programs, where the time goes, longest sequences, planned memory.

``gpu.sh`` starts it, after the smoke test. The layers have the shapes of a 1.2B and an 8B model. Three parts:

- speed: a training step at 8K, 32K and 128K tokens, ours with ``--memory-efficiency auto``, and beside it plain loops
  around transformers' and torchtitan's models (``programs.py``). MFU, and planned beside measured memory.
- profile: which share of a step's kernels are matrix products, attention, communication and copies, and the rest.
- longest: for each memory technique the longest sequence that fits into ``--memory`` GiB. It starts at the length that
  the plan predicts and shortens it until a step fits, which also checks the plan.

Computation is in bf16 with fp32 master weights and AdamW. What the time limit leaves no room for is listed as not
measured. Without a GPU everything runs at toy size on the CPU. This shows only that the script works.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.gpu.programs import (  # noqa: E402
    OTHERS,
    SHAPES,
    TOY_SHAPES,
    Step,
    kernel_times,
    our_run,
    our_step,
    shares,
)
from benchmarks.gpu.report import report  # noqa: E402
from megatron_sp.config.schema import Run  # noqa: E402
from megatron_sp.errors import ConfigError  # noqa: E402
from megatron_sp.layout.patterns.choice import BLOCK_PATTERNS  # noqa: E402
from megatron_sp.output_files import complete_file, write_json  # noqa: E402
from megatron_sp.plan.devices import device_like  # noqa: E402
from megatron_sp.plan.efficiency import choose_techniques  # noqa: E402
from megatron_sp.plan.flops import repeats_of, sequence_flops  # noqa: E402
from megatron_sp.plan.machine import node_memory  # noqa: E402
from megatron_sp.plan.memory import predict  # noqa: E402
from megatron_sp.plan.techniques import technique_flags  # noqa: E402
from megatron_sp.runtime import launch_environment, run_program, start, stop  # noqa: E402
from megatron_sp.train.report.peak_flops import peak_tflops  # noqa: E402

AUTO, FULL = "--memory-efficiency auto", "--recompute-granularity full "
TECHNIQUES = {
    "untiled loss, no recompute": "--loss-tile-size {length} ",
    "tiled loss": "",
    "selective recompute": "--recompute-granularity selective ",
    "full recompute": FULL,
    "full, tiled MLP": FULL + "--mlp-tile-size {tile} ",
    "full, tiled MLP, head groups": FULL + "--mlp-tile-size {tile} --attention-head-groups 4 ",
    "full, tiled MLP, offload": FULL + "--mlp-tile-size {tile} --offload-activations ",
    "chunks": "--sequence-chunk-size {chunk} ",
    "chunks, keys and values offloaded": "--sequence-chunk-size {chunk} --offload-key-values ",
    "chunks, selective, offloaded": ("--sequence-chunk-size {chunk} --recompute-granularity selective "
                                     "--offload-key-values "),
    "window, full recompute": FULL + "--window-size {window} ",
    "window, chunks": "--window-size {window} --sequence-chunk-size {chunk} ",
    **{f"pattern {name}, full recompute": f"{FULL}--attention-pattern {name} --attention-block-size {{block}} "
       for name in BLOCK_PATTERNS},
    AUTO: AUTO,
}
PARTS = ("speed", "profile", "longest")
#: Share of the memory that a plan may fill. The rest is left for fragmentation.
USABLE = 0.93


class Bench:
    """A benchmark run on this rank: its device, the time limit, the results, and what was not measured."""

    def __init__(self, arguments: argparse.Namespace):
        self.toy = not torch.cuda.is_available()
        self.end = time.monotonic() + arguments.seconds
        self.shapes = TOY_SHAPES if self.toy else SHAPES
        self.layers: int = 2 if self.toy else arguments.layers
        self.grain = 64 if self.toy else 4096  # lengths of the search are multiples of this for each rank
        environment = launch_environment()
        parallel = our_run(self.shapes["8B"], self.layers, self.grain, "", on_gpu=not self.toy).parallel
        self.device = start(parallel, environment)
        self.ranks, self.is_writer = environment.world_size, environment.rank == 0
        self.total = 1 << 30
        self.name = "CPU"
        if not self.toy:
            properties = torch.cuda.get_device_properties(self.device)
            self.total, self.name = properties.total_memory, properties.name
        self.host = node_memory() // self.ranks
        self.allowed = self.total
        self.not_measured: list[str] = []

    def allow(self, memory: int) -> None:
        """Limit what a process may allocate on its device."""
        self.allowed = min(memory, self.total)
        if not self.toy:
            torch.cuda.set_per_process_memory_fraction(self.allowed / self.total, self.device)

    def agreed(self, value: float) -> float:
        """Return the smallest of all ranks' values, so that all ranks take the same decision."""
        least = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return float(least)

    def left(self) -> float:
        """Return the seconds left until the time limit, the same on every rank."""
        return self.agreed(self.end - time.monotonic())

    def skips(self, what: str, seconds: float) -> bool:
        """Return whether too little time is left for a measurement. If so, note the measurement as skipped."""
        if self.left() >= seconds:
            return False
        self.note(f"{what}: no time left")
        return True

    def note(self, line: str) -> None:
        """Note that something is not measured, and why; only the first note about it is kept."""
        if line not in self.not_measured:
            self.not_measured.append(line)

    def run(self, shape: str, length: int, flags: str) -> Run:
        """Return a run with the flags of a technique.

        Raises:
            ConfigError: nothing that ``--memory-efficiency auto`` can turn on makes it fit.
        """
        text = flags.format(length=length, tile=max(64, min(length // self.ranks // 4, 8192)),
                            chunk=self.grain * self.ranks, window=64 if self.toy else 4096,
                            block=32 if self.toy else 128)
        run = our_run(self.shapes[shape], self.layers, length, text, on_gpu=not self.toy)
        if run.memory.memory_efficiency:
            run, _ = choose_techniques(run, device_like(self.name, self.allowed, 0 if self.toy else self.host), 8)
        return run

    def measure(self, make: Callable[[], Step], tokens: int, repeats: int) -> dict[str, Any] | None:
        """Return the time of the fastest step and the peak of allocated memory; None when it does not fit.

        Args:
            tokens: tokens of a step on each rank.
        """
        times: list[float] = []
        fits = 1.0
        try:
            step = make()
            for _ in range(repeats + 1):  # the first step creates the optimizer states and is not timed
                started = time.perf_counter()
                step()
                self.synchronize()
                times.append(time.perf_counter() - started)
        except torch.OutOfMemoryError:
            fits = 0.0
        found: dict[str, Any] | None = None
        if self.agreed(fits):
            seconds = -self.agreed(-min(times[1:]))  # of the slowest rank
            found = {"seconds": seconds, "tokens_per_s": tokens / seconds}
            if not self.toy:
                found["allocated"] = torch.cuda.max_memory_allocated()
                found["reserved"] = torch.cuda.max_memory_reserved()
        step = None  # type: ignore[assignment]  # its tensors must go before the next measurement
        self.clean()
        return found

    def synchronize(self) -> None:
        """Wait until the device has done its work."""
        if not self.toy:
            torch.cuda.synchronize()

    def clean(self) -> None:
        """Free unused device memory, and restart the measurement of its peak."""
        gc.collect()
        if not self.toy:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def our_row(self, run: Run, repeats: int) -> dict[str, Any] | None:
        """Return a row with the measured and the planned figures of our run."""
        length = run.data.seq_length
        per_rank = length * run.train.global_batch_size // self.ranks
        found = self.measure(lambda: our_step(run, self.device), per_rank, repeats)
        if found is None:
            return None
        plan = predict(run, device="cpu" if self.toy else "gpu")
        flops, peak = sequence_flops(run.model, length), peak_tflops(run, self.device)
        share = run.train.global_batch_size / self.ranks / found["seconds"] / 1e12
        found |= {"flags": " ".join(technique_flags(run.memory)), "planned": plan.total - plan.components["fixed"],
                  "planned_host": plan.host, "tflops": share * flops.train()}
        for name, value in (("mfu", flops.train()), ("mfu_full", flops.train("full")),
                            ("hfu", flops.train(repeats=repeats_of(run)))):
            found[name] = share * value / peak if peak else None
        return found


def speed(bench: Bench, lengths: list[int]) -> list[dict[str, Any]]:
    """Return a row for each program, shape and length, in turn."""
    rows: list[dict[str, Any]] = []
    bench.allow(bench.total)
    for length in lengths:
        for shape in bench.shapes:
            row = {"shape": shape, "length": length, "program": "ours"}
            try:
                rows.append(row | (bench.our_row(bench.run(shape, length, AUTO), 2) or {}))
                say(bench, rows[-1])
            except ConfigError as error:
                bench.note(f"ours, {shape} at {length:,} tokens: {error.problems[0]}")
            recompute = length >= lengths[min(1, len(lengths) - 1)]
            for name in OTHERS:
                if found := other_row(bench, name, shape, length, recompute):
                    rows.append(row | {"program": name} | found)
                    say(bench, rows[-1])
    return rows


def other_row(bench: Bench, name: str, shape: str, length: int, recompute: bool) -> dict[str, Any] | None:
    """Return a row with the measured figures of another program; None if it is not installed or no time is left."""
    what = f"{name}, {shape} at {length:,} tokens"
    if bench.skips(what, 60 if not bench.toy else 5):
        return None
    model = bench.run(shape, length, "")
    row: dict[str, Any] = {"flags": "each layer recomputed" if recompute else ""}
    try:
        found = bench.measure(lambda: OTHERS[name](bench.shapes[shape], bench.layers, length, bench.device, recompute),
                              length, 2)
    except ImportError as error:
        bench.note(f"{name}: {error}")
        return None
    if found:
        peak = peak_tflops(model, bench.device)
        row |= found | {"tflops": sequence_flops(model.model, length).train() / found["seconds"] / 1e12}
        row["mfu"] = row["tflops"] / peak if peak else None
    return row


def profile(bench: Bench, length: int) -> list[dict[str, Any]]:
    """Return the share of each kind of kernel in a step, for our programs and the others."""
    rows = []
    for shape in bench.shapes:
        for name in ("ours", *OTHERS):
            if bench.skips(f"profile of {name}, {shape}", 30 if not bench.toy else 5):
                continue
            try:
                step = our_step(bench.run(shape, length, AUTO), bench.device) if name == "ours" else OTHERS[name](
                    bench.shapes[shape], bench.layers, length, bench.device, True)
                step()
                times = kernel_times(step, bench.device)
            except ImportError as error:
                bench.note(f"{name}: {error}")
                continue
            except (ConfigError, torch.OutOfMemoryError):
                bench.note(f"profile of {name}, {shape}: {length:,} tokens do not fit")
                continue
            finally:
                step = None  # type: ignore[assignment]
                bench.clean()
            slowest = sorted(times.items(), key=lambda item: -item[1])[:10]
            rows.append({"shape": shape, "length": length, "program": name, "shares": shares(times),
                         "slowest": dict(slowest)})
            say(bench, {key: rows[-1][key] for key in ("shape", "program", "shares")})
    return rows


def longest(bench: Bench, memory: int, cap: int) -> list[dict[str, Any]]:
    """Return for each shape and technique a step of the longest sequence that fits."""
    rows = []
    bench.allow(memory)
    for name, flags in TECHNIQUES.items():
        for shape in bench.shapes:
            if bench.skips(f"longest sequence, {shape}, {name}", 25 if not bench.toy else 5):
                continue
            rows.append({"shape": shape, "technique": name, **(longest_of(bench, shape, flags, cap) or {})})
            say(bench, rows[-1])
    return rows


def longest_of(bench: Bench, shape: str, flags: str, cap: int) -> dict[str, Any] | None:
    """Return a step of the longest sequence that fits with the flags of a technique, or None.

    The first length is the longest that the memory plan allows, at most ``cap`` to limit the time. A length that does
    not fit is shortened by a tenth and tried again.
    """
    grain = bench.grain * bench.ranks

    def is_planned(tokens: int) -> bool:
        if tokens > cap:
            return False
        try:
            plan = predict(bench.run(shape, tokens, flags), device="cpu" if bench.toy else "gpu")
        except ConfigError:
            return False
        return plan.total < USABLE * bench.allowed and (bench.toy or plan.host < USABLE * bench.host)

    low, high = 0, cap // grain + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_planned(middle * grain) else (low, middle)
    length = low * grain
    while length >= grain and bench.left() > 15 - 10 * bench.toy:
        found = bench.our_row(bench.run(shape, length, flags), 1)
        if found:
            return {"length": length, **found, "limited_by": "time" if length + grain > cap else "memory"}
        length = int(length * 0.9) // grain * grain
    return None


def say(bench: Bench, row: dict[str, Any]) -> None:
    """Print a row while the measurements go on, on one rank."""
    if bench.is_writer:
        print(", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                        for name, value in row.items()), flush=True)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=540.0, help="budget of time (default: %(default)g)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072], metavar="TOKENS",
                        help="lengths of the part speed; the second is profiled (default: 8192 32768 131072)")
    parser.add_argument("--memory", type=float, default=48.0, metavar="GIB", help="memory allowed in the part longest, "
                        "so that memory and not time ends the search (default: %(default)g)")
    parser.add_argument("--layers", type=int, default=4, help="layers of each shape (default: %(default)s)")
    parser.add_argument("--cap", type=int, default=393216, help="longest length tried (default: %(default)s)")
    parser.add_argument("--smoke", default="not run", help="what became of tests/gpu, for the report")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results", help="directory for gpu.json and "
                        "gpu.md (default: benchmarks/results)")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    started = time.monotonic()
    bench = Bench(arguments)
    if bench.toy:
        arguments.lengths, arguments.cap, arguments.memory = [64, 128, 256], 512, 1.0
    results: dict[str, Any] = {"toy": bench.toy, "device": bench.name, "ranks": bench.ranks, "layers": bench.layers,
                               "memory_gib": arguments.memory, "smoke": arguments.smoke, "torch": torch.__version__,
                               "parts": arguments.parts}
    if "speed" in arguments.parts:
        results["speed"] = speed(bench, arguments.lengths)
    if "profile" in arguments.parts:
        results["profile"] = profile(bench, arguments.lengths[min(1, len(arguments.lengths) - 1)])
    if "longest" in arguments.parts:
        results["longest"] = longest(bench, int(arguments.memory * 2**30), arguments.cap)
    results |= {"seconds": round(time.monotonic() - started), "not_measured": bench.not_measured}
    if bench.is_writer:
        write_json(arguments.output / "gpu.json", results, "--output")
        with complete_file(arguments.output / "gpu.md", "--output") as file:
            file.write(report(results).encode())
        print(report(results))
    stop()
    return 0


if __name__ == "__main__":
    run_program(main)
