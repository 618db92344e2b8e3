#!/usr/bin/env python3
"""Measure how much time and memory it takes to compute the order of the samples of a large corpus.

    python benchmarks/data/data_order.py --documents 10_000_000 --samples 100_000_000

The lengths of the documents are drawn at random; no data is needed. The script computes what a run computes once and
keeps in its index cache, and then finds samples in it as a run does. It compares the shuffle of the samples with
numpy's own shuffle of an array of the same size: both are repeated in turn, and the fastest time of each counts. All
times are of the processor (one thread), so that other programs on the machine disturb them less. The exit status is 1
if the shuffle takes more than ``--limit`` times as long.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_sp.config.cli.values import parse_int  # noqa: E402
from megatron_sp.data import sample_order as order  # noqa: E402

LOOKED_UP = 1000  # samples to find on demand


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of processor time that a call takes, and its result."""
    started = time.process_time()
    result = function()
    return time.process_time() - started, result


def peak_mib() -> float:
    """Return the most memory that this process has had so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def measure(documents: int, samples: int, seq_length: int, repeats: int) -> dict[str, Any]:
    """Return times in seconds and memory in MiB, by name."""
    mean = samples * seq_length / documents
    lengths = np.random.default_rng(0).exponential(mean, documents).astype(np.int32) + 1
    epochs = order.plan_epochs(int(lengths.sum(dtype=np.int64)), seq_length, samples)
    found: dict[str, Any] = {
        "machine": f"{platform.processor() or platform.machine()}, numpy {np.__version__}", "documents": documents,
        "samples": epochs.num_samples, "epochs": epochs.num_epochs, "seq_length": seq_length,
        "memory_of_lengths": peak_mib()}
    random = np.random.RandomState(1)
    found["seconds_document_index"], index = timed(
        lambda: order.build_document_index(np.arange(documents, dtype=np.int32), epochs, random))
    found["seconds_starts"], starts = timed(lambda: order.build_starts(lengths, index))
    found["memory_with_documents"] = peak_mib()
    wanted = np.random.default_rng(1).integers(0, epochs.num_samples, LOOKED_UP) * seq_length
    found["seconds_to_find_1000_samples"], _ = timed(lambda: [order.locate(starts, place) for place in wanted.tolist()])
    dtype, pairs = np.uint32, []
    for seed in range(repeats):
        ours, shuffled = timed(lambda seed=seed: order.build_shuffle_index(  # type: ignore[misc]
            epochs.first_shuffle, epochs.num_samples, np.random.RandomState(seed)))
        dtype, count = shuffled.dtype, len(shuffled)
        del shuffled
        plain = np.arange(count, dtype=dtype)
        theirs, _ = timed(lambda seed=seed, plain=plain: np.random.RandomState(seed).shuffle(plain))  # type: ignore[misc]
        del plain
        pairs.append((ours, theirs))
    found["seconds_shuffle"], found["seconds_numpys_shuffle"] = (min(times) for times in zip(*pairs, strict=True))
    found["shuffle_over_numpys"] = found["seconds_shuffle"] / found["seconds_numpys_shuffle"]
    return found | {"bytes_per_sample": np.dtype(dtype).itemsize, "memory_at_the_end": peak_mib()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=parse_int, default=10_000_000, metavar="N")
    parser.add_argument("--samples", type=parse_int, default=100_000_000, metavar="N")
    parser.add_argument("--seq-length", type=parse_int, default=1024, metavar="N")
    parser.add_argument("--repeats", type=parse_int, default=3, metavar="N", help="shuffles of each kind (default: 3)")
    parser.add_argument("--limit", type=float, default=1.1, help="largest ratio of the shuffles (default: 1.1)")
    arguments = parser.parse_args()
    found = measure(arguments.documents, arguments.samples, arguments.seq_length, arguments.repeats)
    print(json.dumps(found, indent=1))
    return int(found["shuffle_over_numpys"] > arguments.limit)


if __name__ == "__main__":
    sys.exit(main())
