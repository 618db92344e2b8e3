"""Measure how much time each memory technique costs, as a multiple of a training step without any.

    OMP_NUM_THREADS=1 python benchmarks/techniques.py --seq-length 4096 --repeats 3

The step is a forward and a backward in one process in fp32, of a model with hidden size 256, 4 layers, 8 heads, 2
key/value heads, feed-forward width 688 and a vocabulary of 8192. The techniques take turns, and medians of processor
time are printed: other work on the machine changes them little. On a CPU, offload copies within the same memory, so its
line shows only what the copies cost.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from megatron_sp.config.load import load_run  # noqa: E402
from megatron_sp.config.resolve import with_vocab  # noqa: E402
from megatron_sp.model.build import build_model  # noqa: E402
from megatron_sp.model.context import Context  # noqa: E402
from megatron_sp.parallel.mesh import ParallelMesh  # noqa: E402
from megatron_sp.runtime import Environment, start, stop  # noqa: E402

SHAPE = ("--num-layers 4 --hidden-size 256 --num-attention-heads 8 --num-key-value-heads 2 --ffn-hidden-size 688 "
         "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --attention-dropout 0 "
         "--hidden-dropout 0 --untie-embeddings-and-output-weights --mock-data --vocab-size 8192 --lr 1e-3 "
         "--train-iters 1 --eval-iters 0 --tokenizer-type NullTokenizer")
TECHNIQUES = {
    "plain": "",
    "tiled MLP": "--mlp-tile-size 512",
    "2 head groups": "--attention-head-groups 2",
    "selective recompute": "--recompute-granularity selective",
    "full recompute": "--recompute-granularity full",
    "full, tiled MLP": "--recompute-granularity full --mlp-tile-size 512",
    "full, tiled MLP, 2 head groups": "--recompute-granularity full --mlp-tile-size 512 --attention-head-groups 2",
    "full, offload": "--recompute-granularity full --offload-activations",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-length", type=int, default=4096, help="tokens (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="measured steps of each (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    models = {}
    mesh = None
    for name, flags in TECHNIQUES.items():
        run, _ = load_run([*SHAPE.split(), "--seq-length", str(arguments.seq_length), *flags.split()], 1)
        run = with_vocab(run, 8192)
        if mesh is None:
            mesh = ParallelMesh.build(run.parallel, start(run.parallel, Environment()))
        models[name] = build_model(run, mesh)
    tokens = torch.randint(0, 8192, (1, arguments.seq_length), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(arguments.seq_length).unsqueeze(0)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(arguments.repeats + 1):
        for name, model in models.items():
            began = time.process_time()
            model(tokens, Context(positions), labels=tokens).sum().backward()
            seconds[name].append(time.process_time() - began)
            model.zero_grad()
    plain = statistics.median(seconds["plain"][1:])
    print(f"sequence {arguments.seq_length}, processor seconds a step (median of {arguments.repeats}), against plain")
    for name, times in seconds.items():
        median = statistics.median(times[1:])
        print(f"{name:<32} {median:7.3f} {median / plain:6.2f}")
    stop()


if __name__ == "__main__":
    main()
