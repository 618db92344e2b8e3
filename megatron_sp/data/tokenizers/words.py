"""Encode texts word by word, and remember the tokens of each word.

Most words of a text have been seen before. Looking them up is faster than letting a tokenizer library merge their
characters again. This is exact only where the library would split a text into the same words and encode each on its
own. Each splitter, here and in ``hugging_face_words.py``, returns None for a text where that is not certain; then the
library encodes that text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_sp.data.tokenizers.long_text import LETTER, META, is_word_bpe

MOST_WORDS = 1 << 16  # words that are remembered; about 15 MB
LONGEST_WORD = 64  # characters; longer words are rare, and remembering them would take much memory

#: Splits a text into words, or returns None if it cannot be certain that the library would split it alike.
Splitter = Callable[[str], "list[str] | None"]
#: Encodes words.
WordEncoder = Callable[[list[str]], Iterable[Sequence[int]]]


class WordCache:
    """Encode texts with a splitter, an encoder of words, and the tokens of the words seen before.

    Args:
        split: splits a text into words.
        encode_words: encodes words that were not seen before.
        dtype: type of the token arrays.
    """

    def __init__(self, split: Splitter, encode_words: WordEncoder, dtype: np.dtype):
        self._split, self._encode_words, self._dtype = split, encode_words, dtype
        self._known: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._known)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray | None]:
        """Return the token ids of each text, or None for a text that only the library can split."""
        split = [self._split(text) for text in texts]
        missing = {word for words in split if words for word in words}
        missing.difference_update(self._known)
        if len(self._known) + len(missing) > MOST_WORDS:
            self._known.clear()  # frequent words are encoded once more and are then in the cache again
            missing = {word for words in split if words for word in words}
        if missing:
            new = list(missing)
            for word, ids in zip(new, self._encode_words(new), strict=True):
                self._known[word] = np.array(ids, dtype=self._dtype).tobytes()
        lookup = self._known.__getitem__
        arrays = [None if words is None else np.frombuffer(b"".join(map(lookup, words)), dtype=self._dtype)
                  for words in split]
        for word in missing:
            if len(word) > LONGEST_WORD:
                del self._known[word]
        return arrays


# GPT-2 splits a text with a regular expression over letters \\p{L}, digits \\p{N}, white space and all else. Which
# characters are letters depends on the version of Unicode that a library knows. So only characters are listed here that
# have belonged to the same class in every version since 3.2, and emoji, which never were letters. For texts in these
# characters the expression below is GPT-2's.
LETTERS = ("A-Za-z\u00aa\u00b5\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u0220\u0222-\u0233\u0388-\u038a\u038c"
            "\u038e-\u03a1\u03a3-\u03ce\u0400-\u0481\u048a-\u04ce\u05d0-\u05ea\u0621-\u063a\u0640-\u064a\u0905-\u0939\u1e00-\u1e9b"
            "\u1ea0-\u1ef9\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3\uff21-\uff3a\uff41-\uff5a")
DIGITS = "0-9\u00b2\u00b3\u00b9\u00bc-\u00be\uff10-\uff19"
SPACES = "\\t-\\r \u00a0\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_OTHERS = ("\\0-\\x08\\x0e-\\x1f!-/:-@\\[-`{-\\x7f\u00a1-\u00a9\u00ab-\u00b1\u00b4\u00b6-\u00b8\u00bb\u00bf\u00d7\u00f7"
           "\u0300-\u034f\u0360-\u036f\u200b-\u2027\u202a-\u202e\u2030-\u2052\u20a0-\u20ac\u2190-\u22ff\u2500-\u2613"
           "\u2619-\u266f\u3001-\u3004\u3008-\u3020\ufe0f\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65"
           "\U0001f300-\U0001f64f\U0001f680-\U0001f6ff\U0001f900-\U0001f9ff")


def gpt2_words(letters: str, digits: str, spaces: str) -> re.Pattern[str]:
    """Return GPT-2's pattern of words for characters that are letters, digits and white space."""
    return re.compile(f" ?[{letters}]+|'(?:[stmd]|re|ve|ll)| ?[{digits}]+| ?[^{spaces}{letters}{digits}]+"
                      f"|[{spaces}]+(?![^{spaces}])|[{spaces}]+")


@dataclass(frozen=True)
class WordPatterns:
    """How a tokenizer splits texts.

    Attributes:
        ascii: matches each word of an ASCII text; fewer characters are compared faster.
        all: matches each word of other texts.
        uncertain: matches a character that another library may take for one of another class.
    """

    ascii: re.Pattern[str]
    all: re.Pattern[str]
    uncertain: re.Pattern[str]

    def split(self, text: str) -> list[str] | None:
        """Return the words of a text, or None where a character is uncertain."""
        if text.isascii():
            return self.ascii.findall(text)
        return None if self.uncertain.search(text) else self.all.findall(text)


