#!/usr/bin/env python3
"""Tokenize text into the token files that pretrain_gpt.py reads: JSON lines, text files or directories, Parquet files.

Example (writes data/corpus_text_document.bin and .idx, with the same bytes as Megatron's tool):

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus --append-eod \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

CHECKOUT = Path(__file__).resolve().parent.parent
if (CHECKOUT / "megatron_sp").is_dir():  # false once pip has installed this file, which then finds the package anyway
    sys.path.insert(0, str(CHECKOUT))

from megatron_sp.config.cli.tool_parser import ToolParser, unknown_flag  # noqa: E402
from megatron_sp.config.schema import Data  # noqa: E402
from megatron_sp.data.corpus.inputs import FORMATS, choose_share, find_parts, total_size  # noqa: E402
from megatron_sp.errors import ConfigError, DataError  # noqa: E402
from megatron_sp.output_files import no_empty_directory_left  # noqa: E402
from megatron_sp.runtime import keep_tokenizers_single_threaded, run_program  # noqa: E402

if TYPE_CHECKING:
    from megatron_sp.data.corpus.encode import Job
    from megatron_sp.data.corpus.summary import Summary

#: Spellings of other tools for flags of this one, after "_" was replaced by "-".
ALIASES = {"--vocab": "--vocab-file", "--json-key": "--json-keys", "--tokenizer-name-or-path": "--tokenizer-model",
           "--merges-file": "--merge-file"}
#: Flags of other tools that are accepted and have no effect here, with the number of their values.
HINTS = {"--dataset-impl": 1, "--chunk-size": 1, "--find-optimal-num-workers": 0, "--workers-to-check": "+",
         "--seq-length": 1, "--no-new-tokens": 0, "--output-result-total-token-info": 0, "--load": 1,
         "--make-vocab-size-divisible-by": 1, "--tensor-model-parallel-size": 1,
         "--padded-vocab-size": 1, "--rank": 1}
#: Flags of other tools that would change the result and are not supported, with the reason or the alternative.
REFUSED = {"--split-sentences": "sentences are not split; that is for BERT and T5, which are not trained here",
           "--keep-newlines": "it belongs to --split-sentences, which is not supported",
           "--lang": "it belongs to --split-sentences, which is not supported",
           "--append-bos": "tokens at the start of documents are not supported",
           "--prepend-space": "texts are tokenized as they are",
           "--max-documents": "cut the input instead, for example with head -n",
           "--patch-tokenizer-type": "use --tokenizer-type HuggingFaceTokenizer --tokenizer-model DIRECTORY",
           "--tokenizer-file": "use --tokenizer-type HuggingFaceTokenizer --tokenizer-model DIRECTORY"}
#: Escapes that --separator understands.
ESCAPES = {"\\n": "\n", "\\t": "\t", "\\r": "\r", "\\\\": "\\"}


def build_parser() -> ToolParser:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    _add_input_and_output(parser)
    _add_tokenizer(parser)
    group = parser.add_argument_group("running")
    group.add_argument("--workers", type=int, default=0, metavar="N",
                       help="processes that tokenize; the output is the same for any number (default: one per core)")
    group.add_argument("--resume", action="store_true",
                       help="continue an unfinished run with the same flags; without one, start from the beginning; do "
                            "nothing if the output is complete")
    group.add_argument("--shard", default="", metavar="I/N",
                       help="read only share I (0 to N-1) of N about equal shares of the input, and add _I-of-N to the "
                            "output prefix; for job arrays; tools/merge_datasets.py joins the outputs")
    group.add_argument("--log-interval", type=int, default=1000, metavar="N",
                       help="update the counts beside the progress bar after this many documents (default: 1000)")
    for name, count in HINTS.items():  # --help does not show flags without effect
        nargs = {"nargs": count} if count else {"action": "store_true"}
        parser.add_argument(name, dest="hint" + name, help=argparse.SUPPRESS, default=None, **nargs)  # type: ignore[arg-type]
    return parser


def _add_input_and_output(parser: ToolParser) -> None:
    group = parser.add_argument_group("input and output")
    group.add_argument("--input", nargs="+", required=True, metavar="FILE",
                       help="files, directories, quoted patterns such as 'data/*.jsonl', or - for the standard input; "
                            "plain or compressed with gzip, zstd, bzip2 or xz")
    group.add_argument("--input-format", choices=FORMATS, default="auto",
                       help="jsonl: one JSON object a line; text: one document a file; parquet; auto (default): by the "
                            "ending of each file, jsonl where it says nothing")
    group.add_argument("--separator", default="", metavar="STRING",
                       help="split text files into documents at this string, in which \\n is a line end, \\t "
                            "a tab")
    group.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY",
                       help="keys of the JSON objects, or columns of Parquet files, to tokenize, into one pair of "
                            "files for each key (default: text)")
    group.add_argument("--on-error", choices=("stop", "skip"), default="stop",
                       help="at a bad record: stop and name it (default), or skip it, count it, and show the first of "
                            "each kind in PREFIX.report.json")
    group.add_argument("--output-prefix", required=True, metavar="PREFIX",
                       help="path to which _KEY_document.bin and .idx are added to name the output files")
    group.add_argument("--append-eod", action="store_true",
                       help="end every document with the end-of-document token (recommended)")
    group.add_argument("--checksum", action="store_true",
                       help="write PREFIX_KEY_document.checksums.json too, by which tools/inspect_dataset.py check "
                            "finds damaged tokens")
    group.add_argument("--partitions", type=int, default=1, metavar="N",
                       help="deal the documents in turn to N token sets and join these, as Megatron's tool does; the "
                            "default, 1, keeps the order of the input and is as fast")
    group.add_argument("--keep-sequential-samples", action="store_true",
                       help="keep the order of the input with --partitions too, which then changes nothing")


def _add_tokenizer(parser: ToolParser) -> None:
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", default=Data().tokenizer_type, metavar="TYPE",
                       help="type of tokenizer, as for pretrain_gpt.py (default: %(default)s)")
    group.add_argument("--vocab-file", default="", metavar="FILE", help="vocab.json of GPT2BPETokenizer")
    group.add_argument("--merge-file", default="", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    group.add_argument("--tokenizer-model", default="", metavar="PATH",
                       help="SentencePiece .model file, directory of a Hugging Face tokenizer, or JSON vocabulary of "
                            "TikTokenizer")
    group.add_argument("--vocab-size", type=int, default=0, metavar="N",
                       help="vocabulary size of NullTokenizer; TikTokenizer cuts its vocabulary to it")
    group.add_argument("--vocab-extra-ids", type=int, default=0, metavar="N",
                       help="ids to add behind the tokenizer's own; no text is encoded as one of them")
    group.add_argument("--tiktoken-pattern", choices=("v1", "v2"), default=Data().tiktoken_pattern,
                       help="how TikTokenizer splits a text into words (default: %(default)s)")
    group.add_argument("--tiktoken-num-special-tokens", type=int, default=Data().tiktoken_num_special_tokens,
                       metavar="N", help="ids that TikTokenizer keeps for special tokens (default: %(default)s)")
    group.add_argument("--parse-special-tokens", action="store_true",
                       help="encode the spelling of a special token in a text, such as <s>, as that token; by default "
                            "it is plain text (Hugging Face tokenizers only)")
    group.add_argument("--trust-remote-code", action="store_true",
                       help="let a Hugging Face tokenizer run the Python code in its directory")


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
            if name in REFUSED:
                problems.append(f"{name}: {REFUSED[name]}")
        words.append(name + equals + value)
    if problems:
        raise ConfigError(problems)
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(words)
    known = [option for action in parser._actions for option in action.option_strings
             if option not in HINTS]
    problems += [unknown_flag(word, known) for word in unknown if word.startswith("-")]
    if unknown and not problems:
        problems.append(f"{unknown[0]} belongs to no flag; --help lists all flags.")
    problems += _problems_of(arguments)
    if problems:
        raise ConfigError(problems)
    return arguments


def _problems_of(arguments: argparse.Namespace) -> list[str]:
    """Return what is wrong with the values of the flags."""
    problems = []
    if arguments.workers < 0 or arguments.partitions < 1 or arguments.log_interval < 1:
        problems.append("--workers, --partitions and --log-interval must be at least 1")
    implementation = (getattr(arguments, "hint--dataset-impl") or ["mmap"])[0]
    if implementation != "mmap":
        problems.append(f"--dataset-impl {implementation}: only mmap is written")
    if len(set(arguments.json_keys)) != len(arguments.json_keys):
        problems.append(f"--json-keys names a key twice: {' '.join(arguments.json_keys)}")
    if arguments.shard:
        found = re.fullmatch(r"(\d+)/(\d+)", arguments.shard)
        if not found or int(found[1]) >= int(found[2]):
            problems.append(f"--shard {arguments.shard}: give I/N with I from 0 to N-1, for example --shard 0/8")
    if not os.path.basename(arguments.output_prefix):
        problems.append(f"--output-prefix {arguments.output_prefix!r}: a name must follow the directory")
    return problems


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    if hints := [name for name in HINTS if getattr(arguments, "hint" + name)]:
        print(f"note: accepted without effect: {', '.join(hints)}", flush=True)
    try:
        with no_empty_directory_left(os.path.dirname(arguments.output_prefix) or "."):
            return run(arguments)
    except KeyboardInterrupt as interrupt:
        kept = os.path.exists(f"{output_prefix(arguments)}.unfinished.json")
        print(f"\ninterrupted; {'--resume continues this run' if kept else 'nothing was written'}", file=sys.stderr)
        return 128 + interrupt.args[0]
    except DataError as error:
        if not os.path.exists(f"{output_prefix(arguments)}.unfinished.json") or "--resume" in str(error):
            raise
        raise DataError(f"{error} What was written before is kept: --resume continues it.") from None


def _interrupt(number: int, frame: object) -> NoReturn:
    """Raise KeyboardInterrupt at the first signal and ignore later ones, so that they do not interrupt the clean-up."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


