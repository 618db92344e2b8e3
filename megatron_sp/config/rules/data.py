"""Rules about the form of data paths, splits and tokenizers; ``files.py`` looks at the files."""

from __future__ import annotations

import math

from megatron_sp.config.cli.named_sets import named_sets
from megatron_sp.config.cli.values import is_number
from megatron_sp.config.schema import Run
from megatron_sp.errors import DataError
from megatron_sp.layout.document_split import parse_split
from megatron_sp.user_function import parts


def check_data(run: Run) -> list[str]:
    """Return problems unless there is exactly one source of data, in a form that can be read."""
    data, per_split = run.data, _per_split(run)
    found = [problem] if (problem := source_problem(run)) else []
    if not _sources(run):
        found.append("Data is required: --data-path, or --train-data-path with --valid-data-path, or --mock-data, or "
                     "--dataset-provider.")
    elif any(per_split.values()) and not data.train_data_path and not run.train.skip_train:
        found.append("--train-data-path is required with --valid-data-path and --test-data-path.")
    found += _split(data.split) + _provider(data.dataset_provider, data.dataset_arguments)
    if data.pack_documents and data.document_boundaries == "eod":
        found.append(f"--pack-documents {data.pack_documents} needs --document-boundaries index: it packs documents of "
                     "the index, and no token says where padding begins.")
    for flag, paths in (("--data-path", data.data_path), *per_split.items()):
        found += _named_problems(flag, paths) if flag == "--valid-data-path" else data_path_problems(flag, paths)
    return found


def _provider(spec: str, arguments: tuple[str, ...]) -> list[str]:
    found = []
    if spec and not all(parts(spec)):
        found.append(f"--dataset-provider {spec} must be FILE.py:FUNCTION or package.module:FUNCTION.")
    if arguments and not spec:
        found.append("--dataset-arguments has no effect without --dataset-provider; leave it out.")
    return found + [f"--dataset-arguments: {word} must be NAME=VALUE." for word in arguments
                    if not word.partition("=")[1] or not word.partition("=")[0]]


def source_problem(run: Run) -> str:
    """Return a problem where several flags name the data of training; else ""."""
    sources = _sources(run)
    return f"{' and '.join(sources)} exclude each other; keep one source of data." if len(sources) > 1 else ""


def _sources(run: Run) -> list[str]:
    """Return the flags that name data, those of the splits as one."""
    of_splits = " / ".join(flag for flag, paths in _per_split(run).items() if paths)
    return [name for name, used in (("--mock-data", run.data.mock_data), ("--data-path", run.data.data_path),
                                    ("--dataset-provider", run.data.dataset_provider), (of_splits, of_splits)) if used]


def _per_split(run: Run) -> dict[str, tuple[str, ...]]:
    return {"--train-data-path": run.data.train_data_path, "--valid-data-path": run.data.valid_data_path,
            "--test-data-path": run.data.test_data_path}


def _named_problems(flag: str, paths: tuple[str, ...]) -> list[str]:
    try:
        sets = named_sets(paths)
    except ValueError as error:
        return [f"{flag}: {error}."]
    return [problem for name, words in sets.items()
            for problem in data_path_problems(f"{flag} {name}=" if name else flag, words)]


def _split(split: str) -> list[str]:
    try:
        parse_split(split)
    except DataError as error:
        return [str(error)]
    return []


def data_path_problems(flag: str, paths: tuple[str, ...]) -> list[str]:
    """Return what is wrong with a data path: it must be prefixes alone, or weights and prefixes in turn."""
    if len(paths) < 2:
        return [f"{flag} {paths[0]} is a number; a prefix is missing after it."] if paths and is_number(
            paths[0]) else []
    weights = paths[0::2]
    numbers = [word for word in weights if is_number(word)]
    if not numbers:
        return []
    if len(paths) % 2:
        return [f"{flag} has {len(paths)} words, of which some are weights; a weight and a prefix must take turns "
                f"(W1 P1 W2 P2 ...), or give prefixes alone."]
    if len(numbers) < len(weights):
        odd = next(word for word in weights if not is_number(word))
        return [f"{flag}: {odd!r} stands where a weight must stand; give weights to all prefixes or to none."]
    values = [float(word) for word in weights]
    bad = [word for word, value in zip(weights, values, strict=True) if value < 0 or not math.isfinite(value)]
    if bad:
        return [f"{flag}: the weight {bad[0]} must be 0 or more, and finite."]
    if sum(values) <= 0:
        return [f"{flag}: the weights sum to 0; at least one must be above 0."]
    return []


def prefixes_of(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the token sets that a valid data path reads: those whose weight, if they have one, is above 0."""
    if len(words) > 1 and all(map(is_number, words[0::2])):
        return tuple(prefix for weight, prefix in zip(words[0::2], words[1::2], strict=True) if float(weight) > 0)
    return words


def check_tokenizer(run: Run) -> list[str]:
    """Return which flags are missing that the chosen tokenizer needs."""
    data, vocab_size = run.data, run.model.vocab_size
    kind = data.tokenizer_type
    if data.vocab_extra_ids < 0:
        return [f"--vocab-extra-ids {data.vocab_extra_ids} must be at least 0."]
    if data.mock_data and vocab_size:
        return []
    if kind == "NullTokenizer":
        return [] if vocab_size else ["--vocab-size is required with --tokenizer-type NullTokenizer."]
    needed = {"--vocab-file": data.vocab_file, "--merge-file": data.merge_file} if kind == "GPT2BPETokenizer" else {
        "--tokenizer-model": data.tokenizer_model}
    missing = [flag for flag, value in needed.items() if not value]
    if not missing:
        return []
    if data.mock_data:
        return [f"--mock-data: --vocab-size is required, or a tokenizer ({' and '.join(missing)} with "
                f"--tokenizer-type {kind})."]
    verb = "is" if len(missing) == 1 else "are"
    return [f"{' and '.join(missing)} {verb} required with --tokenizer-type {kind}."]
