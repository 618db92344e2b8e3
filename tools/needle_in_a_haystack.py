#!/usr/bin/env python3
"""Test whether a trained model finds a sentence in a long text: at which length of the text, and at which depth.

Examples (with the checkpoint and the data of examples/quickstart.sh; each writes a JSON file and a picture):

    python tools/needle_in_a_haystack.py --load runs/quickstart/checkpoints \\
        --data-path runs/quickstart/corpus_text_document --lengths 128 256 512 --output needle.json
    python tools/needle_in_a_haystack.py --load runs/quickstart/checkpoints \\
        --data-path runs/quickstart/corpus_text_document --lengths 512 2K --random-tokens 8 \\
        --sequence-chunk-size 256 --output random.json

The haystack is text of --data-path. The needle is the text of --question followed by a random number. It stands at a
depth of 0% (the start) to 100% (the end) of the text, and the question comes once more at the end. The score is the
probability that the model gives each token of the number, and whether greedy decoding writes the number. For comparison
the same is measured without a needle.

Small models do not understand such a sentence. --random-tokens N hides N random tokens behind N others instead, which
tests whether a model can copy; this needs no tokenizer.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

CHECKOUT = Path(__file__).resolve().parent.parent
if (CHECKOUT / "megatron_sp").is_dir():  # false once pip has installed this file, which then finds the package anyway
    sys.path.insert(0, str(CHECKOUT))

from megatron_sp import runtime  # noqa: E402
from megatron_sp.config.cli.tool_parser import ToolParser  # noqa: E402
from megatron_sp.errors import ConfigError, DataError  # noqa: E402
from megatron_sp.layout.length_schedule import parse_length  # noqa: E402
from megatron_sp.output_files import complete_file  # noqa: E402
from megatron_sp.pictures import load_pyplot, save_picture  # noqa: E402

if TYPE_CHECKING:
    from megatron_sp.config.schema import Run
    from megatron_sp.data.token_files.indexed_dataset import IndexedDataset
    from megatron_sp.inference.needle import Cell, Needle

QUESTION = "The secret number of the lighthouse is"


def make_needles(run: Run, arguments: argparse.Namespace) -> list[Needle]:
    """Return a needle for each trial, with an answer of its own."""
    import numpy as np

    from megatron_sp.inference.needle import Needle
    from megatron_sp.train.setup import choose_tokenizer

    random, count = np.random.default_rng(arguments.seed), arguments.random_tokens
    if count:
        drawn = random.integers(0, run.model.vocab_size, size=(arguments.trials, 2, count))
        return [Needle(tuple(question), tuple(answer)) for question, answer in drawn.tolist()]
    tokenizer = choose_tokenizer(run)
    question = tuple(tokenizer.encode("\n" + arguments.question))
    answers = [tuple(tokenizer.encode(f" {number}.")) for number in random.integers(10_000, 100_000, arguments.trials)]
    return [Needle(question, answer) for answer in answers]


def haystacks(data: IndexedDataset, length: int, count: int, vocab_size: int) -> list[list[int]]:
    """Return ``count`` texts of ``length`` tokens each: documents one after another, from places spread over the data.

    Raises:
        DataError: the data has fewer tokens than ``length``, or a token that the model's vocabulary lacks.
    """
    import numpy as np

    total = int(data.lengths.sum(dtype=np.int64))
    if total < length:
        raise DataError(f"{data.prefix}.bin has {total:,} tokens, and --lengths asks for texts of {length:,}; give "
                        "shorter lengths or more data")
    starts = np.linspace(0, total - length, count).astype(np.int64)
    texts = [data.read(int(start), length).astype(np.int64) for start in starts]
    worst = max(int(text.max()) for text in texts)
    if worst >= vocab_size:
        raise DataError(f"{data.prefix}.bin has the token id {worst}, but the model's vocabulary has {vocab_size}; the "
                        "data was preprocessed with another tokenizer")
    return [text.tolist() for text in texts]


def report(cells: list[Cell], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the scores as they are written to the JSON file."""
    return {"trials": arguments.trials, "question": "" if arguments.random_tokens else arguments.question,
            "random_tokens": arguments.random_tokens, "cells": [asdict(cell) for cell in cells]}


def draw(cells: list[Cell], picture: Path, title: str) -> None:
    """Draw the probability and the share of answers found, each as a grid of lengths and depths."""
    lengths = sorted({cell.length for cell in cells})
    depths = sorted({cell.depth for cell in cells if cell.depth is not None})
    figure, axes = load_pyplot().subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for axis, name, words in ((axes[0], "probability", "mean probability of the answer's tokens"),
                              (axes[1], "found", "share of answers that greedy decoding writes")):
        at = {(cell.length, cell.depth): getattr(cell, name) for cell in cells}
        image = axis.imshow([[at[length, depth] for length in lengths] for depth in depths], vmin=0, vmax=1,
                            aspect="auto", cmap="RdYlGn")
        for row, depth in enumerate(depths):
            for column, length in enumerate(lengths):
                axis.text(column, row, f"{at[length, depth]:.2f}", ha="center", va="center", fontsize=8)
        axis.set_xticks(range(len(lengths)), [f"{length:,}\n({at[length, None]:.2f})" for length in lengths])
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axis.set(xlabel="length of the text in tokens (in brackets: without a needle)", ylabel="depth of the needle",
                 title=words)
        figure.colorbar(image, ax=axis)
    figure.suptitle(title)
    save_picture(figure, picture)


