"""The steps of examples/quickstart.sh, one by one and small; and the scripts themselves."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from megatron_sp.config.load import load_run
from tests.integration.programs import ROOT, run_program, run_tool

SCRIPTS = sorted([*ROOT.glob("examples/*.sh"), *ROOT.glob("tools/*.sh"), *ROOT.glob("tests/*.sh"), ROOT / ".ci/run"])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    done = run_tool("gather_corpus.py", "--output", path, "--max-bytes", 400_000, "--min-bytes", 20_000,
                    "--root", Path(json.__file__).parent.parent / "asyncio")
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def tokenizer(corpus: Path) -> Path:
    path = corpus.with_name("tokenizer.model")
    done = run_tool("train_tokenizer.py", "--input", corpus, "--output", path, "--vocab-size", 600)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def dataset(corpus: Path, tokenizer: Path) -> Path:
    done = run_tool("preprocess_data.py", "--input", corpus, "--output-prefix", corpus.with_name("data"), "--workers",
                    1, "--append-eod", "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", tokenizer)
    assert done.returncode == 0, done.stderr
    return corpus.with_name("data_text_document")


def documents_of(corpus: Path) -> list[dict]:
    return [json.loads(line) for line in corpus.read_text().splitlines()]


def test_corpus_holds_the_longest_documents_in_a_fixed_order(corpus: Path, tmp_path: Path) -> None:
    documents = documents_of(corpus)
    root = Path(json.__file__).parent.parent / "asyncio"
    sizes = {path.name: path.stat().st_size for path in root.rglob("*.py")}
    chosen = {document["name"]: document["bytes"] for document in documents}
    assert max(sizes, key=lambda name: sizes[name]) in chosen
    assert 20_000 <= min(chosen.values()) and sum(chosen.values()) <= 400_000
    assert all(len(document["text"].encode()) == document["bytes"] for document in documents)
    again = tmp_path / "again.jsonl"
    run_tool("gather_corpus.py", "--output", again, "--max-bytes", 400_000, "--min-bytes", 20_000, "--root", root)
    assert again.read_bytes() == corpus.read_bytes()


def test_corpus_skips_files_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "lib/site-packages").mkdir(parents=True)
    (tmp_path / "lib/good.py").write_text("é" * 100)
    (tmp_path / "lib/broken.py").write_bytes(b"\xff" * 100)
    (tmp_path / "lib/site-packages/installed.py").write_text("x" * 100)
    done = run_tool("gather_corpus.py", "--output", tmp_path / "c.jsonl", "--root", tmp_path / "lib", "--min-bytes", 10)
    assert done.returncode == 0, done.stderr
    assert [document["name"] for document in documents_of(tmp_path / "c.jsonl")] == ["good.py"]


def test_empty_corpus_is_one_sentence(tmp_path: Path) -> None:
    done = run_tool("gather_corpus.py", "--output", tmp_path / "c.jsonl", "--root", tmp_path)
    assert done.returncode == 2 and "--min-bytes" in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_tokenizer_gives_texts_back_and_has_an_end(corpus: Path, tokenizer: Path) -> None:
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    assert model.vocab_size() == 600 and model.eos_id() == 2
    for text in [document["text"] for document in documents_of(corpus)] + ["  two\n\n\ttab 漢 🙂\r\n"]:
        assert model.decode(model.encode(text)) == text


def test_tokenizer_errors_are_one_sentence(corpus: Path, tmp_path: Path) -> None:
    for words, message in (([corpus, 100_000], "--vocab-size 100000"), ([tmp_path / "none.jsonl", 600], "none.jsonl")):
        done = run_tool("train_tokenizer.py", "--input", words[0], "--output", tmp_path / "t.model", "--vocab-size",
                        words[1])
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_statistics_count_tokens_and_entropy(corpus: Path, tokenizer: Path, dataset: Path) -> None:
    import sentencepiece

    done = run_tool("data_statistics.py", dataset, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    model = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    ids = [np.array([*model.encode(document["text"]), model.eos_id()]) for document in documents_of(corpus)]
    counts = np.bincount(np.concatenate(ids))
    shares = [count / counts.sum() for count in counts if count]
    assert found["documents"] == len(ids) and found["tokens"] == counts.sum()
    assert found["longest"] == max(len(part) for part in ids)
    assert found["unigram_entropy"] == pytest.approx(-sum(share * math.log(share) for share in shares), rel=1e-12)
    assert run_tool("data_statistics.py", corpus.with_name("no")).returncode == 2


def test_dry_run_prints_the_command_and_writes_nothing(tmp_path: Path) -> None:
    done = run_program("bash", ROOT / "examples/quickstart.sh", "--lr", "1e-4", DRY_RUN="1", ITERATIONS="7",
                       OUTPUT_DIR=str(tmp_path / "out"), VENV=str(tmp_path / "venv"))
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    assert words[-2:] == ["--lr", "1e-4"] and "pretrain_gpt.py" in words
    assert words[words.index("--train-iters") + 1] == "7" and words[words.index("--zero-stage") + 1] == "3"
    assert int(words[words.index("--seq-length") + 1]) >= 2048
    assert not list(tmp_path.iterdir())


def test_every_number_of_iterations_leaves_the_learning_rate_time_to_decay(tmp_path: Path) -> None:
    for iterations, warmup in ((1, 0), (10, 1), (240, 20)):
        done = run_program("bash", ROOT / "examples/quickstart.sh", DRY_RUN="1", ITERATIONS=str(iterations), NPROC="2",
                           OUTPUT_DIR=str(tmp_path / "out"))
        words = shlex.split(done.stdout)
        assert words[words.index("--lr-warmup-iters") + 1] == str(warmup)
        train = load_run(words[words.index("pretrain_gpt.py") + 1:], 2, files=False)[0].train
        assert train.train_iters == iterations


def test_dry_run_continues_from_a_checkpoint(tmp_path: Path) -> None:
    tracker = tmp_path / "out/checkpoints/latest_checkpointed_iteration.txt"
    tracker.parent.mkdir(parents=True)
    tracker.write_text("40")
    done = run_program("bash", ROOT / "examples/quickstart.sh", DRY_RUN="1", ITERATIONS="7", OUTPUT_DIR="out",
                       cwd=tmp_path)
    words = shlex.split(done.stdout)
    assert words[words.index("--train-iters") + 1] == "47"
    assert words[words.index("--load") + 1] == str(tracker.parent)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_strict_and_parse(script: Path) -> None:
    assert "set -euo pipefail" in script.read_text()
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", script], check=True)


def test_environment_is_made_once(tmp_path: Path) -> None:
    """A stand-in interpreter shows what is called; nothing is installed."""
    log = tmp_path / "log"
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\necho "$*" >> {log}\n'
                    f'[ "$2" = venv ] && mkdir -p "$3/bin" && cp {fake} "$3/bin/python"\nexit 0\n')
    fake.chmod(0o755)
    for _ in range(2):
        done = run_program("bash", ROOT / "tools/make_venv.sh", "requirements.txt", VENV=str(tmp_path / "venv"),
                           PYTHON=str(fake))
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == str(tmp_path / "venv/bin/python")
    calls = log.read_text().splitlines()
    assert [call.split()[1] for call in calls if call.startswith("-m")] == ["venv", "pip"]


def test_old_interpreter_is_refused(tmp_path: Path) -> None:
    done = run_program("bash", ROOT / "tools/make_venv.sh", "requirements.txt", VENV=str(tmp_path / "venv"),
                       PYTHON="/bin/false")
    assert done.returncode == 2 and "set PYTHON" in done.stderr


def test_a_tokenizer_learns_from_long_lines_and_reads_what_the_preprocessor_reads(tmp_path: Path) -> None:
    """SentencePiece drops lines of more than 4192 bytes, and lines with one of its reserved characters."""
    import gzip

    import sentencepiece

    greek = "".join(map(chr, range(0x3b1, 0x3ca)))
    random = np.random.RandomState(0)
    words = ["".join(random.choice(list(greek), 6)) for _ in range(40)]
    lines = [json.dumps({"text": " ".join(random.choice(words, 3000))}) for _ in range(5)]
    lines += ["", json.dumps({"text": "\u2585" + "jkjk" * 3000 + "\t\x00"}), json.dumps({"text": None})]
    with gzip.open(tmp_path / "in.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("\ufeff" + "\n".join(lines) + "\n")
    words_given = ("--input", tmp_path / "*.gz", "--output", tmp_path / "t.model", "--vocab-size", 360)
    done = run_tool("train_tokenizer.py", *words_given)
    assert done.returncode == 2 and "in.jsonl.gz, line 8: 'text' is not a string" in done.stderr
    assert "--on-error skip" in done.stderr and not (tmp_path / "t.model").exists()
    done = run_tool("train_tokenizer.py", *words_given, "--on-error", "skip")
    assert done.returncode == 0, done.stderr
    assert "6 documents" in done.stdout and "skipped 1 record: 'text' is not a string" in done.stdout
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "t.model"))
    pieces = [model.id_to_piece(i) for i in range(360)]
    assert sum(any(letter in greek for letter in piece) for piece in pieces) > 80
    assert any("jkjk" in piece for piece in pieces)


def test_counted_words_hold_every_character() -> None:
    from tools.train_tokenizer import MOST_BYTES, words_of

    text = "  a b\n\nlong " + "\u6f22" * 5000 + " x\ty \u2585z\x00 end  "
    found = list(words_of(text))
    assert "".join(found) == text.translate({ord(sign): None for sign in "\n\t\x00\u2585"})
    assert max(len(word.encode()) for word in found) <= MOST_BYTES and found[:3] == ["  a", " b", "long"]
