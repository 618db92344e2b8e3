#!/usr/bin/env python3
"""Measure the perplexity of a trained model by document and by position, which shows whether it uses long context.

Example (with the checkpoint and the data of examples/quickstart.sh; writes eval.json and the picture eval.png):

    python tools/evaluate.py --load runs/quickstart/checkpoints --data-path runs/quickstart/corpus_text_document \\
        --output eval.json

The model of examples/extend_context.sh on texts of 8,192 tokens, which join documents, read 1,024 tokens at a time;
the picture shows the result above, too:

    python tools/evaluate.py --load runs/extend_context/checkpoints --join-documents --seq-length 8192 \\
        --data-path runs/extend_context/held_out_text_document --sequence-chunk-size 1024 \\
        --compare eval.json --output longer.json

The tool loads the model on one process, whatever the layout of its training. It gives the model one document at a
time, from the document's first token up to --seq-length tokens. The results are:

- the loss of every document;
- the mean loss by position: by the number of tokens that stand before the predicted token in its document. Few
  documents are long, so a second curve shows only the documents that fill --seq-length tokens. If that curve keeps
  falling towards its end, the model uses distant tokens.

Where documents are short, --join-documents reads texts of --seq-length tokens that run over their ends. Each such text
then counts as a document. With --sequence-chunk-size a text may have any length.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

CHECKOUT = Path(__file__).resolve().parent.parent
if (CHECKOUT / "megatron_sp").is_dir():  # false once pip has installed this file, which then finds the package anyway
    sys.path.insert(0, str(CHECKOUT))

from megatron_sp import runtime  # noqa: E402
from megatron_sp.config.cli.tool_parser import ToolParser  # noqa: E402
from megatron_sp.errors import ConfigError, DataError  # noqa: E402
from megatron_sp.output_files import complete_file  # noqa: E402
from megatron_sp.pictures import load_pyplot, save_picture  # noqa: E402

if TYPE_CHECKING:
    import numpy as np

    from megatron_sp.config.schema import Run
    from megatron_sp.data.token_files.indexed_dataset import IndexedDataset
    from megatron_sp.model.gpt import GPT


@dataclass(frozen=True)
class DocumentLosses:
    """The losses of one document's tokens.

    Attributes:
        index: number of the document in the data.
        length: tokens of the whole document, also those beyond --seq-length.
        losses: the loss of each token after the first one, in nats.
    """

    index: int
    length: int
    losses: np.ndarray


@dataclass(frozen=True)
class Text:
    """A text to read.

    Attributes:
        number: number of the text.
        length: tokens of its whole document.
        tokens: the tokens that are read.
    """

    number: int
    length: int
    tokens: np.ndarray


def choose_documents(lengths: np.ndarray, count: int, least: int) -> list[int]:
    """Return the numbers of up to ``count`` documents, spread evenly over those that have ``least`` tokens or more.

    Documents of fewer than 2 tokens are never chosen, because they have no predicted token.

    Raises:
        DataError: no document is that long.
    """
    import numpy as np

    fitting = np.flatnonzero(lengths >= max(least, 2))
    if not len(fitting):
        raise DataError(f"no document has {max(least, 2)} tokens or more; the longest has "
                        f"{int(lengths.max(initial=0))}; lower --min-length, or use other data")
    places = np.linspace(0, len(fitting) - 1, min(count, len(fitting))).round().astype(np.int64)
    return fitting[places].tolist()


def read_documents(data: IndexedDataset, chosen: list[int], seq_length: int) -> Iterator[Text]:
    """Yield the first ``seq_length + 1`` tokens of each of these documents, or all of a shorter one."""
    for index in chosen:
        length = int(data.lengths[index])
        yield Text(index, length, data.get(index, 0, min(length, seq_length + 1)))


def read_joined(data: IndexedDataset, starts: list[int], seq_length: int) -> Iterator[Text]:
    """Yield texts of ``seq_length + 1`` tokens, given their first tokens in the data."""
    for number, start in enumerate(starts):
        yield Text(number, seq_length + 1, data.read(start, seq_length + 1))


def joined_starts(data: IndexedDataset, seq_length: int, count: int) -> list[int]:
    """Return the first tokens of up to ``count`` texts of ``seq_length + 1`` tokens, spread evenly over the data.

    Raises:
        DataError: the data is shorter than one text.
    """
    import numpy as np

    total = int(data.lengths.sum(dtype=np.int64))
    if total <= seq_length:
        raise DataError(f"{data.prefix}.bin has {total:,} tokens, which do not fill one text of {seq_length:,} + 1 "
                        "tokens; lower --seq-length, or use more data")
    count = min(count, (total - 1) // seq_length)
    return np.linspace(0, total - seq_length - 1, count).astype(np.int64).tolist()


def evaluate(model: GPT, texts: Iterable[Text], count: int, vocab_size: int, prefix: str,
             chunk: int = 0) -> list[DocumentLosses]:
    """Return the losses of each text's tokens after its first one.

    Args:
        count: number of texts.
        prefix: path of the data, for messages.
        chunk: read texts in chunks of so many tokens; 0: whole texts.

    Raises:
        DataError: a text has a token id that the model's vocabulary lacks.
    """
    import numpy as np
    import torch

    from megatron_sp.model.reading import token_losses
    from megatron_sp.progress import progress_bar

    device = next(model.parameters()).device
    found = []
    for text in progress_bar(texts, desc="documents", total=count, disable=None):
        ids = text.tokens.astype(np.int64)
        if int(ids.max()) >= vocab_size:
            raise DataError(f"document {text.number} of {prefix}.bin has the token id {int(ids.max())}, but the "
                            f"model's vocabulary has {vocab_size}; the data was preprocessed with another tokenizer")
        losses = token_losses(model, torch.from_numpy(ids).to(device), chunk)
        found.append(DocumentLosses(text.number, text.length, losses.cpu().numpy()))
    return found


def by_position(documents: list[DocumentLosses], seq_length: int) -> list[dict[str, Any]]:
    """Return a row with the mean loss for each range of tokens before the predicted one: 1, 2-3, 4-7, 8-15 ..."""
    import numpy as np

    rows = []
    start = 1
    while start <= seq_length:
        stop = min(2 * start, seq_length + 1)
        parts = [document.losses[start - 1:stop - 1] for document in documents if len(document.losses) >= start]
        if not parts:
            break
        loss = float(np.concatenate(parts).mean(dtype=np.float64))
        rows.append({"tokens_before": [start, stop - 1], "tokens": sum(map(len, parts)), "documents": len(parts),
                     "loss": loss, "perplexity": perplexity(loss)})
        start = stop
    return rows


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def report(documents: list[DocumentLosses], seq_length: int) -> dict[str, Any]:
    """Return the losses of all documents and their means, as they are written to the JSON file."""
    import numpy as np

    tokens = sum(len(document.losses) for document in documents)
    loss = float(sum(document.losses.sum(dtype=np.float64) for document in documents) / tokens)
    long = [document for document in documents if len(document.losses) >= seq_length]
    by_document = [{"document": document.index, "length": document.length, "tokens": len(document.losses),
                    "loss": (own := float(document.losses.mean(dtype=np.float64))), "perplexity": perplexity(own)}
                   for document in documents]
    return {"documents": len(documents), "long_documents": len(long), "seq_length": seq_length, "tokens": tokens,
            "loss": loss, "perplexity": perplexity(loss), "by_position": by_position(documents, seq_length),
            "by_position_of_long_documents": by_position(long, seq_length), "by_document": by_document}


def read_results(paths: list[Path]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows by position of earlier results, by name of the file.

    Raises:
        ConfigError: a file is not a result of this program.
    """
    found = {}
    for path in paths:
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            rows = result["by_position_of_long_documents"] or result["by_position"]
            found[path.stem] = [{"tokens_before": [int(first), int(last)], "loss": float(row["loss"])}
                                for row in rows for first, last in (row["tokens_before"],)]
        except OSError as error:
            raise ConfigError(f"--compare {path} cannot be read ({error.strerror})") from None
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"--compare {path} is not a JSON file that this program has written") from None
    return found


