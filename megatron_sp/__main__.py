"""The command ``megatron-sp``: pretraining and the tools for those who installed the package without its repository.

``megatron-sp pretrain FLAGS`` runs ``pretrain_gpt.py`` as one process; for several, ``torchrun -m pretrain_gpt FLAGS``.
``megatron-sp preprocess_data FLAGS`` and so on run the programs of ``tools/``.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

#: Programs that are useful without a checkout, and what each is for.
PROGRAMS = {
    "pretrain": "pretrain a model (pretrain_gpt.py)",
    "preprocess_data": "turn text into token files",
    "merge_datasets": "join token files",
    "train_tokenizer": "train a SentencePiece tokenizer",
    "data_statistics": "count documents and tokens of token files",
    "inspect_dataset": "show, check and compare token files and samples",
    "build_index": "build the index cache of a run beforehand",
    "evaluate": "perplexity of a checkpoint",
    "needle_in_a_haystack": "whether a model finds a sentence in a long text",
    "generate_text": "sample text from a checkpoint",
    "convert_checkpoint": "bring a model from Hugging Face or Megatron, or take one to Hugging Face",
    "verify_layout": "prove on CPU that a layout trains as one process does",
    "inspect_checkpoint": "list, show, verify, compare and delete checkpoints",
    "plot_run": "draw the curves of runs",
}


def main() -> int:
    """Run the program that the first argument names with the other arguments, and return the exit code."""
    name = sys.argv[1].replace("-", "_") if len(sys.argv) > 1 else ""
    if name not in PROGRAMS:
        lines = [f"  {program:<20} {purpose}" for program, purpose in PROGRAMS.items()]
        asked = name in ("__help", "_h")
        print("usage: megatron-sp PROGRAM FLAGS; --help after a program lists its flags", *lines, sep="\n",
              file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    sys.argv[:2] = [f"megatron-sp {name}"]
    runpy.run_path(str(_file(name)), run_name="__main__")
    return 0


def _file(name: str) -> Path:
    """Return the program's file. ``tools`` lies inside the installed package, but next to the package in a checkout."""
    package = Path(__file__).resolve().parent
    if name == "pretrain":
        return package.parent / "pretrain_gpt.py"
    folders = (package / "tools", package.parent / "tools")
    return next(path for folder in folders if (path := folder / f"{name}.py").exists())


if __name__ == "__main__":
    sys.exit(main())
