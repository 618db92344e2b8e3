#!/usr/bin/env python3
"""Show, check and compare token sets, and show samples as a rank of a run sees them.

usage: inspect_dataset.py sizes PREFIX ... [--output FILE.png] [--json]
       inspect_dataset.py documents PREFIX N..M [--tokens T] [TOKENIZER FLAGS]
       inspect_dataset.py samples N..M [--rank R] [--world-size W] [--split-name NAME] [--tokens T]
                          FLAGS OF pretrain_gpt.py
       inspect_dataset.py check PREFIX ... [--vocab-size V]
       inspect_dataset.py compare PREFIX PREFIX

sizes      documents, tokens, lengths, and a histogram of the lengths as text; with --output also as a picture.
documents  the tokens of documents N to M, and their text where the flags name a tokenizer.
samples    samples N to M of a run, in the order in which it reads them: of each sample the tokens that rank R of W
           owns, with their labels, as the trainer reads them. The flags are those of the run; its index cache is used.
check      reads every byte: the index, the size of the files, the range of the token ids, and the checksums where
           tools/preprocess_data.py --checksum wrote them.
compare    whether two sets hold the same documents and tokens, and where they differ first.

Examples:

    python tools/inspect_dataset.py sizes data/corpus_text_document --output lengths.png
    python tools/inspect_dataset.py documents data/corpus_text_document 0..2 --tokenizer-model tokenizer.model \\
        --tokenizer-type SentencePieceTokenizer

N..M includes both ends; N alone is one document or sample. --tokens T shows the first T tokens of each piece (default
48; 0: all).

Exit status: 0 fine, 1 damaged or of another vocabulary (check), different (compare), 2 the question cannot be answered.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

CHECKOUT = Path(__file__).resolve().parent.parent
if (CHECKOUT / "megatron_sp").is_dir():  # false once pip has installed this file, which then finds the package anyway
    sys.path.insert(0, str(CHECKOUT))

from megatron_sp.config.cli.tool_parser import ToolParser  # noqa: E402
from megatron_sp.config.rules.files import token_file_problem  # noqa: E402
from megatron_sp.config.schema import Data  # noqa: E402
from megatron_sp.data.token_files.checksums import checksum_path, find_damage  # noqa: E402
from megatron_sp.data.token_files.indexed_dataset import IndexedDataset, bin_path, idx_path  # noqa: E402
from megatron_sp.errors import ConfigError, DataError  # noqa: E402
from megatron_sp.pictures import load_pyplot, save_picture  # noqa: E402
from megatron_sp.progress import progress_bar  # noqa: E402
from megatron_sp.runtime import announced_world_size, run_program, use_only_cpu  # noqa: E402

if TYPE_CHECKING:
    from megatron_sp.data.batch import Microbatch
    from megatron_sp.data.tokenizers.tokenizer import Tokenizer

PERCENTILES = (50, 90, 99)
SHOWN = 12  # starts of documents to list
BAR = 40  # characters of the longest bar
CHUNK = 1 << 24  # tokens to read at a time


# --- sizes -------------------------------------------------------------------------------------

def sizes_of(dataset: IndexedDataset) -> dict[str, Any]:
    """Return the numbers of documents, sequences and tokens, and the lengths of documents, by name."""
    lengths = dataset.document_lengths()
    found = np.percentile(lengths, PERCENTILES).round().astype(np.int64).tolist() if len(lengths) else [0, 0, 0]
    return {"prefix": dataset.prefix, "documents": dataset.num_documents, "empty_documents": int((lengths == 0).sum()),
            "sequences": len(dataset), "tokens": dataset.num_tokens, "dtype": dataset.dtype.name,
            "bin_bytes": dataset.num_tokens * dataset.dtype.itemsize,
            "longest": int(lengths.max(initial=0)), "mean": float(lengths.mean()) if len(lengths) else 0.0,
            **{f"percentile_{percent}": length for percent, length in zip(PERCENTILES, found, strict=True)},
            "histogram": histogram(lengths)}


def histogram(lengths: np.ndarray) -> list[dict[str, int]]:
    """Return for each range of lengths (0, 1, 2-3, 4-7, 8-15 ...) its number of documents and of their tokens."""
    ranges = np.zeros(len(lengths), dtype=np.int64)  # 0 for empty documents, else 1 + log2 of the length
    ranges[lengths > 0] = np.frexp(lengths[lengths > 0].astype(np.float64))[1]
    documents = np.bincount(ranges)
    tokens = np.zeros(len(documents), dtype=np.int64)
    np.add.at(tokens, ranges, lengths)
    return [{"from": 2**(place - 1) if place else 0, "to": 2**place - 1, "documents": int(documents[place]),
             "tokens": int(tokens[place])} for place in range(len(documents))]


def print_sizes(found: dict[str, Any]) -> None:
    print(f"{found['prefix']}: {found['documents']:,} documents ({found['empty_documents']:,} empty), "
          f"{found['tokens']:,} tokens of type {found['dtype']} ({found['bin_bytes']:,} bytes) in "
          f"{found['sequences']:,} sequences")
    print(f"tokens of a document: mean {found['mean']:,.1f}, median {found['percentile_50']:,}, 90% below "
          f"{found['percentile_90']:,}, 99% below {found['percentile_99']:,}, longest {found['longest']:,}")
    rows = list(itertools.dropwhile(lambda row: not row["documents"], found["histogram"]))
    most = max((row["documents"] for row in rows), default=0)
    total = max(1, found["tokens"])
    for row in rows:
        bar = "#" * -(-BAR * row["documents"] // most) if most else ""
        print(f"  {row['from']:>13,} to {row['to']:>13,}: {row['documents']:>13,} documents, "
              f"{row['tokens'] / total:6.1%} of the tokens  {bar}")


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Draw documents and tokens by the length of documents, a line for each set, and write a PNG."""
    figure, axes = load_pyplot().subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for axis, key in zip(axes, ("documents", "tokens"), strict=True):
        for one in found:
            rows = list(itertools.dropwhile(lambda row: not row["documents"], one["histogram"][1:]))
            axis.stairs([row[key] for row in rows], [row["from"] for row in rows] + [rows[-1]["to"] + 1] if rows
                        else [1], label=Path(one["prefix"]).name, linewidth=1.5)
        axis.set(xscale="log", xlabel="tokens of a document", ylabel=key, title=f"{key} by length of the document")
        axis.grid(alpha=0.3)
        axis.legend()
    save_picture(figure, path)


