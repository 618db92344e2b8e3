"""One interface to the tokenizers of several libraries. A library is imported when its first tokenizer is built."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from megatron_sp.config.schema import Data
from megatron_sp.data.tokenizers import long_text
from megatron_sp.data.tokenizers.hugging_face_words import hugging_face_splitter
from megatron_sp.data.tokenizers.words import WordCache, gpt2_splitter, sentencepiece_words
from megatron_sp.errors import DataError

GPT2_EOD = "<|endoftext|>"
UNCERTAIN_PART = 2000  # length, in characters, of the parts into which a text with rare characters is cut


class Tokenizer(ABC):
    """Turn text into token ids, and token ids into text.

    Attributes:
        vocab_size: the largest id plus 1, without the padding that the embedding adds.
        eod: id of the end-of-document token; None: the tokenizer has none.
        unknown: id that stands for text which the tokenizer cannot represent; None: there is none.
    """

    vocab_size: int
    eod: int | None
    unknown: int | None = None

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without ``eod``."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text that these token ids stand for."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text. The library starts no threads for this."""
        return [self.encode(text) for text in texts]

    def encode_arrays(self, texts: Sequence[str], dtype: np.dtype) -> list[np.ndarray]:
        """Return the token ids of each text as an array: the ids of ``encode``, in the fastest way that is known."""
        # Each list becomes an array immediately: a list of Python integers takes up to 20 times the memory.
        return [np.array(ids, dtype=dtype) for ids in self.encode_batch(texts)]

    def encode_in_parts(self, text: str, length: int, dtype: np.dtype) -> Iterator[np.ndarray]:
        """Yield the token ids of a long text part by part; together they are those of ``encode``.

        Tokenizer libraries need a hundred or more bytes of memory for each byte of a text, so long texts are encoded in
        parts where ``long_text`` knows safe cuts for the tokenizer. Otherwise the whole text is one part.

        Args:
            text: the text.
            length: least number of characters in a part, except the last.
            dtype: type of the arrays.
        """
        yield from self.encode_arrays([text], dtype)

    def gives_back(self, text: str) -> bool:
        """Return whether encoding and then decoding a text returns the same text."""
        return self.decode(self.encode(text)) == text


