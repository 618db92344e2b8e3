#!/usr/bin/env python3
"""Tokenize jsonl files into the token sets that pretrain_gpt.py reads.

Example (writes data/corpus_text_document.bin and .idx, byte for byte what Megatron's tool writes):

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

# Spellings people bring (after "_" became "-").
ALIASES = {"--vocab": "--vocab-file", "--json-key": "--json-keys", "--tokenizer-name-or-path": "--tokenizer-model",
           "--merges-file": "--merge-file"}
# Flags of other tools that change nothing here; the number of values each takes.
HINTS = {"--dataset-impl": 1, "--chunk-size": 1, "--find-optimal-num-workers": 0, "--workers-to-check": "+",
         "--seq-length": 1, "--no-new-tokens": 0, "--output-result-total-token-info": 0, "--load": 1,
         "--keep-sequential-samples": 0, "--make-vocab-size-divisible-by": 1, "--tensor-model-parallel-size": 1,
         "--padded-vocab-size": 1, "--rank": 1}
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
    """Reports mistakes the way the rest of the project does."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def build_parser() -> Parser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    group = parser.add_argument_group("input and output")
    group.add_argument("--input", nargs="+", required=True, metavar="FILE",
                       help="jsonl or jsonl.gz files or quoted patterns, one JSON object a line")
    group.add_argument("--output-prefix", required=True, metavar="PREFIX",
                       help="results are PREFIX_KEY_document.bin and .idx")
    group.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY",
                       help="keys to tokenize, one token set each (default: text)")
    group.add_argument("--append-eod", action="store_true",
                       help="end every document with the end-of-document token (recommended)")
    group.add_argument("--on-error", choices=("stop", "skip"), default="stop",
                       help="bad line: stop with its file and number (default), or skip and count it")
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", default=Data().tokenizer_type, metavar="TYPE",
                       help="as for pretrain_gpt.py (default: %(default)s)")
    group.add_argument("--vocab-file", default="", metavar="FILE", help="vocab.json of GPT2BPETokenizer")
    group.add_argument("--merge-file", default="", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    group.add_argument("--tokenizer-model", default="", metavar="PATH",
                       help="SentencePiece .model file or Hugging Face directory")
    group.add_argument("--vocab-size", type=int, default=0, metavar="N", help="vocabulary size of NullTokenizer")
    group.add_argument("--parse-special-tokens", action="store_true",
                       help="let special tokens that are spelled in a text, such as <s>, become their ids; by default "
                            "they are plain text (Hugging Face tokenizers only)")
    group.add_argument("--trust-remote-code", action="store_true", help="let a Hugging Face tokenizer run its own code")
    group = parser.add_argument_group("running")
    group.add_argument("--workers", type=int, default=0, metavar="N",
                       help="processes that tokenize; the output does not depend on it (default: all cores)")
    group.add_argument("--partitions", type=int, default=1, metavar="N",
                       help="accepted; the output is one token set in input order all the same")
    group.add_argument("--log-interval", type=int, default=1000, metavar="N",
                       help="documents between updates of the figures beside the progress bar (default: 1000)")
    for name, count in HINTS.items():  # accepted without effect, so not shown
        nargs = {"nargs": count} if count else {"action": "store_true"}
        parser.add_argument(name, dest="hint" + name, help=argparse.SUPPRESS, default=None, **nargs)  # type: ignore[arg-type]
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The checked command line.

    Raises:
        ConfigError: everything that is wrong with it.
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
    """Leave by an exception, once: what is cleaned up on its way is not interrupted again."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


def run(arguments: argparse.Namespace, paths: list[str]) -> int:
    """Preprocess and report."""
    from megatron_sp.data.preprocess import EncodedBatch, Job, Summary, preprocess
    from megatron_sp.progress import progress_bar

    keep_tokenizers_single_threaded()  # the worker processes share the cores already
    data = Data(tokenizer_type=arguments.tokenizer_type, vocab_file=arguments.vocab_file,
                merge_file=arguments.merge_file, tokenizer_model=arguments.tokenizer_model,
                trust_remote_code=arguments.trust_remote_code)
    job = Job(data, arguments.vocab_size, tuple(arguments.json_keys), arguments.append_eod,
              arguments.on_error == "skip", arguments.parse_special_tokens)
    size = sum(os.path.getsize(path) for path in paths)
    # Starting processes takes longer than reading a small input.
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
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def report(summary: object, arguments: argparse.Namespace, seconds: float) -> None:
    """Print the summary of ``preprocess``."""
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
