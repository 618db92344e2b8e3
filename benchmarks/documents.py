#!/usr/bin/env python3
"""Measure what documents inside sequences change: the time of attention, and the balance of data-parallel ranks.

    python benchmarks/documents.py

The first table times attention, forward and backward, of one sequence on one processor core: of a single document, and
of 4, 32 and 256 documents of equal length, each of which attends to itself. "share" is the work by count, relative to a
single document.

The second table deals samples of random documents out to data-parallel ranks, in turn (as Megatron does) and by their
work (as --reset-attention-mask does). It shows the attention work of the busiest rank relative to the mean: over a
whole step, and where all ranks wait for each other in every microbatch. It times nothing. The lengths of the documents
are log-normal with a median of 1,808 tokens.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

COUNTS = (1, 4, 32, 256)
#: Data-parallel ranks and samples of a global batch.
BATCHES = ((8, 32), (8, 64), (32, 128))
#: Tokens of a sample, documents, and steps of the second table.
SAMPLE, DOCUMENTS, STEPS = 32768, 200_000, 40


def attention_times(tokens: int, heads: int, width: int, repeats: int) -> dict[int, tuple[float, float]]:
    """Return for each number of documents the median seconds and the share of work by count."""
    import torch

    from megatron_sp.layout.masks.attention_mask import AttentionMask
    from megatron_sp.model.attention.cores import SDPACore

    torch.set_num_threads(1)
    core = SDPACore()
    q, k, v = (torch.randn(1, tokens, heads, width, requires_grad=True) for _ in range(3))
    masks = {count: AttentionMask((tuple(range(0, tokens, tokens // count)),)) for count in COUNTS}
    times: dict[int, list[float]] = {count: [] for count in COUNTS}
    for repeat in range(-1, repeats):  # the first round warms up; the masks take turns, so that all meet the same load
        for count, mask in masks.items():
            start = time.process_time()
            core(q, k, v, mask=mask).sum().backward()
            if repeat >= 0:
                times[count].append(time.process_time() - start)
    return {count: (statistics.median(times[count]), masks[count].attention_share(1, tokens)) for count in COUNTS}


def imbalance(work: list[int], ranks: int, samples: int) -> dict[str, tuple[float, float]]:
    """Return the busiest rank's work relative to the mean, by way of dealing: over a step, and over microbatches."""
    from megatron_sp.data.sampler import GlobalBatchSampler

    found: dict[str, list[tuple[float, float]]] = {"in turn": [], "by work": []}
    for first in range(0, STEPS * samples, samples):
        own = work[first:first + samples]
        mean = sum(own) / ranks
        numbers = {"in turn": [GlobalBatchSampler.microbatches(0, samples, 1, rank, ranks) for rank in range(ranks)],
                   "by work": [GlobalBatchSampler.balanced(0, own, 1, rank, ranks) for rank in range(ranks)]}
        for way, of_ranks in numbers.items():
            dealt = [[own[sample] for [sample] in of_rank] for of_rank in of_ranks]
            found[way].append((max(map(sum, dealt)) / mean, sum(map(max, zip(*dealt))) / mean))
    return {way: (statistics.mean(step for step, _ in of), statistics.mean(each for _, each in of))
            for way, of in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (("seq-length", 8192, "tokens of the sequence"), ("heads", 4, "heads"),
                                ("head-dim", 64, "width of a head"), ("repeats", 5, "measured rounds")):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: %(default)s)")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"

    import numpy as np

    from megatron_sp.data.documents import attention_work

    print(f"attention of {arguments.seq_length} tokens, {arguments.heads} heads of {arguments.head_dim}, fp32, one "
          f"core; load {os.getloadavg()[0]:.1f}")
    print(f"{'documents':>10}{'ms of cpu time':>16}{'relative':>10}{'share':>10}")
    times = attention_times(arguments.seq_length, arguments.heads, arguments.head_dim, arguments.repeats)
    for count, (seconds, share) in times.items():
        print(f"{count:>10}{1e3 * seconds:>16.1f}{seconds / times[1][0]:>10.4f}{share:>10.4f}")

    lengths = np.exp(np.random.default_rng(0).normal(7.5, 1.4, size=DOCUMENTS)).astype(np.int64).clip(8)
    starts = np.cumsum(lengths) - lengths
    row = np.searchsorted(starts, np.arange(0, starts[-1], SAMPLE))
    work = [attention_work(np.union1d([0], starts[first:last] - number * SAMPLE), SAMPLE)
            for number, (first, last) in enumerate(zip(row, row[1:]))]
    print(f"\nattention work of the busiest rank / mean, samples of {SAMPLE} tokens")
    print(f"{'ranks':>6}{'samples':>9}{'dealt out':>11}{'over a step':>13}{'in every microbatch':>21}")
    for ranks, samples in BATCHES:
        for way, (step, each) in imbalance(work, ranks, samples).items():
            print(f"{ranks:>6}{samples:>9}{way:>11}{step:>13.2f}{each:>21.2f}")


if __name__ == "__main__":
    main()