# --- documents and samples ----------------------------------------------------------------------

def parse_range(text: str, count: int, noun: str) -> range:
    """Return the numbers that ``N`` or ``N..M`` names; both ends count.

    Raises:
        ConfigError: the form is wrong, or a number is not below ``count``.
    """
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    if not match:
        raise ConfigError(f"{text!r} names no {noun}; write N, or N..M for {noun} N to M.")
    first, last = int(match[1]), int(match[2] or match[1])
    if not first <= last < count:
        raise ConfigError(f"{text} is not within the {count:,} {noun}; they have the numbers 0 to {count - 1:,}.")
    return range(first, last + 1)


def show_tokens(ids: np.ndarray, length: int, tokenizer: Tokenizer | None, indent: str = "  ") -> None:
    """Print the first token ids of a piece of ``length`` tokens, and their text where there is a tokenizer."""
    more = f" ... ({length - len(ids):,} more)" if len(ids) < length else ""
    print(f"{indent}tokens {' '.join(map(str, ids.tolist()))}{more}")
    if tokenizer is not None and int(ids.max(initial=0)) >= tokenizer.vocab_size:
        print(f"{indent}text   unknown: the id {int(ids.max())} is not in the tokenizer's vocabulary of "
              f"{tokenizer.vocab_size}; the data was made with another one")
    elif tokenizer is not None:
        print(f"{indent}text   {tokenizer.decode(ids.tolist())!r}{' ...' if more else ''}")


