"""tools/inspect_dataset.py and tools/build_index.py: what they print, find and refuse."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron_sp.config.load import load_run_of_world
from megatron_sp.data.build import build_datasets
from megatron_sp.data.token_files.checksums import write_checksums
from megatron_sp.data.token_files.indexed_dataset import IndexedDataset
from megatron_sp.data.token_files.token_writer import IndexedDatasetBuilder
from megatron_sp.errors import ConfigError, DataError
from megatron_sp.layout.tokens import SequenceLayout
from tests.unit.data.test_indexed import FIXTURES, SET_A, SET_B, write
from tools import build_index, inspect_dataset

MODEL = ("--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 64 --train-iters 10 --lr 1 "
         "--global-batch-size 4 --eval-iters 1 --split 90,8,2 --tokenizer-type NullTokenizer --vocab-size 50257 "
         "--attention-dropout 0").split()


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A set with an empty document and one of two sequences."""
    with IndexedDatasetBuilder(tmp_path / "mixed", np.uint16) as builder:
        builder.add_document([1, 2, 3])
        builder.add_document([])
        builder.add_document(list(range(10)), [4, 6])
        builder.finalize()
    return tmp_path / "mixed"


def test_sizes(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_dataset.main(["sizes", str(mixed), "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert (found["documents"], found["empty_documents"], found["sequences"], found["tokens"], found["longest"],
            found["percentile_50"]) == (3, 1, 3, 13, 10, 3)
    assert [(row["from"], row["to"], row["documents"], row["tokens"]) for row in found["histogram"] if row[
        "documents"]] == [(0, 0, 1, 0), (2, 3, 1, 3), (8, 15, 1, 10)]
    assert inspect_dataset.main(["sizes", str(mixed), "--output", str(mixed.with_suffix(".png"))]) == 0
    assert "3 documents (1 empty), 13 tokens" in capsys.readouterr().out
    assert mixed.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_sizes_of_a_set_without_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "none", [])
    picture = tmp_path / "none.png"
    assert inspect_dataset.main(["sizes", str(tmp_path / "none"), "--output", str(picture)]) == 0
    assert "0 documents" in capsys.readouterr().out and picture.exists()


def test_documents_are_shown_with_their_text(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "20", "--tokens", "5"]
    assert inspect_dataset.main(["documents", str(mixed), "0..2", *flags]) == 0
    out = capsys.readouterr().out
    assert "document 0: 3 tokens\n  tokens 1 2 3\n  text   '1 2 3'" in out and "document 1: 0 tokens\n" in out
    assert "document 2: 10 tokens in 2 sequences\n  tokens 0 1 2 3 4 ... (5 more)" in out
    gpt2 = [f"--{name}-file={FIXTURES}/tok/gpt2/{file}" for name, file in (("vocab", "vocab.json"),
                                                                           ("merge", "merges.txt"))]
    assert inspect_dataset.main(["documents", str(SET_A), "47", "--tokens", "4", *gpt2]) == 0
    assert "text   '" in capsys.readouterr().out
    assert inspect_dataset.main(["documents", str(mixed), "2", *flags[:3], "4"]) == 0
    assert "the id 9 is not in the tokenizer's vocabulary of 4" in capsys.readouterr().out


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_samples_are_those_that_a_rank_reads(rank: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*MODEL, "--data-path", str(SET_A), "--data-cache-path", str(tmp_path)]
    words = ["samples", "2..3", "--rank", str(rank), "--world-size", "4", "--tokens", "0", "--ring-size", "2", *flags]
    assert inspect_dataset.main([*words, "--reset-position-ids"]) == 0
    out = capsys.readouterr().out
    run = load_run_of_world(["--world-size", "4", "--ring-size", "2", *flags], 0)[0]
    train = build_datasets(run.data, None, (40, 4, 4), run.train.seed).train
    assert train is not None
    ranges = SequenceLayout.of(run).ranges(rank % 2)  # ranks 2 and 3 are the second replica
    assert len(ranges) == 2
    for sample in (2, 3):
        for start, stop in ranges:
            window = train.window(sample, start, stop + 1)
            assert f"tokens {' '.join(map(str, window[:-1]))}\n" in out
            assert f"labels {' '.join(map(str, window[1:]))}\n" in out
            starts = train.document_starts(sample)
            assert f"documents start at {', '.join(map(str, starts))}\n" in out
            places = [place - int(starts[starts <= place].max()) for place in range(start, stop)]
            assert f"position ids {' '.join(map(str, places))}\n" in out


def test_check_finds_each_kind_of_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for ending in (".bin", ".idx"):
        shutil.copyfile(f"{SET_A}{ending}", tmp_path / f"x{ending}")
    prefix = str(tmp_path / "x")
    assert inspect_dataset.main(["check", prefix, "--vocab-size", "50257"]) == 0
    assert "no checksums" in capsys.readouterr().out
    assert inspect_dataset.main(["check", prefix, "--vocab-size", "50256"]) == 1
    out = capsys.readouterr().out      # the set is good, and the size of the vocabulary is not its own
    assert "ids 0 to 50256" in out and "at least 50257" in out and "ANOTHER VOCABULARY" in out and "DAMAGED" not in out
    write_checksums(prefix)
    assert inspect_dataset.main(["check", prefix]) == 0 and "no checksums" not in capsys.readouterr().out
    content = bytearray((tmp_path / "x.bin").read_bytes())
    content[1000] ^= 1  # another token id of the vocabulary: only a checksum can tell
    (tmp_path / "x.bin").write_bytes(content)
    assert inspect_dataset.main(["check", prefix, "--vocab-size", "50257"]) == 1
    assert "x.bin: bytes 0 to" in capsys.readouterr().out
    with pytest.raises(DataError, match="nowhere.idx does not exist"):  # as the other commands say, and no damage
        inspect_dataset.main(["check", prefix, str(tmp_path / "nowhere")])
    os.truncate(tmp_path / "x.idx", 100)
    assert inspect_dataset.main(["check", prefix, str(SET_B)]) == 1
    out = capsys.readouterr().out
    assert "DAMAGED" in out and "x.idx has 100 bytes" in out and str(SET_B) in out


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a", [[1, 2, 3], [4, 5]])
    write(tmp_path / "wide", [[1, 2, 3], [4, 5]], np.int32)
    assert inspect_dataset.main(["compare", str(tmp_path / "a"), str(tmp_path / "wide")]) == 0
    assert "the same: 2 documents, 5 tokens (stored as uint16 and int32)" in capsys.readouterr().out
    for documents, said in (([[1, 2, 3], [4, 6]], "token 1 of document 1 is 5 in"),
                            ([[1, 2], [3, 4, 5]], "document 0 has 3 tokens in"),
                            ([[1, 2, 3]], "the first 1 agree")):
        write(tmp_path / "b", documents)
        assert inspect_dataset.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
        assert said in capsys.readouterr().out
    with IndexedDatasetBuilder(tmp_path / "b", np.uint16) as builder:
        builder.add_document([1, 2, 3], [1, 2])
        builder.add_document([4, 5])
        builder.finalize()
    assert inspect_dataset.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "sequence 0 has 3 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("words, said", [
    ("documents A 3", "3 is not within the 2 documents"), ("documents A 1..0", "1..0 is not within"),
    ("documents A x", "'x' names no documents"), ("documents A", "required"), ("frobnicate A", "no command"),
    ("A", "the first argument must be one of sizes, documents, samples, check, compare"),
    ("sizes A --lenght 3", "--lenght is no flag"), ("documents A 0 --tokens -1", "--tokens -1 must be at least 0"),
    ("documents A 0 --tokens x", "invalid int value"),
    ("samples 9999 --world-size 4 RUN", "9999 is not within the"),
    ("samples 0 --rank 4 --world-size 4 RUN", "--rank 4 is"),
    ("samples 0 --split-name code RUN", "this run has the sets train, valid, test"),
])
def test_questions_that_cannot_be_answered(words: str, said: str, tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2, 3], [4, 5]])
    run = [*MODEL, "--data-path", str(SET_A), "--data-cache-path", str(tmp_path)]
    given = [part for word in words.split() for part in {"A": [str(tmp_path / "a")], "RUN": run}.get(word, [word])]
    with pytest.raises(ConfigError) as error:
        inspect_dataset.main(given)
    assert said in str(error.value)


