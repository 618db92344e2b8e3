#!/usr/bin/env python3
"""Measure that attention under a pattern of blocks takes time in proportion to the pairs that the pattern allows.

    python benchmarks/sparse_attention.py

The table times attention, forward and backward, of one sequence on one processor core, for each pattern and for several
lengths. "share" is the number of pairs relative to causal attention of the same length, "relative" the time relative to
it, and "ns for a pair" the time of a pair of query and key in one head. If time is in proportion to the pairs, this
column has nearly the same value in all rows. The patterns take turns, so that all meet the same load.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

PATTERNS = ("causal", "longformer", "bigbird", "fixed", "strided")


def measure(tokens: int, arguments: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Return for each pattern the median seconds, and the pairs of a head."""
    import torch

    from megatron_sp.config.schema import Model
    from megatron_sp.layout.masks.attention_mask import CAUSAL
    from megatron_sp.layout.patterns.choice import layer_attention
    from megatron_sp.model.attention.block_kernels import CPUFlashBlockKernel
    from megatron_sp.model.attention.cores import SDPACore
    from megatron_sp.model.attention.patterns import PatternAttention

    torch.set_num_threads(1)
    core = SDPACore(patterned=PatternAttention(CPUFlashBlockKernel()))
    q, k, v = (torch.randn(1, tokens, arguments.heads, arguments.head_dim, requires_grad=True) for _ in range(3))
    seen = {name: layer_attention(Model(
        num_layers=1, num_attention_heads=arguments.heads, attention_pattern=name, attention_stride=arguments.stride,
        attention_block_size=arguments.block_size, attention_blocks_by_head=arguments.by_head))[0] for name in PATTERNS}
    times: dict[str, list[float]] = {name: [] for name in PATTERNS}
    for repeat in range(-1, arguments.repeats):  # the first round warms up
        for name, layer in seen.items():
            start = time.process_time()
            core(q, k, v, mask=CAUSAL.within(0, layer.pattern)).sum().backward()
            if repeat >= 0:
                times[name].append(time.process_time() - start)
    return {name: (statistics.median(times[name]), (layer.area(0, tokens) + tokens) / 2)
            for name, layer in seen.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-lengths", type=int, nargs="+", default=[4096, 8192, 16384], metavar="N",
                        help="tokens of the sequence (default: 4096 8192 16384)")
    for name, default, text in (("heads", 4, "heads"), ("head-dim", 64, "width of a head"),
                                ("block-size", 128, "tokens of a block"), ("stride", 8, "stride of strided, in blocks"),
                                ("repeats", 3, "measured rounds")):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: %(default)s)")
    parser.add_argument("--by-head", action="store_true", help="heads see different blocks, where the pattern can")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"

    print(f"attention of {arguments.heads} heads of {arguments.head_dim}, blocks of {arguments.block_size}"
          f"{' by head' * arguments.by_head}, fp32, one core; load {os.getloadavg()[0]:.1f}")
    print(f"{'tokens':>8}{'pattern':>12}{'ms of cpu time':>16}{'relative':>10}{'share':>8}{'ns for a pair':>15}")
    for tokens in arguments.seq_lengths:
        found = measure(tokens, arguments)
        dense, all_pairs = found["causal"]
        for name, (seconds, pairs) in found.items():
            print(f"{tokens:>8}{name:>12}{1e3 * seconds:>16.1f}{seconds / dense:>10.3f}{pairs / all_pairs:>8.3f}"
                  f"{1e9 * seconds / pairs / arguments.heads:>15.2f}")


if __name__ == "__main__":
    main()
