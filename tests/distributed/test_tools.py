"""Tools on a checkpoint: generation over tensor-parallel ranks, perplexity by document and position."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_sp.data.token_files.token_writer import IndexedDatasetBuilder
from megatron_sp.errors import UserError
from megatron_sp.model.context import Context
from megatron_sp.train.checkpoints.restore import load_model, read_config
from tests.helpers.configs import STYLES
from tests.helpers.spawn import run_ranks
from tests.helpers.training import train
from tools import evaluate, generate_text, needle_in_a_haystack

STYLE = {name: STYLES[name].replace("--num-query-groups", "--num-key-value-heads") + " --init-method-std 0.3"
         for name in ("llama", "gpt2")}


def checkpoint(directory: Path, style: str) -> Path:
    flags = f"{STYLE[style]} --train-iters 2 --save {directory} --save-interval 2"
    assert run_ranks(train, 1, flags) == [""]
    return directory


def run_generate(words: list[str]) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        generate_text.main(words)
    return output.getvalue()


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_tensor_parallel_ranks_generate_what_one_process_does(tmp_path: Path, style: str) -> None:
    load = ["--load", str(checkpoint(tmp_path, style)), "--max-new-tokens", "12", "--ignore-eod", "--prompt", "1 2 3 4",
            "--prompt", "5 6"]
    for words in (["--greedy"], ["--temperature", "2", "--seed", "5"], ["--greedy", "--no-cache"]):
        (alone,) = run_ranks(run_generate, 1, [*load, *words])
        first, silent = run_ranks(run_generate, 2, [*load, *words])
        assert first == alone and silent == ""
        assert len(alone.split()) > 20 and len(set(alone.split())) > 6


def test_a_model_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="--tensor-model-parallel-size 3 does not divide"):
        run_ranks(run_generate, 3, ["--load", str(checkpoint(tmp_path, "llama")), "--prompt", "1"])


# --- perplexity ------------------------------------------------------------------------------------

LENGTHS = [3, 70, 1, 33, 65, 20, 200]


def evaluated(words: list[str]) -> str:
    """The tool's output, and the user's mistake if there is one."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            evaluate.main(words)
    except UserError as error:
        return f"{output.getvalue()}{type(error).__name__}: {error}"
    return output.getvalue()


def evaluated_without_matplotlib(words: list[str]) -> str:
    sys.modules["matplotlib"] = None  # type: ignore[assignment]  # importing it now raises ImportError
    try:
        return evaluated(words)
    finally:
        del sys.modules["matplotlib"]


def plain_losses(load: str, documents: list[list[int]]) -> list[list[float]]:
    """By one forward of the model and torch's cross-entropy."""
    run = read_config(Path(load), None)
    model = load_model(run, Path(load), None)
    found = []
    for tokens in documents:
        with torch.no_grad():
            logits = model(torch.tensor([tokens[:-1]]), Context(torch.arange(len(tokens) - 1)[None]))
        found.append(torch.nn.functional.cross_entropy(logits[0, :, :97], torch.tensor(tokens[1:]),
                                                       reduction="none").tolist())
    return found


