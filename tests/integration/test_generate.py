"""Sampling from real models and checkpoints: the key/value cache and tools/generate_text.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_sp.errors import UserError
from megatron_sp.inference.sampling import Sampling, generate
from megatron_sp.model.context import Context
from tests.helpers.configs import STYLES, tiny_run
from tests.helpers.spawn import RunRanks
from tests.integration.programs import ROOT, run_program, run_tool
from tools import generate_text


def compare_with_and_without_cache(style: str) -> tuple[list[int], list[int], list[int]]:
    """Greedy tokens with the cache, without it, and by taking the best of one plain forward each time."""
    from megatron_sp.model.build import build_model
    from megatron_sp.parallel.mesh import ParallelMesh

    run = tiny_run([*STYLES[style].split(), "--init-method-std", "0.3"])
    model = build_model(run, ParallelMesh.build(run.parallel)).eval()
    prompt, greedy = [7, 3, 11, 3, 42], Sampling(temperature=0)
    cached = list(generate(model, prompt, 40, greedy, vocab_size=97))
    plain = list(generate(model, prompt, 40, greedy, vocab_size=97, use_cache=False))
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(40):
            logits = model(torch.tensor([tokens]), Context(torch.arange(len(tokens))[None]))
            tokens.append(int(logits[0, -1, :97].argmax()))
    return cached, plain, tokens[len(prompt):]


@pytest.mark.parametrize("style", [name for name, flags in STYLES.items() if flags])
def test_cached_decoding_equals_plain_argmax(ranks: RunRanks, style: str) -> None:
    [(cached, plain, expected)] = ranks(compare_with_and_without_cache, 1, style)
    assert cached == plain == expected
    assert len(set(expected)) > 3  # not one token over and over, which a broken cache could give as well


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few steps on a text that repeats, so that the continuation is known."""
    directory = tmp_path_factory.mktemp("generate")
    corpus, tokenizer = directory / "c.jsonl", directory / "t.model"
    corpus.write_text("".join(json.dumps({"text": "one two three four five six seven eight nine ten\n" * 40}) + "\n"
                              for _ in range(40)))
    done = run_tool("train_tokenizer.py", "--input", corpus, "--output", tokenizer, "--vocab-size", 300)
    assert done.returncode == 0, done.stderr
    done = run_tool("preprocess_data.py", "--input", corpus, "--output-prefix", directory / "d", "--workers", 1,
                    "--append-eod", "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", tokenizer)
    assert done.returncode == 0, done.stderr
    done = run_program(
        sys.executable, ROOT / "pretrain_gpt.py", "--num-layers", 2, "--hidden-size", 64, "--num-attention-heads", 4,
        "--seq-length", 64, "--position-embedding-type", "rope", "--attention-dropout", 0, "--hidden-dropout", 0,
        "--global-batch-size", 8, "--train-iters", 60, "--lr", 3e-3, "--lr-decay-style", "constant", "--split",
        "100,0,0", "--eval-iters", 0, "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", tokenizer,
        "--data-path", directory / "d_text_document", "--save", directory / "save", "--save-interval", 60,
        "--log-interval", 20, cwd=directory, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr + done.stdout
    return directory / "save"


@pytest.fixture
def continuation(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The tool's output, run in this process (starting one costs seconds)."""

    def run(*words: object) -> str:
        generate_text.main(["--load", str(checkpoint), "--max-new-tokens", "40", *map(str, words)])
        return capsys.readouterr().out

    return run


def test_a_trained_model_continues_its_text(checkpoint: Path, continuation: Callable[..., str]) -> None:
    done = run_tool("generate_text.py", "--load", checkpoint, "--prompt", "one two three", "--greedy",
                    "--max-new-tokens", 40)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("one two three four five six seven eight")
    assert done.stdout == continuation("--prompt", "one two three", "--temperature", 0, "--no-cache")


def test_seed_and_prompts(continuation: Callable[..., str]) -> None:
    hot = ("--temperature", 20, "--ignore-eod")
    first = continuation(*hot, "--prompt", "one", "--seed", 1)
    assert first == continuation(*hot, "--prompt", "one", "--seed", 1)
    assert first != continuation(*hot, "--prompt", "one", "--seed", 2)
    both = continuation(*hot, "--prompt", "six", "--prompt", "one", "--seed", 1)
    assert both.endswith("-" * 40 + "\n" + first)  # a prompt's text does not depend on the other prompts


def test_stop_words_end_a_continuation(continuation: Callable[..., str]) -> None:
    text = continuation("--prompt", "one two three", "--greedy", "--stop", "seven", "--stop", "never")
    assert text == "one two three four five six \n"


def test_prompts_of_unlike_length_together_and_one_by_one(continuation: Callable[..., str]) -> None:
    words = ("--greedy", "--prompt", "one two", "--prompt", "five six seven eight nine", "--prompt", "ten")
    together = continuation(*words)
    assert together == continuation(*words, "--batch-size", 1)
    assert "one two three four five six" in together and "eight nine ten" in together


@pytest.mark.parametrize("words, message", [
    (("--top-p", 2), "--top-p 2"), (("--max-new-tokens", 0), "--max-new-tokens 0"), (("--prompt", ""), "no tokens"),
    (("--ckpt-step", 7), "--ckpt-step 7"), (("--tokenizer-model", "nowhere.model"), "nowhere.model")])
def test_mistakes_are_one_message(continuation: Callable[..., str], words: tuple[object, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        continuation("--prompt", "one", *words)


def test_no_checkpoint_is_one_message(tmp_path: Path) -> None:
    done = run_tool("generate_text.py", "--load", tmp_path, "--prompt", "one")
    assert done.returncode == 2 and "holds no checkpoint" in done.stderr and "Traceback" not in done.stderr
