#!/usr/bin/env python3
"""Compare the measured peak memory of a training step with the predicted one, for each memory technique and length.

    python benchmarks/memory.py --only "full recompute" --lengths 2048 4096

Each point is measured in a new process, or in two with Ulysses. The process loads the libraries and makes a short step,
which creates the optimizer states. Then it makes one step of the given length. The measured value is the peak of its
resident memory minus its resident memory before the model was built. It needs Linux and runs on the CPU in fp32.

Two figures of each technique are compared with the predictions of ``megatron_sp.plan.memory``: the slope, which is the
bytes per token between the shortest and the longest length, and the peak at the longest length. The exit status is 1 if
a slope differs by more than 15% or a peak by more than 10%.

The script sets ``MALLOC_MMAP_THRESHOLD_`` for the measured processes. Without it glibc keeps freed blocks of less than
32 MiB, and memory that the program has freed would count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_sp.config.load import load_run  # noqa: E402
from megatron_sp.config.resolve import with_vocab  # noqa: E402
from megatron_sp.config.schema import Run  # noqa: E402
from megatron_sp.output_files import complete_file  # noqa: E402
from megatron_sp.pictures import load_pyplot, save_picture  # noqa: E402
from megatron_sp.plan.memory import predict  # noqa: E402
from megatron_sp.runtime import run_program  # noqa: E402

VOCAB = 16000
MODEL = ("--num-layers 3 --hidden-size 768 --num-attention-heads 12 --group-query-attention --num-query-groups 4 "
         "--ffn-hidden-size 2048 --swiglu --normalization RMSNorm --position-embedding-type rope "
         "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
         f"--micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --eval-iters 0 "
         f"--vocab-size {VOCAB} ")
FULL = "--recompute-granularity full "
#: For each technique: its flags, where {s} is the sequence length; the number of processes; and a factor by which its
#: lengths are multiplied, because techniques that need little memory can be measured at longer ones.
TECHNIQUES: dict[str, tuple[str, int, float]] = {
    "untiled loss": ("--loss-tile-size {s}", 1, 1.0),
    "tiled loss": ("", 1, 1.0),
    "full recompute": (FULL, 1, 2.0),
    "selective recompute": ("--recompute-granularity selective", 1, 2.0),
    "first layer recomputed": (FULL + "--recompute-method block --recompute-num-layers 1", 1, 1.0),
    "offload (to the same memory here)": (FULL + "--offload-activations", 1, 2.0),
    "full + tiled MLP": (FULL + "--mlp-tile-size 512", 1, 2.0),
    "full + tiled MLP + 4 head groups": (FULL + "--mlp-tile-size 512 --attention-head-groups 4", 1, 2.0),
    "full, Ulysses 2, ZeRO 3": (FULL + "--ulysses-size 2 --zero-stage 3", 2, 2.0),
}
SHORT = 256
SLOPE_LIMIT, PEAK_LIMIT = 0.15, 0.10


def configuration(flags: str, length: int, world: int) -> Run:
    return with_vocab(load_run((MODEL + flags.format(s=length) + f" --seq-length {length}").split(), world)[0], VOCAB)


def resident(field: str) -> int:
    """Return the resident memory of this process in bytes: now (field VmRSS), or its peak since a reset (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")


def child(flags: str, length: int) -> dict[str, float]:
    """Measure one technique at one length, in this process."""
    import torch

    from megatron_sp.data.batch import Microbatch
    from megatron_sp.layout.tokens import SequenceLayout
    from megatron_sp.model.build import build_model
    from megatron_sp.parallel.mesh import ParallelMesh
    from megatron_sp.runtime import launch_environment, start, stop
    from megatron_sp.train.forward_backward import build_engine
    from megatron_sp.train.optimizer import build_optimizer, clip_grad_norm

    environment = launch_environment()
    run = configuration(flags, length, environment.world_size)
    mesh = ParallelMesh.build(run.parallel, start(run.parallel, environment))
    # The first product makes the libraries load their code and allocate their buffers.
    (torch.randn(512, 512) @ torch.randn(512, 512)).sum()
    before = resident("VmRSS")
    model = build_model(run, mesh)
    engine, optimizer = build_engine(run, model, mesh), build_optimizer(run, model)

    def step(tokens: int) -> float:
        positions = torch.from_numpy(SequenceLayout.of(run, tokens).positions(mesh.rank("sp")))
        text = torch.randint(0, VOCAB, (1, len(positions) + 1))
        batch = Microbatch(text[:, :-1].contiguous(), text[:, 1:].contiguous(), positions.unsqueeze(0),
                           torch.zeros(1, dtype=torch.int64), len(positions))
        started = time.perf_counter()
        engine.forward_backward([batch], float(tokens))
        clip_grad_norm(model, 1.0, mesh)
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - started

    step(SHORT)
    Path("/proc/self/clear_refs").write_text("5")  # makes Linux reset VmHWM
    seconds = step(length)
    peak = resident("VmHWM")
    stop()
    return {"before": before, "peak": peak, "above": peak - before, "seconds": seconds, "rank": environment.rank}


def measure(flags: str, length: int, world: int, scratch: Path) -> dict[str, float]:
    """Measure one technique at one length in new processes, and return the measurement of the rank that needs most.

    Raises:
        SystemExit: a process failed; the message has its output.
    """
    words = [str(Path(__file__)), "--child", flags, "--lengths", str(length), "--json", str(scratch)]
    launcher = [sys.executable]
    if world > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
                     "--nproc-per-node", str(world)]
    variables = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144",
                 "MALLOC_ARENA_MAX": "2", "CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run([*launcher, *words], env={**os.environ, **variables}, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"{flags} at {length} failed:\n{done.stdout}{done.stderr}")
    found = [json.loads(path.read_text()) for path in scratch.parent.glob(f"{scratch.name}.*")]
    for path in scratch.parent.glob(f"{scratch.name}.*"):
        path.unlink()
    return max(found, key=lambda one: one["above"])