def build_parser() -> argparse.ArgumentParser:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    group = parser.add_argument_group("model")
    group.add_argument("--load", type=Path, required=True, metavar="DIR",
                       help="directory with checkpoints (--save of the training)")
    group.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to load (default: the newest)")
    group.add_argument("--sequence-chunk-size", type=int, metavar="N",
                       help="read the texts in chunks of N tokens, so that memory for activations does not depend on "
                            "their length (default: whole texts)")
    group = parser.add_argument_group("texts")
    group.add_argument("--data-path", required=True, metavar="PREFIX",
                       help="preprocessed documents that make the haystack: path of the data set without .bin and .idx")
    group.add_argument("--lengths", nargs="+", required=True, metavar="N",
                       help="lengths of the texts in tokens; 8K is 8,192, 1M is 1,048,576")
    group.add_argument("--depths", type=int, default=5, metavar="N",
                       help="number of depths, from the start of the text to its end (default: %(default)s)")
    group.add_argument("--trials", type=int, default=3, metavar="N",
                       help="texts for each length and depth (default: %(default)s)")
    group.add_argument("--question", default=QUESTION, metavar="TEXT",
                       help="the needle's text before the number (default: %(default)s)")
    group.add_argument("--random-tokens", type=int, default=0, metavar="N",
                       help="hide N random tokens behind N others instead of a sentence")
    group.add_argument("--seed", type=int, default=1234, metavar="N", help="seed of the answers (default: %(default)s)")
    group = parser.add_argument_group("output")
    group.add_argument("--output", type=Path, required=True, metavar="FILE.json",
                       help="JSON file to write; the picture gets the same name with the ending .png")
    return parser


def check(arguments: argparse.Namespace) -> list[int]:
    """Return the lengths of the texts in tokens.

    Raises:
        ConfigError: naming every wrong value.
    """
    problems = [f"{flag} {value} must be at least {least}" for flag, value, least in (
        ("--depths", arguments.depths, 1), ("--trials", arguments.trials, 1), ("--seed", arguments.seed, 0),
        ("--random-tokens", arguments.random_tokens, 0),
        ("--sequence-chunk-size", arguments.sequence_chunk_size, 1)) if value is not None and value < least]
    lengths = []
    for word in arguments.lengths:
        try:
            lengths.append(parse_length(word))
        except ValueError as error:
            problems.append(f"--lengths: {error}")
    if arguments.output.suffix != ".json":
        problems.append(f"--output {arguments.output} must end in .json")
    if runtime.launch_environment().world_size > 1:
        problems.append("needle_in_a_haystack.py runs on one process; start it without torchrun")
    if problems:
        raise ConfigError(problems)
    return sorted(set(lengths))


def check_lengths(run: Run, needles: list[Needle], lengths: list[int]) -> None:
    """Refuse texts that do not hold the needle, or that are longer than the learned positions of the model.

    Raises:
        ConfigError: naming the length.
    """
    least, limit = max(needle.least_length for needle in needles), run.model.max_position_embeddings
    if lengths[0] < least:
        raise ConfigError(f"--lengths {lengths[0]}: needle, question and answer alone have {least} tokens; give "
                          f"lengths of {least} or more")
    if run.model.position_embedding_type == "learned_absolute" and lengths[-1] > limit:
        raise ConfigError(f"--lengths {lengths[-1]} exceeds the model's {limit} learned positions")


def beyond_training(run: Run, lengths: list[int]) -> str:
    """Return a warning about texts that are longer than the sequences of the training, or "" where there are none."""
    longer = [length for length in lengths if length > run.data.seq_length]
    return "" if not longer else (
        f"WARNING: --lengths {' '.join(map(str, longer))}: the model was trained with sequences of "
        f"{run.data.seq_length} tokens, and often finds nothing in longer texts; train it with a longer "
        "--seq-length, or read these results as a test of lengths that it has not seen.")


def main(argv: list[str]) -> None:
    arguments = build_parser().parse_args(argv)
    lengths = check(arguments)

    from megatron_sp.data.token_files.indexed_dataset import IndexedDataset
    from megatron_sp.inference.needle import grid
    from megatron_sp.progress import progress_bar
    from megatron_sp.train.checkpoints.restore import for_device, load_model, read_config

    chunk = arguments.sequence_chunk_size or 0
    run = read_config(arguments.load, arguments.ckpt_step)
    run = replace(run, memory=replace(run.memory, sequence_chunk_size=chunk))
    needles = make_needles(run, arguments)
    check_lengths(run, needles, lengths)
    if warning := beyond_training(run, lengths):
        print(warning, file=sys.stderr, flush=True)
    texts = haystacks(IndexedDataset(arguments.data_path), lengths[-1], arguments.trials, run.model.vocab_size)
    model = load_model(for_device(run), arguments.load, arguments.ckpt_step)
    depths = [number / max(arguments.depths - 1, 1) for number in range(arguments.depths)]
    cells = []
    for cell in progress_bar(grid(model, list(zip(needles, texts)), lengths, depths, run.model.vocab_size, chunk),
                             desc="texts", total=len(lengths) * (len(depths) + 1), disable=None):
        cells.append(cell)
    runtime.stop()
    for cell in cells:
        where = "without a needle" if cell.depth is None else f"depth {cell.depth:>4.0%}      "
        print(f"{cell.length:>10,} tokens, {where}: probability {cell.probability:.4f}, found {cell.found:.0%}")
    # Files are written after the results are printed: a full disk or a missing matplotlib then loses no result.
    with complete_file(arguments.output, "--output") as file:
        file.write((json.dumps(report(cells, arguments), indent=1) + "\n").encode())
    picture = arguments.output.with_suffix(".png")
    draw(cells, picture, f"{arguments.load} on {arguments.data_path}")
    print(f"picture: {picture}")


if __name__ == "__main__":
    runtime.run_program(main)
