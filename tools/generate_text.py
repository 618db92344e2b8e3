#!/usr/bin/env python3
"""Continue prompts with a trained model: text from a checkpoint, on one process.

``generate_text.py --load DIR --prompt "def " --prompt "class "`` reads the model, its configuration and
its tokenizer from DIR (any layout it was trained under) and prints each prompt with its continuation.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_sp import runtime  # noqa: E402
from megatron_sp.checkpoint import files  # noqa: E402
from megatron_sp.config.resolve import resolve, with_vocab  # noqa: E402
from megatron_sp.config.schema import Memory, Parallel, Precision, Run  # noqa: E402
from megatron_sp.config.serialize import from_dict  # noqa: E402
from megatron_sp.errors import CheckpointError, ConfigError  # noqa: E402

if TYPE_CHECKING:
    from megatron_sp.data.tokenizer import Tokenizer
    from megatron_sp.model.gpt import GPT


def read_config(directory: Path, iteration: int | None) -> Run:
    """The run that wrote the checkpoint, laid out for one process.

    Raises:
        CheckpointError: there is no complete checkpoint.
    """
    path = files.find_checkpoint(directory, iteration)
    if path is None:
        raise CheckpointError(f"--load {directory} holds no checkpoint ({files.TRACKER} is missing); give the --save "
                              "directory of a training run")
    saved = from_dict(files.read_state(path)["config"])
    run = replace(saved, parallel=Parallel(), model=replace(saved.model, padded_vocab_size=0),
                  memory=Memory())
    return with_vocab(resolve(run, world_size=1), saved.model.vocab_size)


def for_device(run: Run) -> Run:
    """In fp32 on a CPU, where it is faster; in the precision of the training on a GPU."""
    import torch

    return run if torch.cuda.is_available() else replace(run, precision=Precision())


def load_model(run: Run, directory: Path, iteration: int | None) -> GPT:
    """Build the model on this process and fill it."""
    from megatron_sp.checkpoint.store import load_checkpoint
    from megatron_sp.model.build import build_model
    from megatron_sp.model.gpt import GPT
    from megatron_sp.parallel.mesh import ParallelMesh

    device = runtime.start(run.parallel, runtime.Environment())
    model = build_model(run, ParallelMesh.build(run.parallel, device))
    assert isinstance(model, GPT)
    load_checkpoint(directory, model, None, run, iteration=iteration)
    return model.eval()


def check_lengths(run: Run, prompts: list[list[int]], max_new_tokens: int) -> None:
    """Learned positions end where the training's did.

    Raises:
        ConfigError: a prompt and its continuation would be longer.
    """
    limit = run.model.max_position_embeddings
    longest = max(map(len, prompts))
    if run.model.position_embedding_type == "learned_absolute" and longest + max_new_tokens > limit:
        raise ConfigError(f"--max-new-tokens {max_new_tokens} after a prompt of {longest} tokens exceeds the model's "
                          f"{limit} learned positions; give at most {max(limit - longest, 0)} or a shorter prompt")


def print_continuation(model: GPT, tokenizer: Tokenizer, prompt: str, tokens: list[int], vocab_size: int,
                       arguments: argparse.Namespace) -> None:
    """Print the prompt, then its continuation as it comes."""
    from megatron_sp.model.generate import Sampling, TextStream, generate

    sampling = Sampling(0.0 if arguments.greedy else arguments.temperature, arguments.top_k, arguments.top_p)
    stream = TextStream(tokenizer.decode, tokens)
    print(prompt, end="", flush=True)
    for token in generate(model, tokens, arguments.max_new_tokens, sampling, vocab_size=vocab_size,
                          eod=None if arguments.ignore_eod else tokenizer.eod, seed=arguments.seed,
                          use_cache=not arguments.no_cache):
        print(stream.push(token), end="", flush=True)
    print(stream.finish(), flush=True)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--load", type=Path, required=True, help="directory of checkpoints (--save of the training)")
    parser.add_argument("--ckpt-step", type=int, help="load this iteration instead of the newest")
    parser.add_argument("--prompt", action="append", required=True, help="text to continue; may be given several times")
    parser.add_argument("--max-new-tokens", type=int, default=100, help="stop after this many (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0,
                        help="below 1: safer, above 1: bolder, 0: as --greedy (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=0, help="draw among the K most probable tokens (default: all)")
    parser.add_argument("--top-p", type=float, default=1.0,
                        help="draw among the most probable tokens that sum to P (default: %(default)s)")
    parser.add_argument("--greedy", action="store_true", help="always take the most probable token")
    parser.add_argument("--seed", type=int, default=1234, help="of the draws, for each prompt (default: %(default)s)")
    parser.add_argument("--ignore-eod", action="store_true", help="go on after the end of a document")
    parser.add_argument("--no-cache", action="store_true", help="read the whole text again for every token (slow)")
    for flag in ("--tokenizer-model", "--vocab-file", "--merge-file"):
        parser.add_argument(flag, help="where the tokenizer is now (default: where it was in training)")
    return parser


def main(argv: list[str]) -> None:
    arguments = build_parser().parse_args(argv)
    if arguments.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens {arguments.max_new_tokens} must be at least 1")
    run = read_config(arguments.load, arguments.ckpt_step)
    moved = {name: value for name in ("tokenizer_model", "vocab_file", "merge_file")
             if (value := getattr(arguments, name))}
    run = replace(run, data=replace(run.data, **moved))

    from megatron_sp.data.tokenizer import build_tokenizer
    from megatron_sp.model.generate import Sampling

    Sampling(arguments.temperature, arguments.top_k, arguments.top_p)  # refuses wrong values before the model is read
    tokenizer = build_tokenizer(run.data, run.model.vocab_size)
    prompts = [tokenizer.encode(prompt) for prompt in arguments.prompt]
    if not all(prompts):
        raise ConfigError("a --prompt has no tokens; give it at least one character")
    check_lengths(run, prompts, arguments.max_new_tokens)
    model = load_model(for_device(run), arguments.load, arguments.ckpt_step)
    for number, (prompt, tokens) in enumerate(zip(arguments.prompt, prompts)):
        if number:
            print("-" * 40)
        print_continuation(model, tokenizer, prompt, tokens, run.model.vocab_size, arguments)
    runtime.stop()


if __name__ == "__main__":
    runtime.run_program(main)
