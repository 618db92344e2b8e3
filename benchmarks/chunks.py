#!/usr/bin/env python3
"""Measure what ``--sequence-chunk-size`` costs and saves on a CPU: memory over the length, step time, pipelines.

    python benchmarks/chunks.py memory --lengths 8192 16384 32768 65536
    python benchmarks/chunks.py time --seq-length 16384
    python benchmarks/chunks.py pipeline --seq-length 8192 --chunks 8

``memory`` makes one training step for each length in a process of its own, after a short step that creates the
optimizer states. It prints the peak resident memory above that before the model was built, the bytes that the keys and
values take, and what is left. ``time`` compares a step in chunks with a step of full recomputation, which computes as
much; they take turns, and medians of processor time are printed. ``pipeline`` compares steps of one sequence on two
pipeline ranks with and without chunks, in turns, by the clock, both with full recomputation. Its model has four layers
on each rank and a small vocabulary, so that both ranks have about as much to do. All compute in fp32 with one thread
for each process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.memory import resident  # noqa: E402
from megatron_sp.config.load import load_run  # noqa: E402
from megatron_sp.config.resolve import with_vocab  # noqa: E402
from megatron_sp.config.schema import Run  # noqa: E402

VOCAB = 8192
MODEL = ("--num-layers 2 --hidden-size 128 --num-attention-heads 2 --num-key-value-heads 1 --kv-channels 32 "
         "--ffn-hidden-size 344 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
         "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 "
         "--global-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --eval-iters 0 --tokenizer-type NullTokenizer "
         f"--vocab-size {VOCAB} ")
FULL = "--recompute-granularity full "
#: The model of the measurement ``pipeline``: eight layers instead of two, and a small vocabulary, so that the output
#: layer costs less than one layer.
BALANCED = {"--num-layers 2 ": "--num-layers 8 ", f"--vocab-size {VOCAB} ": "--vocab-size 256 "}
#: Environment of measured processes. Without it glibc would keep freed blocks of less than 32 MiB, and the measured
#: memory would include them.
VARIABLES = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144",
             "MALLOC_ARENA_MAX": "2", "CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "passive"}


def configuration(flags: str, world: int = 1, model: str = MODEL) -> Run:
    words = (model + flags).split()
    return with_vocab(load_run(words, world)[0], int(words[words.index("--vocab-size") + 1]))


class Program:
    """The model, engine and optimizer of a run on this process."""

    def __init__(self, run: Run):
        import torch

        from megatron_sp.model.build import build_model
        from megatron_sp.parallel.mesh import ParallelMesh
        from megatron_sp.runtime import launch_environment, start
        from megatron_sp.train.train_step import TrainStep

        torch.set_num_threads(1)
        self.run = run
        started = torch.distributed.is_initialized()
        device = torch.device("cpu") if started else start(run.parallel, launch_environment())
        self.mesh = ParallelMesh.build(run.parallel, device)
        # makes the libraries load their code before the measurement
        (torch.randn(512, 512) @ torch.randn(512, 512)).sum()
        self.before = resident("VmRSS")
        self.whole_step = TrainStep.build(run, build_model(run, self.mesh), self.mesh)

    def step(self, length: int) -> None:
        """Make one training step on random tokens."""
        import torch

        from megatron_sp.data.batch import Microbatch
        from megatron_sp.layout.tokens import SequenceLayout

        positions = torch.from_numpy(SequenceLayout.of(self.run, length).positions(self.mesh.rank("sp")))
        text = torch.randint(0, self.run.model.vocab_size, (1, len(positions) + 1),
                             generator=torch.Generator().manual_seed(0))
        batch = Microbatch(text[:, :-1].contiguous(), text[:, 1:].contiguous(), positions.unsqueeze(0),
                           torch.zeros(1, dtype=torch.int64), len(positions))
        self.whole_step.train([batch], scheduler_samples=0)


def memory_of(length: int, chunk: int) -> dict[str, float]:
    """Measure one step in this process."""
    from megatron_sp.runtime import stop
    from megatron_sp.train.chunk_recurrence import Part
    from megatron_sp.train.operation_runner import OperationRunner

    program = Program(configuration(f"--seq-length {length} --sequence-chunk-size {chunk}"))
    kept = 0
    original = OperationRunner._call

    def watched(self: OperationRunner, batch: Any, part: Part, received: Any = None) -> Any:
        nonlocal kept
        assert part.chunk is not None
        kept = max(kept, part.chunk.store.nbytes)
        return original(self, batch, part, received)

    OperationRunner._call = watched  # type: ignore[method-assign]
    program.step(2 * chunk)
    Path("/proc/self/clear_refs").write_text("5")  # makes Linux reset VmHWM
    kept, began = 0, time.process_time()
    program.step(length)
    found = {"length": length, "above": resident("VmHWM") - program.before, "kept": kept,
             "seconds": time.process_time() - began}
    stop()
    return found


def formula(length: int, chunk: int) -> int:
    """Return the bytes of keys, values and their gradients by the formula of docs/background/memory.md."""
    model = configuration(f"--seq-length {length}").model
    return 2 * (4 + 4) * model.num_query_groups * model.kv_channels * (length - chunk) * model.num_layers


def memory(lengths: list[int], chunk: int) -> None:
    """Print the peak memory at each length, and how much the memory without keys and values varies."""
    rests = []
    for length in lengths:
        words = [sys.executable, __file__, "memory", "--child", "--lengths", str(length), "--chunk", str(chunk)]
        done = subprocess.run(words, env={**os.environ, **VARIABLES}, text=True, capture_output=True)
        if done.returncode:
            sys.exit(done.stderr)
        found = json.loads(done.stdout.splitlines()[-1])
        rests.append(found["above"] - found["kept"])
        print(f"{length:7} tokens: peak {found['above'] / 2**20:6.1f} MiB, keys and values "
              f"{found['kept'] / 2**20:6.2f} MiB (formula {formula(length, chunk) / 2**20:6.2f}), the rest "
              f"{rests[-1] / 2**20:6.1f} MiB; {found['seconds']:.0f} s", flush=True)
    print(f"the rest varies by {max(rests) / min(rests) - 1:.1%}")


def compare_times(length: int, chunk: int, repeats: int) -> None:
    """Print the processor time of a step in chunks and of one with full recomputation."""
    programs = {"full recomputation": Program(configuration(f"--seq-length {length} {FULL}")),
                f"chunks of {chunk}": Program(configuration(f"--seq-length {length} --sequence-chunk-size {chunk}"))}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repeats + 1):
        for name, program in programs.items():
            began = time.process_time()
            program.step(length)
            seconds[name].append(time.process_time() - began)
    medians = [statistics.median(times[1:]) for times in seconds.values()]
    for name, median in zip(seconds, medians):
        print(f"{name:20} {median:8.2f} s, {median / medians[0]:.2f} of full recomputation")


def compare_pipelines(length: int, chunks: int, repeats: int) -> None:
    """On each of two ranks: print how long steps take with and without chunks."""
    import torch.distributed as dist

    from megatron_sp.runtime import stop

    model = MODEL
    for flag, instead in BALANCED.items():
        model = model.replace(flag, instead)
    flags = f"--seq-length {length} --pipeline-model-parallel-size 2 "
    programs = {"without chunks": Program(configuration(flags + FULL, 2, model)),
                f"{chunks} chunks": Program(configuration(f"{flags} --sequence-chunk-size {length // chunks}", 2,
                                                          model))}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repeats + 1):
        for name, program in programs.items():
            dist.barrier()
            began = time.perf_counter()
            program.step(length)
            dist.barrier()
            seconds[name].append(time.perf_counter() - began)
    fastest = [min(times[1:]) for times in seconds.values()]
    if dist.get_rank() == 0:
        for name, best in zip(seconds, fastest):
            print(f"{name:20} {best:8.2f} s (best of {repeats}), speed {fastest[0] / best:.2f}")
    stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("memory", "time", "pipeline"), help="what to measure")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768, 65536], metavar="TOKENS",
                        help="sequence lengths of memory (default: %(default)s)")
    parser.add_argument("--seq-length", type=int, default=16384, help="tokens of the other two (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a chunk (default: %(default)s)")
    parser.add_argument("--chunks", type=int, default=8, help="chunks of pipeline (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="measured steps of each (default: %(default)s)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child and arguments.what == "memory":
        print(json.dumps(memory_of(arguments.lengths[0], arguments.chunk)))
    elif arguments.what == "memory":
        memory(arguments.lengths, arguments.chunk)
    elif arguments.what == "time":
        compare_times(arguments.seq_length, arguments.chunk, arguments.repeats)
    elif arguments.child:
        compare_pipelines(arguments.seq_length, arguments.chunks, arguments.repeats)
    else:
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
                 "--nproc-per-node", "2", __file__, *sys.argv[1:], "--child"]
        sys.exit(subprocess.run(words, env={**os.environ, **VARIABLES}).returncode)


if __name__ == "__main__":
    main()