def on_one_rank(calls: list[tuple[str, object]]) -> list[object]:
    """Several calls of this module's functions, each of which ends the process group."""
    import os

    import torch.distributed as dist

    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name)
    return [globals()[name](*arguments) for name, arguments in calls]  # type: ignore[misc]


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_perplexity_by_document_and_position(tmp_path: Path, style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load, prefix, output = str(checkpoint(tmp_path / "save", style)), tmp_path / "data", tmp_path / "out" / "eval.json"
    random = np.random.default_rng(1)
    documents = [random.integers(0, 97, size=length).tolist() for length in LENGTHS]
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for document in documents:
            builder.add_document(document)
        builder.finalize()
    read = [document[:65] for document in documents if len(document) > 1]
    row = [token for document in documents for token in document]
    joined = [row[:65], row[327:392]]      # two texts, from the start and the end of 392 tokens
    words = ["--load", load, "--data-path", str(prefix), "--output", str(output)]
    wrong = [[*words, "--num-documents", "0"], [*words, "--min-length", "201"],
             [*words[:-1], str(tmp_path / "eval.txt")], ["--load", str(tmp_path), *words[2:]],
             [*words[:3], "nowhere", *words[4:]]]
    wrong += [[*words, "--seq-length", "65"]] if style == "gpt2" else []
    wrong += [[*words, "--join-documents", "--seq-length", "392"]] if style == "llama" else []
    wrong += [[*words, "--compare", "nowhere.json"], [*words, "--compare", f"{prefix}.idx"]]
    together = [*words[:-1], str(tmp_path / "joined.json"), "--join-documents", "--num-documents", "2",
                "--sequence-chunk-size", "24", "--compare", str(output)]
    undrawn = tmp_path / "undrawn.json"
    ((undrawn_said, said, said_joined, *errors, losses, losses_joined),) = run_ranks(on_one_rank, 1, [
        ("evaluated_without_matplotlib", ([*words[:-1], str(undrawn)],)), ("evaluated", (words,)),
        ("evaluated", (together,)), *[("evaluated", (bad,)) for bad in wrong], ("plain_losses", (load, read)),
        ("plain_losses", (load, joined))])

    result = json.loads(output.read_text())
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert [row["length"] for row in result["by_document"]] == [3, 70, 33, 65, 20, 200]
    assert [row["tokens"] for row in result["by_document"]] == [2, 64, 32, 64, 19, 64]
    assert [row["loss"] for row in result["by_document"]] == pytest.approx([np.mean(own) for own in losses], rel=1e-5)
    assert result["loss"] == pytest.approx(np.mean([loss for own in losses for loss in own]), rel=1e-5)
    for key, chosen in (("by_position", losses), ("by_position_of_long_documents", [losses[i] for i in (1, 3, 5)])):
        assert [row["tokens_before"] for row in result[key]] == [
            [1, 1], [2, 3], [4, 7], [8, 15], [16, 31], [32, 63], [64, 64]]
        for row in result[key]:
            first, last = row["tokens_before"]
            parts = [loss for own in chosen for loss in own[first - 1:last]]
            assert row["loss"] == pytest.approx(np.mean(parts), rel=1e-5) and row["tokens"] == len(parts)
            assert row["perplexity"] == pytest.approx(np.exp(row["loss"]))
    together_result = json.loads((tmp_path / "joined.json").read_text())
    assert [each["loss"] for each in together_result["by_document"]] == pytest.approx(
        [np.mean(own) for own in losses_joined], rel=1e-5)
    assert "2 documents, 128 tokens" in said_joined and (tmp_path / "joined.png").exists()
    assert "6 documents, 245 tokens" in said and "picture: " in said
    assert "6 documents, 245 tokens" in undrawn_said and "pip install matplotlib" in undrawn_said
    assert json.loads(undrawn.read_text()) == result and not undrawn.with_suffix(".png").exists()
    parts = ["--num-documents 0", "no document has 201 tokens", "must end in .json", "holds no checkpoint", "nowhere",
             "--seq-length 65 exceeds the model's 64" if style == "gpt2" else "do not fill one text of 392 + 1 tokens",
             "--compare nowhere.json cannot be read", "is not a JSON file that this program has written"]
    for error, part in zip(errors, parts, strict=True):
        assert part in error and "Error: " in error and error.count("\n") <= 1


# --- needle in a haystack --------------------------------------------------------------------------

def searched(words: list[str]) -> str:
    """The tool's output, and the user's mistake if there is one."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            needle_in_a_haystack.main(words)
    except UserError as error:
        return f"{output.getvalue()}{type(error).__name__}: {error}"
    return output.getvalue()


def test_needles_are_scored_alike_in_chunks_and_at_once(tmp_path: Path) -> None:
    """The score without a needle is that of a plain forward; chunks change nothing; mistakes are one sentence."""
    load, prefix = str(checkpoint(tmp_path / "save", "llama")), tmp_path / "data"
    row = np.random.default_rng(1).integers(0, 97, size=300)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_document(row.tolist())
        builder.finalize()
    words = ["--load", load, "--data-path", str(prefix), "--lengths", "40", "96", "--depths", "3", "--trials", "1",
             "--random-tokens", "4", "--output"]
    needle = np.random.default_rng(1234).integers(0, 97, size=(1, 2, 4))[0].reshape(-1).tolist()
    text = [*row[:32].tolist(), *needle]
    outputs = [tmp_path / "whole.json", tmp_path / "chunks.json"]
    wrong = {"--lengths 15": ["--lengths", "15"], "'8Q' is not a length": ["--lengths", "8Q"],
             "texts of 301": ["--lengths", "301"], "--trials 0": ["--trials", "0"],
             "must end in .json": ["--output", "x.txt"]}
    ((said, chunked, *errors, (losses,)),) = run_ranks(on_one_rank, 1, [
        ("searched", ([*words, str(outputs[0])],)),
        ("searched", ([*words, str(outputs[1]), "--sequence-chunk-size", "24"],)),
        *[("searched", ([*words, str(tmp_path / "no.json"), *more],)) for more in wrong.values()],
        ("plain_losses", (load, [text]))])
    for part, error in zip(wrong, errors, strict=True):
        assert part in error and error.startswith(("ConfigError", "DataError")) and error.count("\n") <= 1
    whole, chunks = (json.loads(path.read_text()) for path in outputs)
    cells = [(cell["length"], cell["depth"]) for cell in whole["cells"]]
    assert cells == [(length, depth) for length in (40, 96) for depth in (None, 0, 0.5, 1)]
    assert whole["cells"][0]["probability"] == pytest.approx(float(np.exp(-np.mean(losses[-4:]))), rel=1e-4)
    for one, other in zip(whole["cells"], chunks["cells"], strict=True):
        assert one["probability"] == pytest.approx(other["probability"], rel=1e-4) and one["found"] == other["found"]
    assert said.count("without a needle") == 2 and outputs[0].with_suffix(".png").exists() and chunked