class GPT2BPETokenizer(Tokenizer):
    """GPT-2's byte-level BPE. Where a text spells ``<|endoftext|>``, it is encoded as that token, as in Megatron.

    Args:
        vocab_file: path of vocab.json.
        merge_file: path of merges.txt.
    """

    def __init__(self, vocab_file: str, merge_file: str):
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers

        try:
            model = models.BPE.from_file(vocab_file, merge_file)
        except Exception as error:  # the library raises Exception itself, no subclass
            raise DataError(f"--vocab-file {vocab_file} and --merge-file {merge_file} are not a GPT-2 vocabulary and "
                            f"its merges: {error}") from None
        self._tokenizer = tokenizers.Tokenizer(model)
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = decoders.ByteLevel()
        self.eod = self._tokenizer.token_to_id(GPT2_EOD)
        if self.eod is None:
            raise DataError(f"--vocab-file {vocab_file} has no {GPT2_EOD} token, which ends documents.")
        self._tokenizer.add_special_tokens([GPT2_EOD])
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1
        self._words: WordCache | None = None

    def encode_arrays(self, texts: Sequence[str], dtype: np.dtype) -> list[np.ndarray]:
        if self._words is None:
            self._words = WordCache(gpt2_splitter(GPT2_EOD), self.encode_batch, dtype)
        return _by_words(self._words, texts, long_text.cut_for_gpt2, super().encode_arrays, dtype)

    def encode_in_parts(self, text: str, length: int, dtype: np.dtype) -> Iterator[np.ndarray]:
        for part in long_text.cut_for_gpt2(text, length):
            yield from self.encode_arrays([part], dtype)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model.

    ``eod`` is the model's end-of-sentence piece. A model without that piece gets an additional last id for it.

    Args:
        model_file: path of the .model file.
        begin: whether the model's begin-of-sentence id is put before every text (Llama2Tokenizer).
    """

    def __init__(self, model_file: str, begin: bool = False):
        import sentencepiece

        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=model_file)
        except (RuntimeError, OSError) as error:
            raise DataError(f"--tokenizer-model {model_file} is not a SentencePiece model: {error}") from None
        self.num_pieces = self._model.vocab_size()
        eos, bos = self._model.eos_id(), self._model.bos_id()
        self.eod = eos if eos >= 0 else self.num_pieces
        self.vocab_size = max(self.num_pieces, self.eod + 1)
        if begin and bos < 0:
            raise DataError(f"--tokenizer-model {model_file} has no begin-of-sentence piece, which Llama2Tokenizer "
                            "needs; use --tokenizer-type SentencePieceTokenizer.")
        self._before = [bos] if begin else []
        self.unknown = self._model.unk_id()
        self._cutter: long_text.Cutter | None = None
        self._words: WordCache | None = None

    def encode(self, text: str) -> list[int]:
        return self._before + self._model.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._model.encode(list(texts), num_threads=1)
        return [self._before + ids for ids in encoded] if self._before else encoded

    def encode_arrays(self, texts: Sequence[str], dtype: np.dtype) -> list[np.ndarray]:
        arrays = self._encode_pieces(texts, dtype)
        before = np.array(self._before, dtype=dtype)
        return [np.concatenate([before, ids]) for ids in arrays] if self._before else arrays

    def _encode_pieces(self, texts: Sequence[str], dtype: np.dtype) -> list[np.ndarray]:
        """Return the ids of each text without a begin-of-sentence id."""
        if self._cutter is None:  # built here, because that reads every piece of the vocabulary
            self._cutter = long_text.sentencepiece_cutter(self._model)
            if found := sentencepiece_words(self._model):
                self._words = WordCache(*found, dtype)

        def by_library(texts: Sequence[str], dtype: np.dtype) -> list[np.ndarray]:
            return [np.array(ids, dtype=dtype) for ids in self._model.encode(list(texts), num_threads=1)]

        if self._words is None:
            return by_library(texts, dtype)
        return _by_words(self._words, texts, self._cutter, by_library, dtype)

    def encode_in_parts(self, text: str, length: int, dtype: np.dtype) -> Iterator[np.ndarray]:
        yield from self.encode_arrays([""], dtype)
        assert self._cutter is not None, "encode_arrays builds it"
        for part in self._cutter(text, length):
            yield from self._encode_pieces([part], dtype)

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids if 0 <= i < self.num_pieces])


def _by_words(words: WordCache, texts: Sequence[str], cut: long_text.Cutter,
              by_library: Callable[[Sequence[str], np.dtype], list[np.ndarray]], dtype: np.dtype) -> list[np.ndarray]:
    """Encode texts with a cache of words; the library encodes the parts that the cache's splitter refuses.

    One rare character is enough for the splitter to refuse a text. Such a text is cut, so that only the parts with rare
    characters take the slower way.
    """
    arrays = words.encode(texts)
    for place, text in enumerate(texts):
        if arrays[place] is None:
            parts = list(cut(text, UNCERTAIN_PART))
            encoded = words.encode(parts)
            left = iter(by_library([part for part, ids in zip(parts, encoded) if ids is None], dtype))
            arrays[place] = np.concatenate([next(left) if ids is None else ids for ids in encoded])
    return arrays  # type: ignore[return-value]  # no entry is None any more


class HuggingFaceTokenizer(Tokenizer):
    """A Hugging Face tokenizer from a directory or from the local cache. The network is never used.

    ``eod`` is the tokenizer's end-of-sentence token. No special tokens are added around a text. Where a text spells a
    special token, such as ``<s>``, it is encoded as plain text: a web page about tokenizers must not end a document.

    Args:
        name_or_path: the directory, or the name of a tokenizer in the local cache.
        trust_remote_code: whether Python code in the directory may run.
        parse_special: whether the spelling of a special token in a text is encoded as that token after all.
    """

    def __init__(self, name_or_path: str, trust_remote_code: bool = False, parse_special: bool = False):
        from transformers import AutoTokenizer
        from transformers.utils import logging

        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                name_or_path, local_files_only=True, trust_remote_code=trust_remote_code)
        except Exception as error:  # transformers and the libraries below it raise many types
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise DataError(f"--tokenizer-model {name_or_path} cannot be loaded as a Hugging Face tokenizer: {reason} "
                            "Give a local directory with its files.") from None
        finally:
            logging.set_verbosity(verbosity)
        self._tokenizer.model_max_length = 10**12  # otherwise it warns at every long document
        self._tokenizer.split_special_tokens = not parse_special
        # len() would be too small where ids are not consecutive: the embedding needs a row for the largest id.
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1
        self.unknown = self._tokenizer.unk_token_id
        self.eod = self._tokenizer.eos_token_id
        self._parse_special = parse_special
        self._words: WordCache | None = None
        self._knows_words: bool | None = None  # None: not found out yet

    def encode_arrays(self, texts: Sequence[str], dtype: np.dtype) -> list[np.ndarray]:
        if self._knows_words is None:
            fast = self._tokenizer.is_fast
            split = hugging_face_splitter(self._tokenizer.backend_tokenizer, self._parse_special) if fast else None
            self._knows_words = split is not None
            self._words = WordCache(split, self.encode_batch, dtype) if split else None
        if self._words is None:
            return super().encode_arrays(texts, dtype)
        return _by_words(self._words, texts, long_text.whole, super().encode_arrays, dtype)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        if not self._tokenizer.is_fast:
            return self._tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)["input_ids"]
        # transformers would also compute offsets and masks, which nobody asks for.
        library = self._tokenizer.backend_tokenizer
        library.encode_special_tokens = self._tokenizer.split_special_tokens
        library.no_truncation()
        library.no_padding()
        return [encoding.ids for encoding in library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)


class NullTokenizer(Tokenizer):
    """Encode texts that are token ids with blanks between them. ``eod`` is ``vocab_size - 1``, as in Megatron-core."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1

    def encode(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise DataError(f"NullTokenizer reads whole numbers with blanks between them: {error}.") from None
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise DataError(f"Token id {i} is not below --vocab-size {self.vocab_size}.")
        return ids

    def gives_back(self, text: str) -> bool:
        return True  # decoding can only change blanks, which carry no meaning here

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(i)) for i in ids)


