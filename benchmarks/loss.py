#!/usr/bin/env python3
"""Compare the time of the tiled loss with that of torch's unfused one: output layer, cross-entropy and gradients.

    python benchmarks/loss.py --tokens 4096 --vocab 32000

The two take turns in one process with one thread, so that other work on the machine slows them equally. Their median
processor times are compared. The exit status is 1 if tiled / unfused is above ``--limit``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_sp.output_files import write_json  # noqa: E402
from megatron_sp.runtime import run_program  # noqa: E402


def steps(tokens: int, hidden: int, vocab: int, device_name: str) -> dict[str, Callable[[], float]]:
    """Return for each loss a function that computes the sum of the losses and its gradients, and returns the sum."""
    import torch
    import torch.nn.functional as F

    from megatron_sp.model.loss import linear_cross_entropy_sum
    from megatron_sp.parallel.tensor import TensorRegion

    device = torch.device(device_name)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    region = TensorRegion(mesh=None, group=None, size=1, rank=0, megatron_sp=False)  # type: ignore[arg-type]
    x = torch.randn(1, tokens, hidden, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, hidden, device=device, dtype=dtype).mul_(0.02).requires_grad_()
    labels = torch.randint(0, vocab, (1, tokens), device=device)

    def timed(loss: Callable[[], torch.Tensor]) -> Callable[[], float]:
        def run() -> float:
            x.grad = weight.grad = None
            value = loss()
            (value / tokens).backward()
            return float(value.detach())
        return run

    return {
        "unfused (F.linear, F.cross_entropy)": timed(lambda: F.cross_entropy(
            F.linear(x, weight).flatten(0, 1).float(), labels.flatten(), reduction="sum")),
        "tiled": timed(lambda: linear_cross_entropy_sum(x, weight, labels, region, vocab)),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="default: %(default)s")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size (default: %(default)s)")
    parser.add_argument("--vocab", type=int, default=32000, help="vocabulary size (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each loss (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=1.3,
                        help="largest time of the tiled loss relative to the unfused one (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args(argv)
    import torch

    torch.set_num_threads(1)
    clock = time.process_time if arguments.device == "cpu" else time.perf_counter
    programs = steps(arguments.tokens, arguments.hidden, arguments.vocab, arguments.device)
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    losses = {name: run() for name, run in programs.items()}  # the first call of each is slower and not measured
    for _ in range(arguments.repeats):
        for name, run in programs.items():
            started = clock()
            run()
            seconds[name].append(clock() - started)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    plain, tiled = medians.values()
    for name, median in medians.items():
        print(f"{name:38} {median * 1e3:8.0f} ms   {median / plain:5.2f} of unfused   loss {losses[name]:.4f}")
    if arguments.json:
        write_json(arguments.json, {
            "tokens": arguments.tokens, "hidden": arguments.hidden, "vocab": arguments.vocab, "seconds": medians,
            "ratio": tiled / plain, "load": os.getloadavg()[0], "device": arguments.device}, "--json")
    print(f"tiled / unfused = {tiled / plain:.2f} (limit {arguments.limit:g})")
    return int(tiled / plain > arguments.limit)


if __name__ == "__main__":
    run_program(main)
