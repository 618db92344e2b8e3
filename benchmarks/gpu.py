#!/usr/bin/env python3
"""Measure the longest sequence and the MFU (model FLOP/s utilisation) of one GPU with each memory technique.

``gpu.sh`` starts it. The layers have the shapes of a 1.2B and an 8B model. For each shape and technique the script
times the step of real training (``train.train_step``) on random tokens at one common length. Then it searches the
longest sequence that fits into ``--memory`` GiB: it starts at the length that the memory plan predicts and shortens it
until a step fits, which also checks the plan. Computation is in bf16 with fp32 master weights and AdamW. Without a GPU
the script runs at toy size on the CPU. This shows only that it works, and the report says that it has no GPU figures.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_sp.config.load import load_run  # noqa: E402
from megatron_sp.config.resolve import with_vocab  # noqa: E402
from megatron_sp.config.schema import Run  # noqa: E402
from megatron_sp.plan.memory import predict  # noqa: E402

COMMON = ("--position-embedding-type rope --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 "
          "--micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-4 --mock-data --eval-iters 0 ")
SHAPES = {
    "1.2B": ("--hidden-size 2048 --num-attention-heads 16 ", 50304),
    "8B": ("--hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --swiglu "
           "--ffn-hidden-size 14336 --normalization RMSNorm --untie-embeddings-and-output-weights ", 128256)}
TOY = {name: (flags + f"--hidden-size 64 --num-attention-heads {heads} --ffn-hidden-size 224 ", 512)
       for (name, (flags, _)), heads in zip(SHAPES.items(), (4, 8))}
FULL = "--recompute-granularity full "
TECHNIQUES = {
    "untiled loss, no recompute": "--loss-tile-size {s} ",
    "tiled loss": "",
    "full recompute": FULL,
    "selective recompute": "--recompute-granularity selective ",
    "full, tiled MLP": FULL + "--mlp-tile-size {tile} ",
    "full, tiled MLP, head groups": FULL + "--mlp-tile-size {tile} --attention-head-groups 4 ",
    "full, tiled MLP, offload": FULL + "--mlp-tile-size {tile} --offload-activations ",
    "chunks": "--sequence-chunk-size {chunk} ",
    "chunks, selective, keys and values offloaded": ("--sequence-chunk-size {chunk} --recompute-granularity selective "
                                                     "--offload-key-values "),
}
#: Share of the memory that a plan may fill. The rest is left for fragmentation.
USABLE = 0.93


class Bench:
    """A device, and a limit on the time for all measurements."""

    def __init__(self, toy: bool, seconds: float, memory: float, layers: int):
        import torch

        from megatron_sp.runtime import Environment, start

        self.toy, self.layers = toy, layers
        self.grain = 64 if toy else 4096  # all lengths are multiples of this
        self.end = time.monotonic() + seconds
        self.device = torch.device("cpu") if toy else torch.device("cuda", 0)
        self.bytes = int(memory * 2**30)
        if not toy:
            total = torch.cuda.get_device_properties(0).total_memory
            self.bytes = min(self.bytes, total)
            torch.cuda.set_per_process_memory_fraction(self.bytes / total)
        start(self.run(next(iter(SHAPES)), "", 256).parallel, Environment())

    def run(self, shape: str, flags: str, length: int) -> Run:
        model, vocab = (TOY if self.toy else SHAPES)[shape]
        text = f"--num-layers {self.layers} {COMMON}{model}{flags} --seq-length {length} --vocab-size {vocab} "
        text = text.format(s=length, tile=max(64, min(length // 4, 8192)), chunk=self.grain)
        backend = "--distributed-backend gloo" if self.toy else "--bf16"
        return with_vocab(load_run([*text.split(), *backend.split()], 1)[0], vocab)

    def left(self) -> float:
        """Return the seconds left until the time limit."""
        return self.end - time.monotonic()

    def step(self, shape: str, flags: str, length: int, repeats: int) -> dict[str, Any] | None:
        """Return the time of the fastest step, its peak memory and its MFU; None when it does not fit into memory."""
        import torch

        try:
            return self._step(self.run(shape, flags, length), repeats)
        except torch.OutOfMemoryError:
            return None
        finally:
            gc.collect()
            if not self.toy:
                torch.cuda.empty_cache()

    def _step(self, run: Run, repeats: int) -> dict[str, Any]:
        import torch

        from megatron_sp.data.batch import Microbatch
        from megatron_sp.model.build import build_model
        from megatron_sp.parallel.mesh import ParallelMesh
        from megatron_sp.plan.flops import sequence_flops
        from megatron_sp.train.report.peak_flops import peak_tflops
        from megatron_sp.train.train_step import TrainStep

        mesh = ParallelMesh.build(run.parallel, self.device)
        step = TrainStep.build(run, build_model(run, mesh), mesh)
        length = run.data.seq_length
        text = torch.randint(0, run.model.vocab_size, (1, length + 1))
        batch = Microbatch(text[:, :-1].contiguous(), text[:, 1:].contiguous(), torch.arange(length).unsqueeze(0),
                           torch.zeros(1, dtype=torch.int64), length).to(self.device)
        times = []
        for _ in range(repeats + 1):  # the first step creates the optimizer states and is not timed
            started = time.perf_counter()
            step.update(step.compute_gradients([batch]), scheduler_samples=0)
            if not self.toy:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        seconds = min(times[1:])
        peak = peak_tflops(run, self.device)
        flops = sequence_flops(run.model, length)
        plan = predict(run, device="cpu" if self.toy else "gpu")
        found: dict[str, Any] = {"length": length, "seconds": seconds, "tokens_per_s": length / seconds,
                                 "predicted": plan.total}
        for causal in ("half", "full"):
            found[f"mfu_{causal}"] = flops.train(causal) / seconds / 1e12 / peak if peak else None
        if not self.toy:
            found["allocated"] = torch.cuda.max_memory_allocated()
            found["reserved"] = torch.cuda.max_memory_reserved()
            torch.cuda.reset_peak_memory_stats()
        return found

    def longest(self, shape: str, flags: str, start: int, cap: int) -> dict[str, Any] | None:
        """Return a step of the longest sequence that fits, or None.

        The first length is the longest that the memory plan allows, at most ``cap`` to limit the time. A length that
        does not fit is shortened by a tenth and tried again.
        """
        grain = self.grain

        def fits(tokens: int) -> bool:
            plan = predict(self.run(shape, flags, tokens), device="cpu" if self.toy else "gpu")
            return tokens <= cap and plan.total < USABLE * self.bytes

        length = start
        while fits(2 * length):
            length *= 2
        while fits(length + grain):
            length += grain
        while length >= start and self.left() > 15:
            found = self.step(shape, flags, length, 1)
            if found:
                return {**found, "limited_by": "time" if length + grain > cap else "memory"}
            length = int(length * 0.9) // grain * grain
        return None


def report(results: dict[str, Any]) -> str:
    """Return the results as a Markdown page."""
    lines = ["# Longest sequence and MFU on one GPU", ""]
    if results["toy"]:
        lines += ["**No GPU figure exists yet.** What follows is a dry run of the script on a CPU at toy size; it says "
                  "nothing about a GPU. Run `bash benchmarks/gpu.sh` on a machine with one.", ""]
    else:
        lines += [f"{results['device']}, {results['memory_gib']:g} GiB allowed, {results['layers']} layers, bf16, "
                  f"{results['seconds']:.0f} s in all. MFU counts half of the scores (in brackets: all).",
                  ""]
    lines += ["| shape | technique | tokens | s/step | tokens/s | MFU | longest | limited by |",
              "|---|---|---|---|---|---|---|---|"]
    for row in results["rows"]:
        step, longest = row["step"] or {}, row["longest"] or {}
        mfu = "-" if not step.get("mfu_half") else f"{step['mfu_half']:.1%} ({step['mfu_full']:.1%})"
        lines.append(f"| {row['shape']} | {row['technique']} | {step.get('length', '-')} | "
                     f"{step.get('seconds', 0):.2f} | {step.get('tokens_per_s', 0):,.0f} | {mfu} | "
                     f"{longest.get('length', '-')} | "
                     f"{longest.get('limited_by', '-')} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=540.0, help="budget of time (default: %(default)g)")
    parser.add_argument("--memory", type=float, default=48.0, metavar="GIB",
                        help="memory allowed, so that memory and not time ends the search (default: %(default)g)")
    parser.add_argument("--layers", type=int, default=4, help="layers of each shape (default: %(default)s)")
    parser.add_argument("--length", type=int, default=16384, help="common length (default: %(default)s)")
    parser.add_argument("--cap", type=int, default=393216, help="longest length tried (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results", help="directory")
    arguments = parser.parse_args()
    import torch

    toy = not torch.cuda.is_available()
    if toy:
        arguments.length, arguments.cap, arguments.memory, arguments.layers = 256, 512, 1.0, 2
    started = time.monotonic()
    bench = Bench(toy, arguments.seconds, arguments.memory, arguments.layers)
    rows = []
    for shape in SHAPES:
        for technique, flags in TECHNIQUES.items():
            if bench.left() < 20:
                break
            step = bench.step(shape, flags, arguments.length, 2)
            longest = bench.longest(shape, flags, arguments.length if not toy else 64, arguments.cap)
            rows.append({"shape": shape, "technique": technique, "step": step, "longest": longest})
            print(shape, technique, step, longest, flush=True)
    results = {"toy": toy, "note": "no GPU figure exists yet: dry run on a CPU at toy size" if toy else "",
               "device": "cpu" if toy else torch.cuda.get_device_name(0), "memory_gib": arguments.memory,
               "layers": arguments.layers, "seconds": round(time.monotonic() - started), "rows": rows}
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "gpu.json").write_text(json.dumps(results, indent=1))
    (arguments.output / "gpu.md").write_text(report(results))
    print(report(results))


if __name__ == "__main__":
    main()