def show_documents(arguments: argparse.Namespace) -> int:
    dataset = IndexedDataset(arguments.prefix)
    tokenizer = _tokenizer(arguments)
    lengths = dataset.document_lengths()
    starts = np.cumsum(lengths) - lengths
    for number in parse_range(arguments.range, dataset.num_documents, "documents"):
        length, sequences = int(lengths[number]), int(np.diff(dataset.document_indices[number:number + 2])[0])
        print(f"document {number:,}: {length:,} tokens{f' in {sequences} sequences' if sequences > 1 else ''}")
        if length:
            ids = dataset.read(int(starts[number]), min(length, arguments.tokens or length))
            show_tokens(ids, length, tokenizer)
    return 0


def _tokenizer(arguments: argparse.Namespace) -> Tokenizer | None:
    if not (arguments.tokenizer_model or arguments.vocab_file or arguments.tokenizer_type == "NullTokenizer"):
        return None
    from megatron_sp.data.tokenizers.tokenizer import build_tokenizer

    return build_tokenizer(Data(tokenizer_type=arguments.tokenizer_type, vocab_file=arguments.vocab_file,
                                merge_file=arguments.merge_file, tokenizer_model=arguments.tokenizer_model,
                                trust_remote_code=arguments.trust_remote_code), arguments.vocab_size)


def show_samples(arguments: argparse.Namespace, words: list[str]) -> int:
    """Print the part of each sample that one rank of a run reads, through the reader of training."""
    use_only_cpu()
    from megatron_sp.config.load import load_run_of_world
    from megatron_sp.config.resolve import with_vocab
    from megatron_sp.data.batch import BatchReader
    from megatron_sp.data.documents import Documents
    from megatron_sp.layout.grid import Grid
    from megatron_sp.layout.length_schedule import phases
    from megatron_sp.layout.tokens import SequenceLayout
    from megatron_sp.train.checkpoints.state import TrainState
    from megatron_sp.train.length_phases import run_of_phase
    from megatron_sp.train.setup import choose_tokenizer, run_datasets

    run, notes = load_run_of_world(words, arguments.world_size or announced_world_size())
    for note in notes:
        print(note)
    if not 0 <= arguments.rank < run.parallel.world_size:
        raise ConfigError(f"--rank {arguments.rank} is not one of the {run.parallel.world_size} ranks of this run "
                          "(--world-size).")
    tokenizer = choose_tokenizer(run)
    run = with_vocab(run, tokenizer.vocab_size)
    phase = phases(run)[max(run.data.seq_length_phase, 1) - 1] if run.data.seq_length_schedule else None
    if phase:
        print(f"sequences of phase {phase.number} of --seq-length-schedule, which begins with sequence "
              f"{phase.first * phase.parts:,} (--seq-length-phase N shows another phase's)")
    splits = run_datasets(run, tokenizer, TrainState(), phase)
    run = run_of_phase(run, phase)
    sets = {"train": splits.train, "valid": splits.valid, "test": splits.test, **splits.named_valid}
    dataset = sets.get(arguments.split_name)
    if dataset is None:
        raise ConfigError(f"--split-name {arguments.split_name}: this run has the sets "
                          f"{', '.join(name for name, one in sets.items() if one is not None)}.")
    layout, rank = SequenceLayout.of(run), Grid(run.parallel).rank_in("sp", arguments.rank)
    numbers = parse_range(arguments.range, len(dataset), "samples")
    documents = Documents.of(run.data, tokenizer.eod)
    with BatchReader(dataset, layout, rank, 0, 1, tokenizer.eod, run.data.eod_mask_loss, read_ahead=False,
                     vocab_size=run.model.vocab_size, documents=documents) as reader:
        for number in numbers:
            [batch] = reader.read(number, 1, 1)
            starts = documents.starts(dataset, number).tolist()
            print(f"sample {number:,} of {arguments.split_name}, from {dataset.source(number)}: rank {arguments.rank} "
                  f"owns {layout.local_length:,} of {layout.seq_length:,} tokens, {batch.num_valid:,} with a label; "
                  f"documents start at {', '.join(map(str, starts[:SHOWN]))}{' ...' if len(starts) > SHOWN else ''}")
            show_batch(batch, layout.ranges(rank), tokenizer, arguments.tokens, positions=documents.reset_positions)
    return 0