def output_prefix(arguments: argparse.Namespace) -> str:
    """Return --output-prefix, with the number of the share where there is one."""
    if not arguments.shard:
        return arguments.output_prefix
    index, count = map(int, arguments.shard.split("/"))
    return f"{arguments.output_prefix}_{index:05d}-of-{count:05d}"


def run(arguments: argparse.Namespace) -> int:
    """Preprocess the files, print a report and return the exit code."""
    from megatron_sp.data.corpus.preprocess import Output, Preprocessor
    from megatron_sp.progress import progress_bar

    parts = find_parts(arguments.input, arguments.input_format)
    if len(arguments.json_keys) > 1 and any(part.kind == "text" for part in parts):
        raise ConfigError("--json-keys: a text file has one text, so give one key, which names the output.")
    if arguments.separator and not any(part.kind == "text" for part in parts):
        raise ConfigError("--separator divides text files, and --input names none; --input-format text reads any file "
                          "as text.")
    if arguments.shard:
        parts = choose_share(parts, *map(int, arguments.shard.split("/")))
    keep_tokenizers_single_threaded()  # the worker processes share the cores already
    partitions = 1 if arguments.keep_sequential_samples else arguments.partitions
    output = Output(output_prefix(arguments), partitions, arguments.checksum, arguments.resume, bool(arguments.shard))
    size = total_size(parts)
    # For less than 1 MiB of input, starting processes takes longer than tokenizing in this one.
    workers = arguments.workers or (_cores() if size is None or size > 1 << 20 else 1)
    preprocessor = Preprocessor(parts, _job(arguments), output)
    if preprocessor.complete_already():
        print(f"{output.prefix} is complete already; nothing to do")
        return 0
    before = preprocessor.done_before()
    files = len({part.path for part in parts})
    print(f"reading {files:,} file{'s' * (files != 1)}{'' if size is None else f', {size / 1e6:,.1f} MB'}, with "
          f"{workers} process{'es' * (workers > 1)}", flush=True)
    with progress_bar(total=size, initial=before.bytes_read, unit="B", unit_scale=True, desc="tokenizing",
                      dynamic_ncols=True, mininterval=0.2 if sys.stderr.isatty() else 5.0) as shown:
        progress = _Progress(shown, arguments.log_interval, before.tokens)
        summary = preprocessor.run(workers, progress)
    report(summary, arguments, progress)
    return 0


