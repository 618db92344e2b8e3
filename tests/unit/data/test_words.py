"""Encoding word by word gives exactly the tokens of the tokenizer library, whatever the text."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sp.config.schema import Data
from megatron_sp.data.tokenizers import words
from megatron_sp.data.tokenizers.hugging_face_words import LLAMA3, LONG_S, llama3_words
from megatron_sp.data.tokenizers.tokenizer import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    build_tokenizer,
)
from tests.unit.data.test_indexed import FIXTURES

INT32 = np.dtype(np.int32)
#: Texts are made of these. Some normalizers turn a character such as \u00a8 into a blank and another one.
ODD = [" ", "  ", "\n", "\n\n", "\t", "\r\n", "'", "'s", " 'll", "'T", "'RE", "'\u017f", "\u017f", "1", " 23", "4567",
       "\u00b2", "a", " the", "Z", "_", "(", "://", "\u00e9", "e\u0301", "\u65e5\u672c", "\u201cq\u201d", "\u00a0",
       "\u3000", "\u2028", "\u2581", "\x00", "\x1c", "\x7f", "\u0085", "\u0e01", "\ufb01", "\u00a8", "\u2003",
       "\U0001f600", "\u200d", "\ufeff", "\U0001e900", "<|endoftext|>", "<s>", "</s>", "<unk>"]
TEXTS = st.one_of(st.lists(st.sampled_from(ODD), max_size=30).map("".join), st.text(max_size=40))


@pytest.fixture(scope="module", params=["gpt2", "hf gpt2", "hf llama3", "hf special", "spm", "llama", "no blank before",
                                        "mixed kinds", "normalizes", "strips blanks", "unigram"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    if request.param == "gpt2":
        folder = FIXTURES / "tok" / "gpt2"
        yield build_tokenizer(Data(vocab_file=str(folder / "vocab.json"), merge_file=str(folder / "merges.txt")))
        return
    if "hf" in request.param:
        yield hugging_face(tmp_path_factory.mktemp("hf"), request.param)
        return
    if request.param in ("spm", "llama"):
        kind = "Llama2Tokenizer" if request.param == "llama" else "SentencePieceTokenizer"
        yield build_tokenizer(Data(tokenizer_type=kind, tokenizer_model=str(FIXTURES / "tok" / "spm_bpe_4k.model")))
        return
    yield trained(tmp_path_factory.mktemp("spm"), request.param)


def hugging_face(folder: Path, kind: str) -> Tokenizer:
    """Return a Hugging Face tokenizer with GPT-2's vocabulary, an added token that is not special, and one that is."""
    pytest.importorskip("transformers")
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    gpt2 = FIXTURES / "tok" / "gpt2"
    fast = tokenizers.Tokenizer(models.BPE.from_file(str(gpt2 / "vocab.json"), str(gpt2 / "merges.txt")))
    split = pre_tokenizers.Split(tokenizers.Regex(LLAMA3), "isolated")
    fast.pre_tokenizer = pre_tokenizers.Sequence([  # type: ignore[assignment]
        split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]) if kind == "hf llama3" else \
        pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    fast.add_tokens(["<unk>"])
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}))
    data = Data(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    return build_tokenizer(data, parse_special=kind == "hf special")


def trained(folder: Path, kind: str) -> Tokenizer:
    import sentencepiece

    options: dict[str, dict[str, Any]] = {
        "no blank before": {"add_dummy_prefix": False, "user_defined_symbols": ["\n"],
                            "remove_extra_whitespaces": False, "normalization_rule_name": "identity"},
        "mixed kinds": {"remove_extra_whitespaces": False, "split_by_unicode_script": False, "split_by_number": False,
                        "normalization_rule_name": "identity"},
        "normalizes": {"remove_extra_whitespaces": False, "normalization_rule_name": "nfkc"},
        "strips blanks": {}, "unigram": {"model_type": "unigram"}}
    chosen: dict[str, Any] = {"vocab_size": 320, "model_type": "bpe", "byte_fallback": True,
                                "hard_vocab_limit": False, "minloglevel": 2, **options[kind]}
    lines = ["the words of a text, (more) words; it's 23 a_b http://x " + " ( :// \u00e9e\u0301\u65e5\u672c"] * 9
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_prefix=str(folder / "x"), **chosen)
    return build_tokenizer(Data(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(folder / "x.model")))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(texts=st.lists(TEXTS, max_size=4))
def test_arrays_are_the_librarys_tokens(tokenizer: Tokenizer, texts: list[str]) -> None:
    arrays = tokenizer.encode_arrays(texts, INT32)
    assert [array.tolist() for array in arrays] == tokenizer.encode_batch(texts) == [tokenizer.encode(t) for t in texts]
    if texts and isinstance(tokenizer, HuggingFaceTokenizer):  # transformers' own way
        library = tokenizer._tokenizer
        assert [array.tolist() for array in arrays] == library(texts, add_special_tokens=False)["input_ids"]


def test_which_tokenizers_remember_words(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> None:
    tokenizer.encode_arrays(["some words, (other) words\n  and more"], INT32)
    cache = tokenizer._words  # type: ignore[attr-defined]
    known = request.node.callspec.params["tokenizer"] not in ("strips blanks", "unigram")
    assert (cache is not None and len(cache) > 4) is known
    if isinstance(tokenizer, SentencePieceTokenizer):
        normalized = tokenizer.decode(tokenizer.encode("\ufb01")) == "fi"
        assert words.normalizes(tokenizer._model) is normalized
        assert tokenizer.encode_arrays([""], INT32)[0].tolist() == tokenizer.encode("")


@pytest.mark.parametrize("kind", ["gpt2", "llama3"])
def test_every_character_is_in_the_librarys_class(kind: str) -> None:
    """A word border of ours where the library has none, or the reverse, would change tokens."""
    from tokenizers import Regex, pre_tokenizers

    if kind == "gpt2":
        library: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)
        patterns = words.word_patterns(words.gpt2_words)
    else:
        library = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
        patterns = words.word_patterns(llama3_words, LONG_S)
    certain = [chr(i) for i in [*range(0xd800), *range(0xe000, 0x20000)] if not patterns.uncertain.match(chr(i))]
    assert len(certain) > 30_000
    # Long runs of letters behave alike, so that a part of the ideographs and syllables is enough.
    texts = [f"a{char}b {char}{char} 1{char}23 {char}\n {char}'s" for char in
             certain[:3000] + certain[3000::29] + certain[-2500:]]
    for text in [*texts, "I'd we're you've I'm don't it's we'll 'x I'D 'd's \t'll''s  5's5 1234567 'Re\r\n\n x\n"]:
        expected = [text[begin:end] for _, (begin, end) in library.pre_tokenize_str(text)]
        assert patterns.all.findall(text) == expected == patterns.split(text), text


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "MOST_WORDS", 10)
    cache = words.WordCache(str.split, lambda new: [[len(word)] for word in new], INT32)
    for start in range(0, 100, 5):
        texts = [" ".join("x" * (start + i) for i in range(1, 6)), "x " * 3]
        expected = [[start + i for i in range(1, 6)], [1, 1, 1]]
        assert [array.tolist() for array in cache.encode(texts) if array is not None] == expected
        assert len(cache) <= 10
    (array,) = cache.encode(["y" * 100])
    assert array is not None and array.tolist() == [100] and "y" * 100 not in cache._known