def show_batch(batch: Microbatch, ranges: Sequence[tuple[int, int]], tokenizer: Tokenizer, limit: int, *,
               positions: bool) -> None:
    """Print the tokens and labels of one sample's pieces, and their position ids where they are not the places."""
    column = 0
    for start, stop in ranges:
        here = slice(column, column + min(stop - start, limit or stop))
        column += stop - start
        print(f"  places {start:,} to {stop - 1:,} of the sample")
        show_tokens(batch.tokens[0, here].numpy(), stop - start, tokenizer, "    ")
        print(f"    labels {' '.join(map(str, batch.labels[0, here].tolist()))}")
        if positions:
            print(f"    position ids {' '.join(map(str, batch.positions[0, here].tolist()))}")


# --- check and compare --------------------------------------------------------------------------

def problems_of(prefix: str, vocab_size: int) -> list[str]:
    """Return what is wrong with a token set, one line each. Reads every token."""
    has_sums = os.path.exists(checksum_path(prefix))
    found: list[str] = []
    try:
        found = [f"DAMAGED: {problem}" for problem in find_damage(prefix)] if has_sums else []
        dataset = IndexedDataset(prefix)
        smallest, largest = token_range(dataset)
    except DataError as error:
        return found or [f"DAMAGED: {error}"]
    if smallest < 0:
        found.append(f"DAMAGED: {bin_path(prefix)} has the token id {smallest}, and no id is below 0.")
    elif vocab_size and largest >= vocab_size:
        found.append(f"ANOTHER VOCABULARY: {bin_path(prefix)} has ids up to {largest}, and --vocab-size "
                     f"{vocab_size} has only those up to {vocab_size - 1}. Give the size of the tokenizer that made "
                     f"the set, at least {largest + 1}, or make the set again with the tokenizer of the model.")
    print(f"{prefix}: {dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens, ids {smallest} to "
          f"{largest}{'' if has_sums else ' (no checksums to compare with)'}")
    return found


def token_range(dataset: IndexedDataset) -> tuple[int, int]:
    """Return the smallest and the largest token id of a set; 0 and 0 where it has none."""
    smallest, largest = [], []
    for start in progress_bar(range(0, dataset.num_tokens, CHUNK), desc="reading tokens", leave=False, delay=2,
                              unit_scale=CHUNK, unit=" tokens"):
        piece = dataset.read(start, min(CHUNK, dataset.num_tokens - start))
        smallest.append(int(piece.min()))
        largest.append(int(piece.max()))
    return min(smallest, default=0), max(largest, default=0)


def check(arguments: argparse.Namespace) -> int:
    for prefix in arguments.prefixes:
        if not os.path.exists(idx_path(prefix)) and not os.path.exists(bin_path(prefix)):
            raise DataError(token_file_problem(prefix))
    found = [problem for prefix in arguments.prefixes for problem in problems_of(prefix, arguments.vocab_size)]
    for problem in found:
        print(problem)
    return 1 if found else 0


def first_difference(one: IndexedDataset, other: IndexedDataset) -> str:
    """Return a sentence about the first difference between the contents of two sets; "" if there is none.

    The type in which the tokens are stored does not count.
    """
    for name, found, there in (("document", one.document_lengths(), other.document_lengths()),
                               ("sequence", one.lengths, other.lengths)):
        both = min(len(found), len(there))
        if len(wrong := np.flatnonzero(found[:both] != there[:both])):
            at = int(wrong[0])
            return f"{name} {at} has {int(found[at])} tokens in {one.prefix} and {int(there[at])} in {other.prefix}"
        if len(found) != len(there):
            return f"{one.prefix} has {len(found)} {name}s and {other.prefix} has {len(there)}; the first {both} agree"
    for start in range(0, one.num_tokens, CHUNK):
        count = min(CHUNK, one.num_tokens - start)
        found, there = one.read(start, count), other.read(start, count)
        if len(wrong := np.flatnonzero(found != there)):
            at = start + int(wrong[0])
            ends = np.cumsum(one.document_lengths())
            document = int(np.searchsorted(ends, at, side="right"))
            place = at - int(ends[document - 1] if document else 0)
            return (f"token {place} of document {document} is {int(found[wrong[0]])} in {one.prefix} and "
                    f"{int(there[wrong[0]])} in {other.prefix}")
    return ""


