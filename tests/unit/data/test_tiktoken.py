"""Megatron's TikTokenizer, and ids added to a vocabulary."""

import base64
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_sp.config.schema import Data
from megatron_sp.data.corpus.encode import Job
from megatron_sp.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megatron_sp.errors import DataError, InstallationError
from tests.unit.data.test_preprocess import preprocess, write_lines

MERGED = [b"th", b"the", b" the", b"12"]


def vocabulary(folder: Path, tokens: list[bytes]) -> str:
    rows = [{"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode("latin-1")}
            for rank, token in enumerate(tokens)]
    (folder / "vocab.json").write_text(json.dumps(rows))
    return str(folder / "vocab.json")


def tiktoken(folder: Path, vocab_size: int = 0, **flags: Any) -> Tokenizer:
    path = vocabulary(folder, [bytes([i]) for i in range(256)] + MERGED)
    return build_tokenizer(Data(tokenizer_type="TikTokenizer", tokenizer_model=path, **flags), vocab_size)


def test_ids_are_special_tokens_and_then_ranks(tmp_path: Path) -> None:
    pytest.importorskip("tiktoken")
    tokenizer = tiktoken(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eod) == (1260, 2)
    text = "the the12 a</s><SPECIAL_7>\U0001f600"
    # Both patterns split digits one by one, so that "12" is never merged.
    ids = [1257, 1258, 1000 + ord("1"), 1000 + ord("2"), 1000 + ord(" "), 1000 + ord("a"), 2, 7,
           *(1000 + byte for byte in "\U0001f600".encode())]
    assert tokenizer.encode(text) == ids and tokenizer.decode(ids) == text
    assert tokenizer.encode_arrays([text, ""], np.dtype(np.uint16))[0].tolist() == ids
    few = tiktoken(tmp_path, 267 + 1, tiktoken_num_special_tokens=10, tiktoken_pattern="v1")
    assert (few.vocab_size, few.encode("the")) == (268, [10 + 257]), "the vocabulary was cut after the token 'the'"
    assert few.decode([5000]) == ""


def test_what_is_no_vocabulary_is_named(tmp_path: Path) -> None:
    pytest.importorskip("tiktoken")
    data = Data(tokenizer_type="TikTokenizer", tokenizer_model=vocabulary(tmp_path, [b"a"]))
    for content, message in ((None, "run from 0"), ("[1]", "is not a vocabulary"), ("{", "is not a vocabulary")):
        if content:
            Path(data.tokenizer_model).write_text(content)
        with pytest.raises(DataError, match=message):
            build_tokenizer(data)
    with pytest.raises(DataError, match="--vocab-size 300"):
        tiktoken(tmp_path, 300)
    with pytest.raises(DataError, match="--tiktoken-num-special-tokens 3"):
        tiktoken(tmp_path, tiktoken_num_special_tokens=3)


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(InstallationError, match="pip install tiktoken"):
        tiktoken(tmp_path)


def test_extra_ids_widen_the_vocabulary_and_the_stored_type(tmp_path: Path) -> None:
    data = Data(tokenizer_type="NullTokenizer", vocab_extra_ids=3)
    tokenizer = build_tokenizer(data, 65_498)
    assert (tokenizer.vocab_size, tokenizer.eod) == (65_501, 65_497)
    source = write_lines(tmp_path / "in.jsonl", [b'{"text": "1"}'])
    preprocess([source], str(tmp_path / "out"), Job(data, 65_498, ("text",), True))
    assert (tmp_path / "out_text_document.bin").stat().st_size == 2 * 4
