"""Rules about what a run needs on this machine: data and tokenizer files, directories, Python packages.

Only what is quick to look up, so that it is reported together with wrong flags and before anything heavy happens.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

from megatron_sp.config.cli.named_sets import named_sets
from megatron_sp.config.rules.data import check_data, prefixes_of
from megatron_sp.config.rules.other_systems import other_system_problem
from megatron_sp.config.schema import Run
from megatron_sp.layout.document_split import SPLITS, empty_split_problem, parse_split
from megatron_sp.user_function import parts

#: Begins every .idx file (see ``data.token_files.indexed_dataset``).
MAGIC = b"MMIDIDX"
#: Place of the number of sequences in the header of an .idx file.
NUM_SEQUENCES = slice(18, 26)


def file_problems(run: Run) -> list[str]:
    """Return what is missing on this machine, one sentence each."""
    return tokenizer_problems(run) + data_problems(run) + directory_problems(run) + package_problems(run)


def tokenizer_problems(run: Run) -> list[str]:
    """Return tokenizer files that do not exist.

    A name without a directory is accepted, because Hugging Face's cache may hold a tokenizer of this name.
    """
    data = run.data
    if data.mock_data and run.model.vocab_size:
        return []
    named = []
    if data.tokenizer_type == "GPT2BPETokenizer":
        named = [("--vocab-file", data.vocab_file), ("--merge-file", data.merge_file)]
    elif "SentencePiece" in data.tokenizer_type or data.tokenizer_type in ("Llama2Tokenizer", "TikTokenizer"):
        named = [("--tokenizer-model", data.tokenizer_model)]
    elif data.tokenizer_model.startswith(("/", "./", "../", "~")):
        named = [("--tokenizer-model", data.tokenizer_model)]
    return [f"{flag} {path}: there is no such file." for flag, path in named
            if path and not os.path.exists(os.path.expanduser(path))]


def data_problems(run: Run) -> list[str]:
    """Return token files that are missing, and splits of ``--data-path`` that get no document."""
    if check_data(run):
        return []       # ``check_data`` reports that the data flags contradict each other
    data, evaluates, trains = run.data, run.train.eval_iters > 0, not run.train.skip_train
    place = parts(data.dataset_provider)[0]
    if place.endswith(".py") and not os.path.isfile(place):
        return [f"--dataset-provider {data.dataset_provider}: there is no file {place}."]
    used = {"--data-path": (data.data_path, True), "--train-data-path": (data.train_data_path, trains),
            "--test-data-path": (data.test_data_path, evaluates)}
    found = []
    for flag, (words, is_used) in used.items():
        found += _missing(flag, words if is_used else ())
    for words in named_sets(data.valid_data_path).values():
        found += _missing("--valid-data-path", words if evaluates else ())
    return found or _empty_splits(run, {"train": trains, "valid": evaluates, "test": evaluates})


def _missing(flag: str, words: tuple[str, ...]) -> list[str]:
    return [f"{flag}: {problem}" for prefix in prefixes_of(words) if (problem := token_file_problem(prefix))]


def _empty_splits(run: Run, is_used: dict[str, bool]) -> list[str]:
    words, split = run.data.data_path, run.data.split
    prefixes = prefixes_of(words)
    if is_used["train"] and prefixes and not parse_split(split)[0]:
        return [f"--split {split!r} leaves nothing for training."]
    if len(prefixes) == len(words) > 1:
        return []       # sets without weights are read as one set, so one of them may contribute nothing to a split
    return [problem for prefix in prefixes if (count := _num_sequences(prefix)) for name in SPLITS if is_used[name]
            and (problem := empty_split_problem(prefix, name, split, count))]


def _num_sequences(prefix: str) -> int:
    """Return the number of sequences in the header of a token set; 0 for a damaged file, which its reader reports."""
    try:
        with open(prefix + ".idx", "rb") as file:
            header = file.read(NUM_SEQUENCES.stop)
    except OSError:
        return 0
    return int.from_bytes(header[NUM_SEQUENCES], "little") if header.startswith(MAGIC) else 0


def token_file_problem(prefix: str) -> str:
    """Return a sentence with a hint when a file of a token set is missing, else ""."""
    path = next((prefix + ending for ending in (".idx", ".bin") if not os.path.isfile(prefix + ending)), "")
    return f"{path} does not exist. {_prefix_hint(prefix)}" if path else ""


def _prefix_hint(prefix: str) -> str:
    if prefix.endswith((".bin", ".idx")) and os.path.exists(prefix):
        return f"Give the prefix without its ending: {prefix[:-4]}"
    folder, name = os.path.split(prefix)
    if not os.path.isdir(folder or "."):
        return f"The directory {folder} does not exist."
    near = sorted(path.name[:-4] for path in Path(folder or ".").glob(name + "*.idx"))
    if near:
        return "Did you mean " + " or ".join(os.path.join(folder, other) for other in near[:3]) + "?"
    return "A prefix is the path of the .bin and .idx files without ending, as written by tools/preprocess_data.py."


def directory_problems(run: Run) -> list[str]:
    """Return a problem where ``--save`` cannot be written, or where ``--load`` is required and missing."""
    save, load = run.checkpoint.save, run.checkpoint.load
    found = []
    if save:
        existing = next(path for path in (Path(save).absolute(), *Path(save).absolute().parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            found.append(f"--save {save} cannot be written: {existing} is "
                         f"{'read-only for you' if existing.is_dir() else 'not a directory'}.")
    for flag, directory in (("--load", load), ("--pretrained-checkpoint", run.checkpoint.pretrained_checkpoint)):
        if directory and (problem := other_system_problem(directory, flag)):
            found.append(problem)
    if run.checkpoint.load_hf:
        found += hugging_face_problems(run.checkpoint.load_hf)
    if run.checkpoint.exit_on_missing_checkpoint and load and not os.path.isdir(load):
        found.append(f"--load {load}: there is no such directory, and --exit-on-missing-checkpoint is given.")
    return found


def hugging_face_problems(directory: str) -> list[str]:
    """Return the weight files that a Hugging Face model's index names and that do not exist."""
    path = Path(directory)
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        try:
            names = set(json.loads((path / index).read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue    # the index is missing or damaged, which is reported when the weights are read
        missing = sorted(str(name) for name in names if not (path / str(name)).is_file())
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        return [f"--load-hf {directory} lacks {', '.join(missing[:3])}{more}, which {index} names; download the model "
                "again."] if missing else []
    return []


def package_problems(run: Run) -> list[str]:
    """Return the packages that a requested tracker needs and that are not installed."""
    needed = {"tensorboard": ("--tensorboard-dir", run.logging.tensorboard_dir),
              "wandb": ("--wandb-project", run.logging.wandb_project)}
    return [f"{flag} {value} needs the {package} package. Run pip install {package}, or leave the flag out: "
            "metrics.jsonl is always written."
            for package, (flag, value) in needed.items()
            if value and package not in sys.modules and importlib.util.find_spec(package) is None]