def draw(result: dict[str, Any], picture: Path, title: str,
         others: Mapping[str, list[dict[str, Any]]] | None = None) -> None:
    """Draw the loss by position and the loss by document length, and write the picture as a PNG.

    Args:
        others: rows by position of other results, by name.
    """
    figure, (left, right) = load_pyplot().subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    own = f"{picture.stem}: " if others else ""
    for key, label, style in (("by_position", f"{own}all {result['documents']} documents", "o-"),
                              ("by_position_of_long_documents",
                               f"{own}the {result['long_documents']} that fill {result['seq_length']} tokens", "s--")):
        rows = result[key]
        if rows and not (key == "by_position" and result["documents"] == result["long_documents"]):
            plot_rows(left, rows, style, label)
    for name, rows in (others or {}).items():
        plot_rows(left, rows, "^:", name)
    left.set(xscale="log", xlabel="tokens of the document before the predicted one", ylabel="loss (nats per token)",
             title="by position")
    left.legend()
    right.plot([row["length"] for row in result["by_document"]], [row["loss"] for row in result["by_document"]], ".")
    right.axhline(result["loss"], color="gray", linewidth=1, label=f"all tokens: {result['loss']:.4f}")
    right.set(xscale="log", xlabel="length of the document (tokens)", title="by document")
    right.legend()
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.suptitle(title)
    save_picture(figure, picture)


