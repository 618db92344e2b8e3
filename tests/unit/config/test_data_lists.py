"""Data paths that a file lists, and validation sets that get the names of their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_sp.config.cli.flags import parse
from megatron_sp.config.load import load_run
from megatron_sp.errors import ConfigError


def test_a_file_lists_the_words_of_data_path(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("0.3 A\n0.7\tB\n\n")
    parsed = parse(["--data-args-path", str(tmp_path / "list.txt")])
    assert not parsed.problems and parsed.run.data.data_path == ("0.3", "A", "0.7", "B")


@pytest.mark.parametrize("content, train, valid, test", [
    ({"train": ["0.3", "A", 0.7, "B"], "valid": ["C"], "test": ["D"]}, ("0.3", "A", "0.7", "B"), ("C",), ("D",)),
    ({"train": "1 A 2 B", "valid": None}, ("1", "A", "2", "B"), (), ()),
    ({"train": ["A"], "valid": {"code": ["C"], "books": "0.3 D 0.7 E"}}, ("A",),
     ("code=C", "books=0.3", "D", "0.7", "E"), ()),
])
def test_a_json_file_lists_the_words_of_each_split(tmp_path: Path, content: Any, train: tuple[str, ...],
                                                   valid: tuple[str, ...], test: tuple[str, ...]) -> None:
    (tmp_path / "list.json").write_text(json.dumps(content))
    parsed = parse(["--per-split-data-args-path", str(tmp_path / "list.json")])
    data = parsed.run.data
    assert not parsed.problems and (data.train_data_path, data.valid_data_path, data.test_data_path) == (
        train, valid, test)


@pytest.mark.parametrize("flag, content, said", [
    ("--data-args-path", None, "No such file"),
    ("--data-args-path", " \n", "is empty; list prefixes"),
    ("--data-args-path", b"\xff\xfe\x00", "it is not UTF-8 text"),
    ("--per-split-data-args-path", "{", "Expecting property name"),
    ("--per-split-data-args-path", "[]", "a JSON object is expected"),
    ("--per-split-data-args-path", '{"train": ["A"], "validation": ["B"]}', "'validation' is unknown"),
    ("--per-split-data-args-path", '{"train": [["A"]]}', "train is neither a list"),
    ("--per-split-data-args-path", '{"valid": ["A"]}', "has no data for training"),
    ("--per-split-data-args-path", "{}", "has no data for training"),
])
def test_files_that_cannot_be_read_are_named(tmp_path: Path, flag: str, content: str | bytes | None, said: str) -> None:
    path = tmp_path / "list"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (problem,) = parse([flag, str(path)]).problems
    assert problem.startswith(f"{flag} {path}") and said in problem


def test_a_plan_needs_no_list_but_a_list_and_a_data_path_contradict_each_other(tmp_path: Path) -> None:
    assert not parse(["--data-args-path", str(tmp_path / "none")], plan=True).problems
    (tmp_path / "list.txt").write_text("A")
    (problem,) = parse(["--data-args-path", str(tmp_path / "list.txt"), "--data-path", "B"]).problems
    assert "contradict each other" in problem
    (tmp_path / "list.json").write_text('{"train": "B"}')
    with pytest.raises(ConfigError, match="exclude each other"):
        load_run(["--data-args-path", str(tmp_path / "list.txt"), "--per-split-data-args-path",
                  str(tmp_path / "list.json")], 1)


def test_a_missing_prefix_is_reported_with_the_flag_that_the_user_gave(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text(f"1 {tmp_path}/nowhere")
    with pytest.raises(ConfigError, match=r"--data-args-path: .*nowhere\.idx does not exist"):
        load_run(f"--data-args-path {tmp_path}/list.txt --num-layers 1 --hidden-size 8 --num-attention-heads 1 "
                 "--seq-length 8 --train-iters 1 --lr 1 --tokenizer-type NullTokenizer --vocab-size 9".split(), 1)


@pytest.mark.parametrize("words, valid", [
    ("d/code e/books", ("code=d/code", "books=e/books")),
    ("0.3 d/code 0.7 e/books", ("code=d/code", "books=e/books")),
    ("d/a e/a", ("a.1=d/a", "a.2=e/a")),
    ("d/1st+x", ("_1st_x=d/1st+x",)),
    ("x=d/code y=e/books", ("x=d/code", "y=e/books")),
])
def test_several_validation_sets_are_named_like_their_files(words: str, valid: tuple[str, ...]) -> None:
    parsed = parse(["--multiple-validation-sets", "--valid-data-path", *words.split()])
    assert not parsed.problems and parsed.run.data.valid_data_path == valid


def test_several_validation_sets_need_their_prefixes() -> None:
    (problem,) = parse(["--multiple-validation-sets", "--data-path", "A"]).problems
    assert "--multiple-validation-sets needs --valid-data-path" in problem
