#!/usr/bin/env python3
"""Tokenize JSON lines files into the token files that pretrain_gpt.py reads.

Example (writes data/corpus_text_document.bin and .idx, with the same bytes as Megatron's tool):

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus --append-eod \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model
"""

from __future__ import annotations

import argparse
import difflib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

CHECKOUT = Path(__file__).resolve().parent.parent
if (CHECKOUT / "megatron_sp").is_dir():  # false once pip has installed this file, which then finds the package anyway
    sys.path.insert(0, str(CHECKOUT))

from megatron_sp.config.schema import Data  # noqa: E402
from megatron_sp.data.json_lines import find_inputs  # noqa: E402
from megatron_sp.errors import ConfigError  # noqa: E402
from megatron_sp.runtime import keep_tokenizers_single_threaded, run_program  # noqa: E402

#: Spellings of other tools for flags of this one, after "_" was replaced by "-".
ALIASES = {"--vocab": "--vocab-file", "--json-key": "--json-keys", "--tokenizer-name-or-path": "--tokenizer-model",
           "--merges-file": "--merge-file"}
#: Flags of other tools that are accepted and have no effect here, with the number of their values.
HINTS = {"--dataset-impl": 1, "--chunk-size": 1, "--find-optimal-num-workers": 0, "--workers-to-check": "+",
         "--seq-length": 1, "--no-new-tokens": 0, "--output-result-total-token-info": 0, "--load": 1,
         "--keep-sequential-samples": 0, "--make-vocab-size-divisible-by": 1, "--tensor-model-parallel-size": 1,
         "--padded-vocab-size": 1, "--rank": 1}
#: Flags of other tools that would change the result and are not supported, with the reason or the alternative.
REFUSED = {"--split-sentences": "sentences are not split; that is for BERT and T5, which are not trained here",
           "--keep-newlines": "it belongs to --split-sentences, which is not supported",
           "--lang": "it belongs to --split-sentences, which is not supported",
           "--append-bos": "tokens at the start of documents are not supported",
           "--prepend-space": "texts are tokenized as they are",
           "--max-documents": "cut the input instead, for example with head -n",
           "--patch-tokenizer-type": "use --tokenizer-type HuggingFaceTokenizer --tokenizer-model DIRECTORY",
           "--tokenizer-file": "use --tokenizer-type HuggingFaceTokenizer --tokenizer-model DIRECTORY",
           "--vocab-extra-ids": "extra ids are not supported"}


class Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError at a mistake, where argparse would print a message of its own and exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def build_parser() -> Parser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    group = parser.add_argument_group("input and output")
    group.add_argument("--input", nargs="+", required=True, metavar="FILE",
                       help=".jsonl or .jsonl.gz files with one JSON object on each line; a quoted pattern such as "
                            "'data/*.jsonl' is expanded")
    group.add_argument("--output-prefix", required=True, metavar="PREFIX",
                       help="path to which _KEY_document.bin and .idx are added to name the output files")
    group.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY",
                       help="keys of the JSON objects to tokenize, into one pair of files for each key (default: text)")
    group.add_argument("--append-eod", action="store_true",
                       help="end every document with the end-of-document token (recommended)")
    group.add_argument("--on-error", choices=("stop", "skip"), default="stop",
                       help="at a bad line: stop and name it (default), or skip it and count the skipped lines")
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", default=Data().tokenizer_type, metavar="TYPE",
                       help="type of tokenizer, as for pretrain_gpt.py (default: %(default)s)")
    group.add_argument("--vocab-file", default="", metavar="FILE", help="vocab.json of GPT2BPETokenizer")
    group.add_argument("--merge-file", default="", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    group.add_argument("--tokenizer-model", default="", metavar="PATH",
                       help="SentencePiece .model file, or directory of a Hugging Face tokenizer")
    group.add_argument("--vocab-size", type=int, default=0, metavar="N", help="vocabulary size of NullTokenizer")
    group.add_argument("--parse-special-tokens", action="store_true",
                       help="encode the spelling of a special token in a text, such as <s>, as that token; by default "
                            "it is plain text (Hugging Face tokenizers only)")
    group.add_argument("--trust-remote-code", action="store_true",
                       help="let a Hugging Face tokenizer run the Python code in its directory")
    group = parser.add_argument_group("running")
    group.add_argument("--workers", type=int, default=0, metavar="N",
                       help="processes that tokenize; the output is the same for any number (default: one per core)")
    group.add_argument("--partitions", type=int, default=1, metavar="N",
                       help="accepted without effect: the output is always one pair of files in input order")
    group.add_argument("--log-interval", type=int, default=1000, metavar="N",
                       help="update the counts beside the progress bar after this many documents (default: 1000)")
    for name, count in HINTS.items():  # --help does not show flags without effect
        nargs = {"nargs": count} if count else {"action": "store_true"}
        parser.add_argument(name, dest="hint" + name, help=argparse.SUPPRESS, default=None, **nargs)  # type: ignore[arg-type]
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the command line.

    Raises:
        ConfigError: the command line is wrong; the error lists all mistakes.
    """
    problems = []
    words = []
    for word in argv:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
            name = ALIASES.get(name, name)
            if name in REFUSED and (name, value) != ("--vocab-extra-ids", "0"):
                problems.append(f"{name}: {REFUSED[name]}")
        words.append(name + equals + value)
    if problems:
        raise ConfigError(problems)
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(words)
    known = [option for action in parser._actions for option in action.option_strings]
    for word in unknown:
        near = difflib.get_close_matches(word.partition("=")[0], known, 1) if word.startswith("--") else []
        problems.append(f"{word} is not known" + (f"; did you mean {near[0]}?" if near else ""))
    if arguments.workers < 0 or arguments.partitions < 1 or arguments.log_interval < 1:
        problems.append("--workers, --partitions and --log-interval must be at least 1")
    implementation = (getattr(arguments, "hint--dataset-impl") or ["mmap"])[0]
    if implementation != "mmap":
        problems.append(f"--dataset-impl {implementation}: only mmap is written")
    if len(set(arguments.json_keys)) != len(arguments.json_keys):
        problems.append(f"--json-keys names a key twice: {' '.join(arguments.json_keys)}")
    if problems:
        raise ConfigError(problems)
    return arguments


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    hints = [name for name in HINTS if getattr(arguments, "hint" + name)]
    if arguments.partitions > 1:
        hints.append("--partitions")
    if hints:
        print(f"note: accepted without effect: {', '.join(hints)}", flush=True)
    try:
        return run(arguments, find_inputs(arguments.input))
    except KeyboardInterrupt as interrupt:
        print("\ninterrupted; nothing was written", file=sys.stderr)
        return 128 + interrupt.args[0]


def _interrupt(number: int, frame: object) -> NoReturn:
    """Raise KeyboardInterrupt at the first signal and ignore later ones, so that they do not interrupt the clean-up."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


def run(arguments: argparse.Namespace, paths: list[str]) -> int:
    """Preprocess the files, print a report and return the exit code."""
    from megatron_sp.data.preprocess import EncodedBatch, Job, Summary, preprocess
    from megatron_sp.progress import progress_bar

    keep_tokenizers_single_threaded()  # the worker processes share the cores already
    data = Data(tokenizer_type=arguments.tokenizer_type, vocab_file=arguments.vocab_file,
                merge_file=arguments.merge_file, tokenizer_model=arguments.tokenizer_model,
                trust_remote_code=arguments.trust_remote_code)
    job = Job(data, arguments.vocab_size, tuple(arguments.json_keys), arguments.append_eod,
              arguments.on_error == "skip", arguments.parse_special_tokens)
    size = sum(os.path.getsize(path) for path in paths)
    # For less than 1 MiB of input, starting processes takes longer than tokenizing in this one.
    workers = arguments.workers or (_cores() if size > 1 << 20 else 1)
    print(f"reading {len(paths)} file{'s' * (len(paths) > 1)}, {size / 1e6:,.1f} MB, with {workers} "
          f"process{'es' * (workers > 1)}", flush=True)
    started = time.monotonic()
    bar = progress_bar(total=size, unit="B", unit_scale=True, desc="tokenizing", dynamic_ncols=True,
                       mininterval=0.2 if sys.stderr.isatty() else 5.0)
    shown = 0

    def progress(batch: EncodedBatch, summary: Summary) -> None:
        nonlocal shown
        if summary.documents - shown >= arguments.log_interval:
            shown = summary.documents
            rate = sum(summary.tokens.values()) / (time.monotonic() - started)
            bar.set_postfix_str(f"{shown:,} documents, {rate / 1e3:,.0f}k tokens/s", refresh=False)
        bar.update(batch.bytes_read)

    with bar:
        summary = preprocess(paths, arguments.output_prefix, job, workers, progress)
    report(summary, arguments, time.monotonic() - started)
    return 0


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def report(summary: object, arguments: argparse.Namespace, seconds: float) -> None:
    """Print the totals of ``preprocess``, and warnings about data that training would suffer from."""
    from megatron_sp.data.preprocess import Summary

    assert isinstance(summary, Summary)
    tokens = sum(summary.tokens.values())
    print(f"{summary.documents:,} documents, {tokens:,} tokens in {seconds:.1f} s ({tokens / seconds:,.0f} tokens/s)")
    for key in summary.keys:
        empty = f", {summary.empty[key]:,} empty (no tokens stored)" if summary.empty[key] else ""
        print(f"  {arguments.output_prefix}_{key}_document: {summary.tokens[key]:,} tokens, longest document "
              f"{summary.longest[key]:,}{empty}")
        if summary.unknown[key]:
            share = summary.unknown[key] / summary.tokens[key]
            print(f"  WARNING: {summary.unknown[key]:,} of these tokens ({share:.2%}) are the unknown token: the "
                  "tokenizer cannot represent that text.")
    for reason, count in summary.skipped.most_common():
        print(f"  skipped {count:,} line{'s' * (count > 1)}: {reason} (first: {summary.first_skipped[reason]})")
    if summary.changed:
        print(f"WARNING: {summary.changed} of {summary.compared} texts that were decoded again did not come back as "
              f"they were (first: {summary.first_changed}).\n         The tokenizer changes or drops characters, often "
              "line ends, repeated blanks or unknown letters. A tokenizer of tools/train_tokenizer.py keeps all.")
    if not tokens:
        print("WARNING: all documents are empty; there is nothing to train on in this data.")
    if not arguments.append_eod:
        print("WARNING: --append-eod was not given: no token marks where one document ends and the next begins.\n"
              "         For pretraining this is almost always a mistake; run again with --append-eod.")


if __name__ == "__main__":
    run_program(main)
