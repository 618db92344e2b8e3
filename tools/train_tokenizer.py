#!/usr/bin/env python3
"""Train a SentencePiece tokenizer (BPE, byte fallback, end-of-document token) on JSON lines.

Whitespace, line ends included, is kept: decoding an encoded text gives the text back.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_sp.errors import DataError  # noqa: E402
from megatron_sp.progress import progress_bar  # noqa: E402
from megatron_sp.runtime import run_program  # noqa: E402


def read_texts(path: Path, key: str) -> Iterator[str]:
    """The texts under ``key`` of a JSON lines file.

    Raises:
        DataError: the file is missing, or a line is no JSON object with a string under ``key``.
    """
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    text = json.loads(line)[key]
                except (json.JSONDecodeError, KeyError, TypeError):
                    raise DataError(f"{path} line {number} is not a JSON object with the key '{key}'; repair the "
                                    "line or name the key with --json-key") from None
                yield text
    except OSError as error:
        raise DataError(f"--input {path} cannot be read ({error.strerror}); give an existing JSON lines file") from None


def lines_of(texts: Iterator[str]) -> Iterator[str]:
    """Non-empty lines: SentencePiece learns from lines, the line end itself is a symbol of its own."""
    for text in texts:
        yield from (line for line in text.split("\n") if line)


@contextmanager
def ticking(description: str) -> Iterator[None]:
    """Show that something that reports no progress is still running."""
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


def train(lines: Iterator[str], output: Path, vocab_size: int) -> None:
    """Train on ``lines`` and write the model to ``output``; complete or not at all.

    Raises:
        DataError: the text does not hold so many different pieces.
    """
    import sentencepiece

    output.parent.mkdir(parents=True, exist_ok=True)
    aside = output.with_name(output.name + ".part")
    try:
        with open(aside, "wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=lines, model_writer=file, vocab_size=vocab_size, model_type="bpe",
                byte_fallback=True, split_digits=True, character_coverage=0.9995, bos_id=1, eos_id=2, unk_id=0,
                normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False,
                allow_whitespace_only_pieces=True, user_defined_symbols=["\n"], num_threads=1, minloglevel=2)
    except RuntimeError as error:
        aside.unlink(missing_ok=True)
        raise DataError(f"SentencePiece cannot make --vocab-size {vocab_size} from this text; lower it or give more "
                        f"text ({str(error).strip().splitlines()[-1]})") from None
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    aside.replace(output)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--input", type=Path, required=True, help="JSON lines file")
    parser.add_argument("--json-key", default="text", help="key of the text (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="the .model file to write")
    parser.add_argument("--vocab-size", type=int, default=4096, help="number of tokens (default: %(default)s)")
    return parser


def main(argv: list[str]) -> None:
    arguments = build_parser().parse_args(argv)
    started = time.monotonic()
    texts = list(read_texts(arguments.input, arguments.json_key))
    with ticking(f"Training a tokenizer of {arguments.vocab_size} tokens"):
        train(lines_of(iter(texts)), arguments.output, arguments.vocab_size)
    print(f"{arguments.output}: {arguments.vocab_size} tokens, trained in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    run_program(main)