def with_scaled_positions(run: Run, kind: str, original: int, seq_length: int) -> Run:
    """Return the run with rotary positions scaled from the original length to another one.

    Raises:
        ConfigError: the model cannot have this scaling.
    """
    from megatron_sp.config.resolve import resolve
    from megatron_sp.config.rules.positions import check_positions

    model = replace(run.model, rope_scaling_type=kind, rotary_scaling_factor=0.0,
                    original_max_position_embeddings=original, max_position_embeddings=seq_length)
    run = resolve(replace(run, model=model), 1)
    if problems := check_positions(run):
        raise ConfigError(problems)
    return run


def plot_rows(axis: Any, rows: list[dict[str, Any]], style: str, label: str) -> None:
    axis.plot([math.sqrt(row["tokens_before"][0] * row["tokens_before"][1]) for row in rows],
              [row["loss"] for row in rows], style, label=label)


def build_parser() -> argparse.ArgumentParser:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    group = parser.add_argument_group("model")
    group.add_argument("--load", type=Path, required=True, metavar="DIR",
                       help="directory with checkpoints (--save of the training)")
    group.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to load (default: the newest)")
    group.add_argument("--rope-scaling-type", choices=("ntk", "yarn"),
                       help="scale the rotary positions from --original-max-position-embeddings to --seq-length tokens "
                            "(default: as in the training)")
    group.add_argument("--original-max-position-embeddings", type=int, metavar="N",
                       help="length of the sequences that the model was trained on, for --rope-scaling-type")
    group = parser.add_argument_group("data")
    group.add_argument("--data-path", required=True, metavar="PREFIX",
                       help="preprocessed documents: path of the data set without .bin and .idx")
    group.add_argument("--seq-length", type=int, metavar="N",
                       help="most tokens to read of each document (default: --seq-length of the training)")
    group.add_argument("--sequence-chunk-size", type=int, metavar="N",
                       help="read each document in chunks of N tokens, so that memory for activations does not depend "
                            "on its length (default: whole documents)")
    group.add_argument("--num-documents", type=int, default=100, metavar="N",
                       help="most documents to read; they are spread evenly over the data (default: %(default)s)")
    group.add_argument("--min-length", type=int, default=2, metavar="N",
                       help="leave out documents of fewer tokens (default: %(default)s)")
    group.add_argument("--join-documents", action="store_true",
                       help="read texts of --seq-length tokens that run over the ends of documents, instead of each "
                            "document from its start")
    group = parser.add_argument_group("output")
    group.add_argument("--output", type=Path, required=True, metavar="FILE.json",
                       help="JSON file to write; the picture gets the same name with the ending .png")
    group.add_argument("--compare", type=Path, nargs="+", default=[], metavar="FILE.json",
                       help="results of earlier calls, whose losses by position are drawn too")
    return parser


