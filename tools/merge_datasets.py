#!/usr/bin/env python3
"""Join token sets into one, in the order given. The result has all their sequences and documents.

The memory needed does not grow with the sets. A set that is damaged, or that holds tokens of another type, is refused
before anything is written.

Example (joins the outputs of a job array that ran tools/preprocess_data.py --shard I/8):

    python tools/merge_datasets.py --input 'data/corpus_*-of-00008_text_document.idx' --output-prefix data/corpus_text
"""

from __future__ import annotations

import argparse
import glob
import os
import sys
from collections.abc import Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
if (CHECKOUT / "megatron_sp").is_dir():  # false once pip has installed this file, which then finds the package anyway
    sys.path.insert(0, str(CHECKOUT))

from megatron_sp.config.cli.tool_parser import ToolParser  # noqa: E402
from megatron_sp.config.cli.values import counted  # noqa: E402
from megatron_sp.data.token_files.indexed_dataset import bin_path  # noqa: E402
from megatron_sp.data.token_files.token_writer import merge_token_sets  # noqa: E402
from megatron_sp.errors import DataError  # noqa: E402
from megatron_sp.progress import progress_bar  # noqa: E402
from megatron_sp.runtime import run_program  # noqa: E402


def find_prefixes(words: Sequence[str], output: str) -> list[str]:
    """Return the prefixes of the sets to join, in order.

    Args:
        words: prefixes with or without .bin or .idx, quoted patterns of such names, or directories, whose sets are
            taken in the order of their names.
        output: prefix of the set to write.

    Raises:
        DataError: nothing matches, or a set occurs twice or is the output.
    """
    found: list[str] = []
    for word in words:
        if os.path.isdir(word):
            matches = sorted(glob.glob(os.path.join(glob.escape(word), "*.idx")))
        elif glob.has_magic(word) and not os.path.exists(bin_path(word)):
            matches = sorted(glob.glob(word))
        else:
            matches = [word]
        if not matches:
            raise DataError(f"--input {word}: no token set is there or matches.")
        found += dict.fromkeys(_without_ending(match) for match in matches)
    if repeated := next((prefix for prefix in found if found.count(prefix) > 1), None):
        raise DataError(f"--input names {repeated} twice; its documents would be in the result twice.")
    if os.path.abspath(output) in map(os.path.abspath, found):
        raise DataError(f"--output-prefix {output} is also an input; choose another name.")
    return found


def _without_ending(name: str) -> str:
    for ending in (".idx", ".bin", ".checksums.json"):
        name = name.removesuffix(ending)
    return name


def build_parser() -> argparse.ArgumentParser:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--input", nargs="+", required=True, metavar="PREFIX",
                        help="token sets: prefixes with or without .bin or .idx, quoted patterns, or directories, "
                             "whose sets are taken in the order of their names")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX",
                        help="path of the set to write, without .bin and .idx")
    parser.add_argument("--checksum", action="store_true",
                        help="write PREFIX.checksums.json too, by which tools/inspect_dataset.py check "
                             "finds damaged tokens")
    return parser


def main(argv: list[str]) -> None:
    arguments = build_parser().parse_args(argv)
    prefixes = find_prefixes(arguments.input, arguments.output_prefix)
    number = counted(len(prefixes), "set")
    # The delay keeps the bar away from errors about the sets, which are opened first.
    with progress_bar(unit=" tokens", unit_scale=True, desc=f"joining {number}", delay=1) as bar:
        merged = merge_token_sets(prefixes, arguments.output_prefix, arguments.checksum, bar.update)
    print(f"{arguments.output_prefix}: {number}, {merged.num_documents:,} documents, {merged.num_tokens:,} "
          "tokens")


if __name__ == "__main__":
    run_program(main)