def _gpt2(data: Data, *_: object) -> Tokenizer:
    return GPT2BPETokenizer(_file(data, "--vocab-file", data.vocab_file), _file(data, "--merge-file", data.merge_file))


def _sentencepiece(data: Data, *_: object) -> Tokenizer:
    return SentencePieceTokenizer(_file(data, "--tokenizer-model", data.tokenizer_model))


def _llama2(data: Data, *_: object) -> Tokenizer:
    return SentencePieceTokenizer(_file(data, "--tokenizer-model", data.tokenizer_model), begin=True)


def _hugging_face(data: Data, _: int, parse_special: bool) -> Tokenizer:
    if not data.tokenizer_model:
        raise DataError(f"--tokenizer-type {data.tokenizer_type} needs --tokenizer-model DIRECTORY.")
    return HuggingFaceTokenizer(data.tokenizer_model, data.trust_remote_code, parse_special)


def _null(_: Data, vocab_size: int, __: bool) -> Tokenizer:
    if vocab_size < 1:
        raise DataError("--tokenizer-type NullTokenizer needs --vocab-size.")
    return NullTokenizer(vocab_size)


def _tiktoken(data: Data, vocab_size: int, _: bool) -> Tokenizer:
    from megatron_sp.data.tokenizers.tiktoken_tokenizer import TikTokenizer

    return TikTokenizer(_file(data, "--tokenizer-model", data.tokenizer_model), data.tiktoken_pattern,
                        data.tiktoken_num_special_tokens, vocab_size)


def _file(data: Data, flag: str, path: str) -> str:
    if not path:
        raise DataError(f"--tokenizer-type {data.tokenizer_type} needs {flag} FILE.")
    if not os.path.isfile(path):
        raise DataError(f"{flag} {path} is not a file; --tokenizer-type {data.tokenizer_type} reads its vocabulary "
                        "from there.")
    return path


def build_tokenizer(data: Data, model_vocab_size: int = 0, parse_special: bool = False) -> Tokenizer:
    """Build the tokenizer that the flags describe.

    Args:
        data: the data flags.
        model_vocab_size: ``--vocab-size``; only NullTokenizer and TikTokenizer read it.
        parse_special: see ``HuggingFaceTokenizer``; no other tokenizer reads it.

    Raises:
        DataError: a flag is missing, or a file is missing or damaged.
    """
    makers: dict[str, Callable[[Data, int, bool], Tokenizer]] = dict(
        GPT2BPETokenizer=_gpt2, SentencePieceTokenizer=_sentencepiece, GPTSentencePieceTokenizer=_sentencepiece,
        Llama2Tokenizer=_llama2, HuggingFaceTokenizer=_hugging_face, HFTokenizer=_hugging_face,
        PretrainedFromHF=_hugging_face, TikTokenizer=_tiktoken, NullTokenizer=_null)
    make = {name.lower(): maker for name, maker in makers.items()}.get(data.tokenizer_type.lower())
    if make is None:
        raise DataError(f"--tokenizer-type {data.tokenizer_type} is unknown; choose one of {', '.join(makers)}.")
    tokenizer = make(data, model_vocab_size, parse_special)
    tokenizer.vocab_size += data.vocab_extra_ids  # adds ids that no text is ever encoded to
    return tokenizer