def compare(arguments: argparse.Namespace) -> int:
    one, other = IndexedDataset(arguments.prefix), IndexedDataset(arguments.other)
    difference = first_difference(one, other)
    print(difference or f"the same: {one.num_documents:,} documents, {one.num_tokens:,} tokens"
          + ("" if one.dtype == other.dtype else f" (stored as {one.dtype.name} and {other.dtype.name})"))
    return 1 if difference else 0


# --- command line -------------------------------------------------------------------------------

def show_sizes(arguments: argparse.Namespace) -> int:
    found = [sizes_of(IndexedDataset(prefix)) for prefix in arguments.prefixes]
    if arguments.json:
        print(json.dumps(found))
    else:
        for one in found:
            print_sizes(one)
    if arguments.output:
        draw(found, arguments.output)
    return 0


def build_parser() -> tuple[argparse.ArgumentParser, list[str]]:
    """Return the parser, and the names of the commands."""
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                    usage=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=ToolParser)

    def add(name: str, run: Any) -> argparse.ArgumentParser:
        command = commands.add_parser(name, allow_abbrev=False)
        command.set_defaults(run=run)
        return command

    sizes = add("sizes", show_sizes)
    sizes.add_argument("prefixes", nargs="+", metavar="PREFIX", help="path of a token set without .bin and .idx")
    sizes.add_argument("--output", type=Path, metavar="FILE.png", help="also draw the histograms into this picture")
    sizes.add_argument("--json", action="store_true", help="print the figures as JSON")
    documents = add("documents", show_documents)
    documents.add_argument("prefix", metavar="PREFIX")
    documents.add_argument("range", metavar="N..M", help="documents to show")
    documents.add_argument("--tokenizer-type", default=Data().tokenizer_type, metavar="TYPE")
    for flag in ("--vocab-file", "--merge-file", "--tokenizer-model"):
        documents.add_argument(flag, default="", metavar="PATH")
    documents.add_argument("--vocab-size", type=int, default=0, metavar="N", help="of NullTokenizer")
    documents.add_argument("--trust-remote-code", action="store_true")
    samples = add("samples", show_samples)
    samples.add_argument("range", metavar="N..M", help="samples to show")
    samples.add_argument("--rank", type=int, default=0, metavar="R", help="rank of the run (default: 0)")
    samples.add_argument("--world-size", type=int, default=0, metavar="W", help="processes of the run")
    samples.add_argument("--split-name", default="train", metavar="NAME",
                         help="train, valid, test, or the name of a validation set (default: train)")
    for command in (documents, samples):
        command.add_argument("--tokens", type=int, default=48, metavar="T",
                             help="tokens to show of each piece; 0: all (default: %(default)s)")
    checks = add("check", check)
    checks.add_argument("prefixes", nargs="+", metavar="PREFIX")
    checks.add_argument("--vocab-size", type=int, default=0, metavar="V", help="larger or equal token ids are damage")
    compares = add("compare", compare)
    compares.add_argument("prefix", metavar="PREFIX")
    compares.add_argument("other", metavar="PREFIX")
    return parser, list(commands.choices)


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if argv else 2
    parser, commands = build_parser()
    if argv[0] not in commands:
        raise ConfigError(f"{argv[0]} is no command of inspect_dataset.py; the first argument must be one of "
                          f"{', '.join(commands)}, for example: inspect_dataset.py sizes PREFIX")
    arguments, rest = parser.parse_known_args(argv)
    if getattr(arguments, "tokens", 0) < 0:
        raise ConfigError(f"--tokens {arguments.tokens} must be at least 0.")
    if arguments.command == "samples":
        return show_samples(arguments, rest)
    if rest:
        raise ConfigError(f"{rest[0]} is no flag of inspect_dataset.py {arguments.command}.")
    return int(arguments.run(arguments))


if __name__ == "__main__":
    run_program(main)