def word_patterns(pattern_of: Callable[[str, str, str], re.Pattern[str]], uncertain: str = "") -> WordPatterns:
    """Compile the patterns of a tokenizer, which takes some milliseconds.

    Args:
        pattern_of: returns the pattern of words for characters that are letters, digits and white space.
        uncertain: further characters that are uncertain.
    """
    certain = LETTERS + DIGITS + SPACES + _OTHERS
    return WordPatterns(pattern_of("A-Za-z", "0-9", "\\t-\\r "), pattern_of(LETTERS, DIGITS, SPACES),
                        re.compile(f"[^{certain}]" + (f"|[{uncertain}]" if uncertain else "")))


def gpt2_splitter(special: str) -> Splitter:
    """Return the splitter for GPT-2's byte-level BPE.

    Args:
        special: spelling of the special token, which the library takes out of a text before it splits the text.
    """
    patterns = word_patterns(gpt2_words)
    return lambda text: None if special in text else patterns.split(text)


def sentencepiece_words(model: Any) -> tuple[Splitter, WordEncoder] | None:
    """Return a splitter and an encoder of words for a SentencePiece model, or None if no exact ones are known.

    A BPE model joins neighbours only to a piece of its vocabulary. So nothing is joined across the place between two
    characters that stand side by side in no piece. Where no piece has a blank after another character, a line end
    beside another character, or characters of two kinds (letters, digits, others) side by side, a word is a run of one
    kind with the blanks before it, or a run of line ends. Kinds that share a piece count as one.

    The character META itself is read as a blank, and a model that normalizes text may turn other characters into a
    blank too. Texts with META, or for such a model with characters that are not in the list below, are left to the
    library.

    Args:
        model: a ``SentencePieceProcessor``.
    """
    if not is_word_bpe(model):
        return None
    pieces = [model.id_to_piece(i) for i in range(model.vocab_size())
              if not (model.is_control(i) or model.is_byte(i) or model.is_unknown(i))]
    kept = "".join(char for char in "\t\r\n" if _keeps(model, char))
    if "".join(model.encode("a  b ", out_type=str)).removeprefix(META) != f"a{META}{META}b{META}":
        return None  # the model drops blanks
    if "\n" not in kept or any("\n" in piece and piece.strip("\n") for piece in pieces):
        return None
    uncertain = re.compile(f"[^{LETTER} !-~{kept}]" if normalizes(model) else META)
    runs = "|".join(f"[{kind}]+" for kind in _separate_kinds(pieces))
    words = re.compile(f" +(?:{runs})?|\\n+|{runs}")
    adds_blank = model.encode("a", out_type=str)[0].startswith(META)
    before = " " if adds_blank else ""

    def split(text: str) -> list[str] | None:
        if uncertain.search(text):
            return None
        return words.findall(before + text) if text else []

    if not adds_blank:
        return (split, model.encode) if model.encode(" a", out_type=str)[0].startswith(META) else None
    blank = model.piece_to_id(META)

    def encode(new: list[str]) -> list[list[int]]:
        # The model puts a blank before every text. A word's own first blank is left out in exchange. In front of line
        # ends the blank is the first token, and is dropped. Any other word is encoded after a line end; then the first
        # two tokens are dropped.
        first = [word[0] if word[0] in " \n" else "" for word in new]
        ids = model.encode([word[1:] if start == " " else word if start else "\n" + word
                            for word, start in zip(new, first)])
        return [[blank] if word == " " else found[{" ": 0, "\n": 1, "": 2}[start]:]
                for word, start, found in zip(new, first, ids)]

    return split, encode


#: Kinds of characters except blank and line end.
_KINDS = {"letter": "A-Za-z\x80-\U0010ffff", "digit": "0-9", "other": "\\0-\\x09\\x0b-\\x1f!-/:-@\\[-`{-\\x7f"}


def _separate_kinds(pieces: Sequence[str]) -> list[str]:
    """Return the kinds of characters, as parts of regular expressions; kinds that share a piece are one."""
    patterns = {kind: re.compile(f"[{characters}]") for kind, characters in _KINDS.items()}
    groups = [{kind} for kind in _KINDS]
    for piece in pieces:
        found = {kind for kind, pattern in patterns.items() if pattern.search(piece.replace(META, ""))}
        joined = set().union(*(group for group in groups if group & found))
        if len(joined) > 1:
            groups = [group for group in groups if not group & found] + [joined]
    return ["".join(_KINDS[kind] for kind in group) for group in groups]


def normalizes(model: Any) -> bool:
    """Return whether a SentencePiece model replaces characters before it encodes a text.

    Its file says so: it is a message of protocol buffers, in which field 3 holds the settings of the normalizer, and
    field 2 of these the table of replacements.
    """
    return any(table for number, settings in _fields(model.serialized_model_proto()) if number == 3
               for inner, table in _fields(settings) if inner == 2)


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of the fields of a protocol buffer message that are byte strings or messages."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while place < len(message):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            varint()
            continue
        length = {1: 8, 5: 4}.get(wire) or varint()
        if wire == 2:
            yield number, message[place:place + length]
        place += length


def _keeps(model: Any, char: str) -> bool:
    """Return whether a model encodes a control character as itself or as a byte, and not as a blank or not at all."""
    return any(char in piece or piece == f"<0x{ord(char):02X}>" for piece in model.encode(f"a{char}b", out_type=str))
