#!/usr/bin/env python3
"""Train a SentencePiece tokenizer (BPE, byte fallback, end-of-document token) on JSON lines, text or Parquet.

Example:

    python tools/train_tokenizer.py --input corpus.jsonl --output tokenizer.model --vocab-size 4096

Decoding an encoded text gives the same text, with all its blanks and line ends. The tool uses all text: it samples no
lines and drops no long ones. Its memory grows with the number of different words, not with the size of the corpus.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
if (CHECKOUT / "megatron_sp").is_dir():  # false once pip has installed this file, which then finds the package anyway
    sys.path.insert(0, str(CHECKOUT))

from megatron_sp.config.cli.tool_parser import ToolParser  # noqa: E402
from megatron_sp.data.corpus.inputs import FORMATS, Part, find_parts, total_size  # noqa: E402
from megatron_sp.data.corpus.readers import parse, read_blocks  # noqa: E402
from megatron_sp.data.corpus.records import BadRecords, Skipped  # noqa: E402
from megatron_sp.errors import DataError  # noqa: E402
from megatron_sp.output_files import complete_file  # noqa: E402
from megatron_sp.progress import progress_bar  # noqa: E402
from megatron_sp.runtime import run_program  # noqa: E402

#: Characters that SentencePiece reserves. It drops a line with the first or the last one, and a piece never has a tab.
RESERVED = re.compile("[\\x00\\t\\u2585]")
#: A word: blanks and the characters up to the next blank. SentencePiece learns no piece that crosses such a border.
WORD = re.compile(" *[^ ]+| +")
MOST_BYTES = 4000  # SentencePiece drops lines of more than 4192 bytes


def count_words(parts: Sequence[Part], key: str, skip: bool) -> tuple[Counter[str], Skipped, int]:
    """Count how often each word occurs in all texts. Only different words are kept in memory, not the texts.

    Args:
        parts: the input files.
        key: key of the text in each JSON object.
        skip: whether to skip and count bad records instead of stopping at the first.

    Returns:
        The count of each word, the skipped records, and the number of texts.

    Raises:
        DataError: a file cannot be read, or a record is bad and ``skip`` is off.
    """
    words: Counter[str] = Counter()
    skipped, documents = Skipped(), 0
    with progress_bar(total=total_size(parts), unit="B", unit_scale=True, desc="Counting words") as bar:
        for block in read_blocks(parts, (key,)):
            complain = BadRecords(block.place_of, skip)
            for (text,) in parse(block, (key,), complain)[1]:
                documents += 1
                words.update(words_of(text))
            skipped.add(complain.skipped)
            bar.update(block.bytes_read)
    return words, skipped, documents


def words_of(text: str) -> Iterator[str]:
    """Split a text at line ends, before blanks and at reserved characters, as SentencePiece does.

    SentencePiece drops a word of more than ``MOST_BYTES``. Such a word is cut, so that only pieces across the cut are
    lost.
    """
    for line in text.split("\n"):
        for word in WORD.findall(line):
            for part in RESERVED.split(word):
                if len(part) * 4 <= MOST_BYTES or len(part.encode()) <= MOST_BYTES:
                    if part:
                        yield part
                else:
                    yield from (part[start:start + MOST_BYTES // 4] for start in range(0, len(part), MOST_BYTES // 4))


@contextmanager
def ticking(description: str) -> Iterator[None]:
    """Show the elapsed time while the body of the ``with`` statement runs: SentencePiece reports no progress."""
    stop = threading.Event()

    def tick() -> None:
        with progress_bar(desc=description, bar_format="{desc}: {elapsed}", total=None) as bar:
            while not stop.wait(0.5):
                bar.refresh()

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def train(words: Counter[str], output: Path, vocab_size: int) -> None:
    """Train a tokenizer on counted words and write it to ``output``. The file appears only when it is complete.

    Raises:
        DataError: the text has too few different pieces for ``vocab_size``, or the file cannot be written.
    """
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(f"{word}\t{count}" for word, count in words.items()), input_format="tsv",
            model_writer=model, vocab_size=vocab_size, model_type="bpe", byte_fallback=True, split_digits=True,
            character_coverage=0.9995, bos_id=1, eos_id=2, unk_id=0, normalization_rule_name="identity",
            remove_extra_whitespaces=False, add_dummy_prefix=False, allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n"], num_threads=1, minloglevel=2)
    except RuntimeError as error:
        raise DataError(f"SentencePiece cannot make --vocab-size {vocab_size} from this text; lower it or give more "
                        f"text ({str(error).strip().splitlines()[-1]})") from None
    with complete_file(output, "--output") as file:
        file.write(model.getvalue())


def build_parser() -> argparse.ArgumentParser:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    group = parser.add_argument_group("input and output")
    group.add_argument("--input", nargs="+", required=True, metavar="FILE",
                       help="files, directories or quoted patterns such as 'data/*.jsonl': JSON lines, text files (one "
                            "document each) or Parquet files, plain or compressed")
    group.add_argument("--input-format", choices=FORMATS, default="auto",
                       help="how to read all files (default: by the ending of each)")
    group.add_argument("--json-key", default="text", metavar="KEY",
                       help="key of the text in each JSON object (default: %(default)s)")
    group.add_argument("--on-error", choices=("stop", "skip"), default="stop",
                       help="at a bad record: stop and name it (default), or skip it and count the skipped ones")
    group.add_argument("--output", type=Path, required=True, metavar="FILE.model", help="tokenizer file to write")
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--vocab-size", type=int, default=4096, metavar="N",
                       help="number of tokens in the vocabulary (default: %(default)s)")
    return parser


def main(argv: list[str]) -> None:
    arguments = build_parser().parse_args(argv)
    started = time.monotonic()
    parts = find_parts(arguments.input, arguments.input_format)
    words, bad, documents = count_words(parts, arguments.json_key, arguments.on_error == "skip")
    if not words:
        raise DataError(f"--input has no text ({documents} documents, {bad.counts.total()} bad records).")
    with ticking(f"Training a tokenizer of {arguments.vocab_size} tokens"):
        train(words, arguments.output, arguments.vocab_size)
    print(f"{arguments.output}: {arguments.vocab_size} tokens, trained in {time.monotonic() - started:.0f} s on "
          f"{documents:,} documents with {len(words):,} different words")
    for reason, count in bad.counts.most_common():
        print(f"  skipped {count:,} record{'s' * (count > 1)}: {reason} (first: {bad.first(reason)})")


if __name__ == "__main__":
    run_program(main)