def technique(name: str, lengths: list[int], scratch: Path) -> dict[str, Any]:
    """Measure one technique at all lengths and compare the results with the predictions."""
    flags, world, factor = TECHNIQUES[name]
    points: list[dict[str, Any]] = []
    for length in (round(factor * length) for length in lengths):
        plan = predict(configuration(flags, length, world))
        found = measure(flags, length, world, scratch)
        predicted = plan.total + plan.host
        points.append({"length": length, "measured": found["above"], "predicted": predicted,
                       "resident": found["peak"], "seconds": round(found["seconds"], 1), "moment": plan.moment,
                       "load": round(os.getloadavg()[0], 1)})
        error = predicted / found["above"] - 1
        print(f"{name:36} {length:6} tokens  measured {found['above'] / 2**20:7.0f} MiB  predicted "
              f"{predicted / 2**20:7.0f} MiB ({error:+.1%})  {found['seconds']:5.1f} s", flush=True)
    first, last = points[0], points[-1]
    tokens = last["length"] - first["length"]
    slopes = [(last[key] - first[key]) / tokens if tokens else 0.0 for key in ("measured", "predicted")]
    return {"flags": flags, "processes": world, "points": points, "slope_measured": slopes[0],
            "slope_predicted": slopes[1], "slope_error": slopes[1] / slopes[0] - 1 if slopes[0] else 0.0,
            "peak_error": last["predicted"] / last["measured"] - 1}


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the measured memory as points and the predicted memory as lines, and write the picture."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(9, 6))
    colours = [f"C{index}" for index in range(10)]
    for colour, (name, result) in zip(colours, results.items()):
        x = [point["length"] for point in result["points"]]
        axes.plot(x, [point["predicted"] / 2**30 for point in result["points"]], "-", color=colour, linewidth=1)
        axes.plot(x, [point["measured"] / 2**30 for point in result["points"]], "o", color=colour, label=name)
    axes.set_xlabel("tokens in the sequence")
    axes.set_ylabel("GiB above start-up, fullest process")
    axes.set_title("Peak resident memory of a training step: measured (points) and predicted (lines)", fontsize=10)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    save_picture(figure, path, dpi=130, flag="--json")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 6144], help="sequence lengths "
                        "(default: %(default)s; techniques that need little memory take twice that)")
    parser.add_argument("--only", nargs="+", choices=list(TECHNIQUES), help="measure only these techniques")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/memory.json",
                        help="write the figures here, and the picture beside it (default: %(default)s)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child is not None:
        found = child(arguments.child, arguments.lengths[0])
        arguments.json.with_name(f"{arguments.json.name}.{int(found['rank'])}").write_text(json.dumps(found))
        return 0
    arguments.json.parent.mkdir(parents=True, exist_ok=True)     # the measured processes write beside the file
    results = {name: technique(name, arguments.lengths, arguments.json.with_suffix(".part"))
               for name in (arguments.only or TECHNIQUES)}
    with complete_file(arguments.json, "--json") as file:
        file.write(json.dumps({"model": MODEL, "techniques": results}, indent=1).encode("utf-8"))
    print("\ntechnique                              slope measured  predicted          peak")
    wrong = []
    for name, result in results.items():
        print(f"{name:36}  {result['slope_measured'] / 1024:8.1f} KiB/token {result['slope_predicted'] / 1024:8.1f} "
              f"({result['slope_error']:+.1%})   {result['peak_error']:+.1%}")
        if abs(result["slope_error"]) > SLOPE_LIMIT or abs(result["peak_error"]) > PEAK_LIMIT:
            wrong.append(name)
    draw(results, arguments.json.with_suffix(".png"))
    print(f"outside the limits: {', '.join(wrong)}" if wrong else "all within the limits")
    return bool(wrong)


if __name__ == "__main__":
    run_program(main)