def test_a_prebuilt_index_is_found_by_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*MODEL, "--data-path", "0.3", str(SET_A), "0.7", str(SET_B), "--data-cache-path", str(tmp_path / "cache")]
    assert build_index.main(["--world-size", "4", *flags]) == 0
    out = capsys.readouterr().out
    assert "30.00% = 12 samples" in out and "per epoch" in out and "The index is in" in out
    built = sorted((tmp_path / "cache").iterdir())
    run = load_run_of_world(["--world-size", "4", *flags], 0)[0]
    build_datasets(run.data, 50256, (40, 4, 4), run.train.seed)
    assert sorted((tmp_path / "cache").iterdir()) == built and len(built) > 8
    with pytest.raises(ConfigError, match="--mock-data needs no index"):
        build_index.main([*MODEL, "--mock-data"])


def test_an_index_that_cannot_be_stored_beside_the_data_is_an_error(tmp_path: Path) -> None:
    """A run would build it in memory; building it beforehand and throwing it away helps nobody."""
    for ending in (".bin", ".idx"):
        shutil.copyfile(f"{SET_A}{ending}", tmp_path / f"x{ending}")
    (tmp_path / "cache").write_text("not a directory")
    with pytest.raises(DataError, match="cache/megatron_sp cannot be written"):
        build_index.main([*MODEL, "--data-path", str(tmp_path / "x")])


def test_lengths_of_documents(mixed: Path) -> None:
    assert IndexedDataset(mixed).document_lengths().tolist() == [3, 0, 10]
