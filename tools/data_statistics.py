#!/usr/bin/env python3
"""Print how many documents and tokens a preprocessed data set has, its longest document and its unigram entropy.

The unigram entropy (nats per token) is the lowest loss that a model can reach if it only knows how often each token
occurs and ignores the context. The loss of a trained model must end well below it.

Example:

    python tools/data_statistics.py data/corpus_text_document
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

CHECKOUT = Path(__file__).resolve().parent.parent
if (CHECKOUT / "megatron_sp").is_dir():  # false once pip has installed this file, which then finds the package anyway
    sys.path.insert(0, str(CHECKOUT))

from megatron_sp.config.cli.tool_parser import ToolParser  # noqa: E402
from megatron_sp.data.token_files.indexed_dataset import IndexedDataset  # noqa: E402
from megatron_sp.progress import progress_bar  # noqa: E402
from megatron_sp.runtime import run_program  # noqa: E402


def statistics(dataset: IndexedDataset) -> dict[str, float | int]:
    """Return the numbers of documents and tokens, the longest document's length in tokens, and the entropy, by name."""
    counts = np.zeros(0, dtype=np.int64)
    for index in progress_bar(range(len(dataset.lengths)), desc="Counting tokens", unit=" documents", leave=False):
        found = np.bincount(dataset.get(index))
        if len(found) > len(counts):
            counts = np.pad(counts, (0, len(found) - len(counts)))
        counts[:len(found)] += found
    lengths = np.asarray(dataset.lengths)
    return {"documents": len(dataset.document_indices) - 1, "tokens": int(lengths.sum(dtype=np.int64)),
            "longest": int(lengths.max(initial=0)), "distinct_tokens": int((counts > 0).sum()),
            "unigram_entropy": entropy(counts)}


def entropy(counts: np.ndarray) -> float:
    """Return the entropy in nats of the distribution in which each outcome occurs ``counts`` times."""
    shares = counts[counts > 0] / max(counts.sum(), 1)
    return float(-(shares * np.log(shares)).sum()) + 0.0


def build_parser() -> argparse.ArgumentParser:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("prefix", metavar="PREFIX", help="path of the data set without .bin and .idx")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    return parser


def main(argv: list[str]) -> None:
    arguments = build_parser().parse_args(argv)
    found = statistics(IndexedDataset(arguments.prefix))
    if arguments.json:
        print(json.dumps(found))
    else:
        print(f"{arguments.prefix}: {found['documents']} documents, {found['tokens']} tokens, the longest "
              f"{found['longest']} tokens; unigram entropy {found['unigram_entropy']:.3f} nats per token")


if __name__ == "__main__":
    run_program(main)