def check(arguments: argparse.Namespace) -> None:
    """Refuse wrong values.

    Raises:
        ConfigError: naming every one of them.
    """
    problems = [f"--{flag.replace('_', '-')} {value} must be at least 1" for flag in (
        "num_documents", "min_length", "seq_length", "sequence_chunk_size", "original_max_position_embeddings")
        if (value := getattr(arguments, flag)) is not None and value < 1]
    if arguments.output.suffix != ".json":
        problems.append(f"--output {arguments.output} must end in .json")
    if runtime.launch_environment().world_size > 1:
        problems.append("evaluate.py runs on one process; start it without torchrun")
    if (not arguments.rope_scaling_type) != (arguments.original_max_position_embeddings is None):
        problems.append("--rope-scaling-type and --original-max-position-embeddings need each other")
    if problems:
        raise ConfigError(problems)


def main(argv: list[str]) -> None:
    arguments = build_parser().parse_args(argv)
    check(arguments)
    others = read_results(arguments.compare)

    from megatron_sp.data.token_files.indexed_dataset import IndexedDataset
    from megatron_sp.train.checkpoints.restore import for_device, load_model, read_config

    run = read_config(arguments.load, arguments.ckpt_step)
    seq_length = arguments.seq_length or run.data.seq_length
    limit = run.model.max_position_embeddings
    if run.model.position_embedding_type == "learned_absolute" and seq_length > limit:
        raise ConfigError(f"--seq-length {seq_length} exceeds the model's {limit} learned positions")
    if arguments.rope_scaling_type:
        run = with_scaled_positions(run, arguments.rope_scaling_type, arguments.original_max_position_embeddings,
                                    seq_length)
    data = IndexedDataset(arguments.data_path)
    if arguments.join_documents:
        chosen = joined_starts(data, seq_length, arguments.num_documents)
        texts = read_joined(data, chosen, seq_length)
    else:
        chosen = choose_documents(data.lengths, arguments.num_documents, arguments.min_length)
        texts = read_documents(data, chosen, seq_length)
    chunk = arguments.sequence_chunk_size or 0
    run = replace(run, memory=replace(run.memory, sequence_chunk_size=chunk))
    model = load_model(for_device(run), arguments.load, arguments.ckpt_step)
    result = report(evaluate(model, texts, len(chosen), run.model.vocab_size, data.prefix, chunk), seq_length)
    runtime.stop()
    print(f"{result['documents']} documents, {result['tokens']:,} tokens: loss {result['loss']:.4f}, perplexity "
          f"{result['perplexity']:.2f}")
    for row in result["by_position_of_long_documents"] or result["by_position"]:
        first, last = row["tokens_before"]
        print(f"  {first:>8,} to {last:>8,} tokens before: loss {row['loss']:.4f} ({row['documents']} documents)")
    # Files are written after the results are printed: a full disk or a missing matplotlib then loses no result.
    with complete_file(arguments.output, "--output") as file:
        file.write((json.dumps(result, indent=1) + "\n").encode())
    picture = arguments.output.with_suffix(".png")
    draw(result, picture, f"{arguments.load} on {arguments.data_path}", others)
    print(f"picture: {picture}")


if __name__ == "__main__":
    runtime.run_program(main)