def _job(arguments: argparse.Namespace) -> Job:
    """Return how the command line says to tokenize."""
    from megatron_sp.data.corpus.encode import Job

    data = Data(**{name: getattr(arguments, name) for name in (
        "tokenizer_type", "vocab_file", "merge_file", "tokenizer_model", "trust_remote_code", "vocab_extra_ids",
        "tiktoken_pattern", "tiktoken_num_special_tokens")})
    separator = re.sub(r"\\[ntr\\]", lambda found: ESCAPES[found[0]], arguments.separator).encode()
    return Job(data, arguments.vocab_size, tuple(arguments.json_keys), arguments.append_eod,
               arguments.on_error == "skip", arguments.parse_special_tokens, separator)


class _Progress:
    """Move the progress bar, and show documents and tokens per second beside it.

    Args:
        shown: the bar.
        interval: documents between two updates of the counts.
        tokens_before: tokens of an earlier process whose run is continued; they do not count for the speed.
    """

    def __init__(self, shown: Any, interval: int, tokens_before: int = 0):
        self.bar = shown
        self.interval, self.started, self.last = interval, time.monotonic(), 0
        self.tokens_before = tokens_before

    def speed(self, summary: Summary) -> float:
        """Return tokens per second."""
        return (summary.tokens - self.tokens_before) / (time.monotonic() - self.started)

    def __call__(self, count: int, summary: Summary) -> None:
        if summary.documents - self.last >= self.interval:
            self.last = summary.documents
            self.bar.set_postfix_str(f"{self.last:,} documents, {self.speed(summary) / 1e3:,.0f}k tokens/s",
                                     refresh=False)
        self.bar.update(count)


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def report(summary: Summary, arguments: argparse.Namespace, progress: _Progress) -> None:
    """Print the totals, and warnings about data that training would suffer from."""
    from megatron_sp.data.corpus.summary import report_path

    prefix = output_prefix(arguments)
    print(f"{summary.documents:,} documents, {summary.tokens:,} tokens in {time.monotonic() - progress.started:.1f} s "
          f"({progress.speed(summary):,.0f} tokens/s)")
    for key, totals in summary.keys.items():
        empty = f", {totals.empty:,} empty (no tokens stored)" if totals.empty else ""
        longest = totals.lengths.longest
        print(f"  {prefix}_{key}_document: {totals.tokens:,} tokens, longest document {longest:,}{empty}")
        if summary.documents >= 10 and (percentiles := totals.lengths.percentiles()):
            print("    tokens of a document: " + ", ".join(
                f"{percent}% have at most {length:,}" for percent, length in percentiles.items()))
        if totals.unknown:
            share = totals.unknown / totals.tokens
            print(f"  WARNING: {totals.unknown:,} of these tokens ({share:.2%}) are the unknown token: the tokenizer "
                  "cannot represent that text.")
    for reason, count in summary.skipped.counts.most_common():
        print(f"  skipped {count:,} record{'s' * (count > 1)}: {reason} (first: {summary.skipped.first(reason)})")
    if summary.skipped.counts:
        print(f"  the first records of each kind that were skipped are in {report_path(prefix)}")
    if summary.changed:
        print(f"WARNING: {summary.changed} of {summary.compared} texts that were decoded again did not come back as "
              f"they were (first: {summary.first_changed}).\n         The tokenizer changes or drops characters, often "
              "line ends, repeated blanks or unknown letters. A tokenizer of tools/train_tokenizer.py keeps all.")
    if not summary.documents:
        print("note: this share of the input has no documents; it is written so that all shares can be joined")
    elif not summary.tokens:
        print("WARNING: all documents are empty; there is nothing to train on in this data.")
    if not arguments.append_eod:
        print("WARNING: --append-eod was not given: no token marks where one document ends and the next begins.\n"
              "         For pretraining this is almost always a mistake; run again with --append-eod.")


if __name__ == "__main__":
    run_program(main)
