#!/usr/bin/env python3
"""Continue prompts with a trained model and print the text.

Examples (with the checkpoint of examples/quickstart.sh; the second splits the model over two processes):

    python tools/generate_text.py --load runs/quickstart/checkpoints --prompt "def " --prompt "class "
    torchrun --nproc-per-node 2 tools/generate_text.py --load runs/quickstart/checkpoints --prompt "def " --greedy

The checkpoint may come from a training in any layout. Its configuration names the model and the tokenizer. Each prompt
is printed with its continuation: the first one of a batch token by token, the others when the batch is finished.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

CHECKOUT = Path(__file__).resolve().parent.parent
if (CHECKOUT / "megatron_sp").is_dir():  # false once pip has installed this file, which then finds the package anyway
    sys.path.insert(0, str(CHECKOUT))

from megatron_sp import runtime  # noqa: E402
from megatron_sp.config.cli.tool_parser import ToolParser  # noqa: E402
from megatron_sp.config.schema import Run  # noqa: E402
from megatron_sp.errors import ConfigError  # noqa: E402

if TYPE_CHECKING:
    from megatron_sp.data.tokenizers.tokenizer import Tokenizer
    from megatron_sp.model.gpt import GPT


def check_lengths(run: Run, prompts: list[list[int]], max_new_tokens: int) -> None:
    """Refuse prompts that are too long for a model with learned position embeddings.

    Raises:
        ConfigError: the longest prompt and its continuation have more tokens than the model has positions.
    """
    limit = run.model.max_position_embeddings
    longest = max(map(len, prompts))
    if run.model.position_embedding_type == "learned_absolute" and longest + max_new_tokens > limit:
        raise ConfigError(f"--max-new-tokens {max_new_tokens} after a prompt of {longest} tokens exceeds the model's "
                          f"{limit} learned positions; give at most {max(limit - longest, 0)} or a shorter prompt")


class Texts:
    """Print the continuations of a batch: the first prompt's token by token, the others when all rows have ended.

    Args:
        tokenizer: turns token ids into text.
        prompts, tokens: the prompts as text and as token ids.
        stop_words: texts that end a continuation.
        is_first: whether this is the first batch, whose first prompt needs no separator line above it.
        shown: whether this rank prints. The other tensor-parallel ranks only need to know which rows have stopped.
    """

    def __init__(self, tokenizer: Tokenizer, prompts: Sequence[str], tokens: Sequence[Sequence[int]],
                 stop_words: Sequence[str], *, is_first: bool, shown: bool):
        from megatron_sp.inference.text import StopWords, TextStream

        self.streams = [TextStream(tokenizer.decode, ids) for ids in tokens]
        self.stops = [StopWords(stop_words) for _ in tokens]
        separator = "-" * 40 + "\n"
        self.waiting = [("" if is_first and not row else separator) + prompt for row, prompt in enumerate(prompts)]
        self.shown = shown
        self._show(0)

    def push(self, new: Sequence[int | None]) -> set[int]:
        """Add one token to each row (None: the row has ended); return the rows that have just met a stop word."""
        stopped = set()
        for row, token in enumerate(new):
            if token is not None and not self.stops[row].found:
                self.waiting[row] += self.stops[row].push(self.streams[row].push(token))
                if self.stops[row].found:
                    stopped.add(row)
        self._show(0)
        return stopped

    def finish(self) -> None:
        """Print the text of all rows that is not printed yet."""
        for row, (stream, stop) in enumerate(zip(self.streams, self.stops)):
            if not stop.found:
                self.waiting[row] += stop.push(stream.finish())
                self.waiting[row] += stop.finish()
            self.waiting[row] += "\n"
            self._show(row)

    def _show(self, row: int) -> None:
        if self.shown:
            print(self.waiting[row], end="", flush=True)
        self.waiting[row] = ""


def print_continuations(model: GPT, tokenizer: Tokenizer, prompts: Sequence[str], tokens: Sequence[Sequence[int]],
                        vocab_size: int, arguments: argparse.Namespace, *, is_first: bool, shown: bool) -> None:
    """Generate the continuations of a batch of prompts and print them."""
    from megatron_sp.inference.sampling import Sampling, generate_batch

    sampling = Sampling(0.0 if arguments.greedy else arguments.temperature, arguments.top_k, arguments.top_p)
    texts = Texts(tokenizer, prompts, tokens, arguments.stop, is_first=is_first, shown=shown)
    assert model.output is not None
    steps = generate_batch(model, tokens, arguments.max_new_tokens, sampling, vocab_size=vocab_size,
                           eod=None if arguments.ignore_eod else tokenizer.eod, seed=arguments.seed,
                           use_cache=not arguments.no_cache, region=model.output.region,
                           chunk=arguments.sequence_chunk_size or 0)
    try:
        new = next(steps)
        while True:
            new = steps.send(texts.push(new))
    except StopIteration:
        texts.finish()


def build_parser() -> argparse.ArgumentParser:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    group = parser.add_argument_group("model and tokenizer")
    group.add_argument("--load", type=Path, required=True, metavar="DIR",
                       help="directory with checkpoints (--save of the training)")
    group.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to load (default: the newest)")
    for flag in ("--tokenizer-model", "--vocab-file", "--merge-file"):
        group.add_argument(flag, metavar="PATH",
                           help=f"where this tokenizer file is now (default: {flag} of the training)")
    group = parser.add_argument_group("text")
    group.add_argument("--prompt", action="append", required=True, metavar="TEXT",
                       help="text to continue; may be given several times")
    group.add_argument("--max-new-tokens", type=int, default=100, metavar="N",
                       help="most tokens to add to each prompt (default: %(default)s)")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT",
                       help="end a continuation just before this text; may be given several times")
    group.add_argument("--ignore-eod", action="store_true",
                       help="keep generating after an end-of-document token (default: end the continuation there)")
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=1.0, metavar="T",
                       help="divide the logits by T before the softmax; lower values favour probable tokens, 0 means "
                            "--greedy (default: %(default)s)")
    group.add_argument("--top-k", type=int, default=0, metavar="K",
                       help="sample only from the K most probable tokens (default: all tokens)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P",
                       help="sample only from the fewest most probable tokens whose probabilities sum to P or more "
                            "(default: %(default)s)")
    group.add_argument("--greedy", action="store_true", help="always take the most probable token")
    group.add_argument("--seed", type=int, default=1234, metavar="N",
                       help="seed of the sampling; a prompt's text does not depend on the other prompts "
                            "(default: %(default)s)")
    group = parser.add_argument_group("running")
    group.add_argument("--batch-size", type=int, default=8, metavar="N",
                       help="prompts that are continued at the same time (default: %(default)s)")
    group.add_argument("--sequence-chunk-size", type=int, metavar="N",
                       help="read prompts in chunks of N tokens, so that memory for activations does not depend on "
                            "their length (default: whole prompts)")
    group.add_argument("--no-cache", action="store_true",
                       help="compute the whole text again for every token, without a key/value cache (slow)")
    return parser


def main(argv: list[str]) -> None:
    arguments = build_parser().parse_args(argv)
    for flag, value in (("--max-new-tokens", arguments.max_new_tokens), ("--batch-size", arguments.batch_size),
                        ("--sequence-chunk-size", arguments.sequence_chunk_size)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} {value} must be at least 1")
    if not 0 <= arguments.seed < 1 << 63:
        raise ConfigError(f"--seed {arguments.seed} must be at least 0 and below 2^63")
    environment = runtime.launch_environment()

    from megatron_sp.inference.sampling import Sampling
    from megatron_sp.train.checkpoints.restore import for_device, load_model, read_config
    from megatron_sp.train.setup import choose_tokenizer

    run = read_config(arguments.load, arguments.ckpt_step, tp=environment.world_size)
    moved = {name: value for name in ("tokenizer_model", "vocab_file", "merge_file")
             if (value := getattr(arguments, name))}
    run = replace(run, data=replace(run.data, **moved),
                  memory=replace(run.memory, sequence_chunk_size=arguments.sequence_chunk_size or 0))
    # Called here to refuse wrong values before the model is loaded.
    Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    tokenizer = choose_tokenizer(run)
    prompts = [tokenizer.encode(prompt) for prompt in arguments.prompt]
    if not all(prompts):
        raise ConfigError("a --prompt has no tokens; give it at least one character")
    check_lengths(run, prompts, arguments.max_new_tokens)
    model = load_model(for_device(run), arguments.load, arguments.ckpt_step, environment)
    for start in range(0, len(prompts), arguments.batch_size):
        batch = slice(start, start + arguments.batch_size)
        print_continuations(model, tokenizer, arguments.prompt[batch], prompts[batch], run.model.vocab_size, arguments,
                            is_first=start == 0, shown=environment.rank == 0)
    runtime.stop()


if __name__ == "__main__":
    runtime.run_program(main)
