#!/usr/bin/env python3
"""Bring a model from Hugging Face or Megatron, or take one to Hugging Face.

    python tools/convert_checkpoint.py hf-to-megatron-sp --load Llama-3.2-1B --save runs/llama
    python tools/convert_checkpoint.py megatron-sp-to-hf --load runs/llama --save llama-trained
    python tools/convert_checkpoint.py megatron-lm-to-megatron-sp --load megatron/checkpoints --save runs/gpt

No GPU is needed, and the whole model never lies in memory: tensors are read and written a few rows at a time. The
result appears under its name when it is complete. Nothing in a checkpoint of another system is executed.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
if (CHECKOUT / "megatron_sp").is_dir():  # false once pip has installed this file, which then finds the package anyway
    sys.path.insert(0, str(CHECKOUT))

from megatron_sp.config.cli.tool_parser import ToolParser, unknown_flag  # noqa: E402
from megatron_sp.config.families import FAMILIES  # noqa: E402
from megatron_sp.errors import ConfigError  # noqa: E402
from megatron_sp.output_files import no_empty_directory_left  # noqa: E402
from megatron_sp.runtime import run_program  # noqa: E402

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def parse_size(text: str) -> int:
    """Return a number of bytes: ``5GB``, ``500MB``, ``2GiB``.

    Raises:
        ConfigError: the text is not a size above 0.
    """
    match = re.fullmatch(r"([0-9.]+) ?([KMG]I?B)?", text.strip().upper())
    try:
        size = int(float(match[1]) * UNITS[match[2] or ""]) if match else 0
    except ValueError:
        size = 0
    if size < 1:
        raise ConfigError(f"--max-shard-size {text!r} is not a size; give one such as 5GB or 500MB")
    return size


def build_parser() -> argparse.ArgumentParser:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="CONVERSION")

    def command(name: str, help: str, load: str, save: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        one.add_argument("--load", type=Path, required=True, metavar="DIR", help=load)
        one.add_argument("--save", type=Path, required=True, metavar="DIR", help=save)
        return one

    command("hf-to-megatron-sp", "from Hugging Face to a checkpoint that any layout loads",
            "directory of the model: config.json and *.safetensors (or pytorch_model*.bin)",
            "new directory for the checkpoint, which --load DIR --finetune or --pretrained-checkpoint DIR starts from")
    for name, program in (("megatron-lm-to-megatron-sp", "Megatron-LM (--ckpt-format torch)"),
                          ("megatron-deepspeed-to-megatron-sp", "Megatron-DeepSpeed (global_stepN)")):
        one = command(name, f"from {program} to a checkpoint that any layout loads; model weights only. Flags of the "
                            "model (--num-layers 24 ...) are used instead of those stored in the checkpoint",
                      "Megatron's --save directory, or the directory of one iteration in it",
                      "new directory for the checkpoint")
        one.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to take (default: the tracker's)")
        one.add_argument("--qkv-layout", default="", choices=("grouped", "split", "inner"),
                         help="order of the rows of query, key and value: grouped by key/value head (Megatron-LM since "
                              "2021), split into three parts (checkpoint version 0, and DeepSpeed with sequence "
                              "parallelism), or interleaved inside heads (version 1); default: as the files say")
    one = command("megatron-sp-to-hf", "from a checkpoint of any layout to Hugging Face",
                  "--save directory of the training", "new directory for the model")
    one.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to take (default: the newest)")
    one.add_argument("--model-type", default="", choices=[family.model_type for family in FAMILIES],
                     help="family to write (default: the first one that can express the model)")
    one.add_argument("--dtype", default="", choices=("float32", "bfloat16", "float16"),
                     help="type of the written weights (default: the type in which the training computed)")
    one.add_argument("--max-shard-size", default="5GB", metavar="SIZE",
                     help="most bytes of one file, such as 5GB or 500MB (default: %(default)s)")
    one.add_argument("--tokenizer", type=Path, metavar="PATH",
                     help="directory or file of the tokenizer to copy (default: that of the training)")
    return parser


def main(argv: list[str]) -> None:
    parser = build_parser()
    arguments, more = parser.parse_known_args(argv)
    if more and "qkv_layout" not in arguments:
        known = [f"--{name.replace('_', '-')}" for name in vars(arguments) if name != "command"]
        raise ConfigError([unknown_flag(word, known) for word in more if word.startswith("-")] or
                          [f"{more[0]} belongs to no flag; --help lists all flags."])

    from megatron_sp.convert import conversions

    with no_empty_directory_left(arguments.save):
        if arguments.command == "hf-to-megatron-sp":
            result = conversions.hf_to_native(arguments.load, arguments.save)
        elif "qkv_layout" in arguments:
            result = conversions.megatron_to_native(arguments.load, arguments.save, iteration=arguments.ckpt_step,
                                                    qkv_layout=arguments.qkv_layout, flags=more)
        else:
            result = conversions.native_to_hf(
                arguments.load, arguments.save, iteration=arguments.ckpt_step, model_type=arguments.model_type,
                dtype=arguments.dtype, shard_bytes=parse_size(arguments.max_shard_size), tokenizer=arguments.tokenizer)
    for note in result.notes:
        print(f"Note: {note}")
    print(f"wrote {result.path}")


if __name__ == "__main__":
    run_program(main)
