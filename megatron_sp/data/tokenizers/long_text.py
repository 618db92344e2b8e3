"""Cut long texts into parts that can be tokenized one by one, so that memory does not grow with the longest document.

The tokens of the parts, one part after another, are the tokens of the whole text. This holds only if no token spans a
cut. Where that is certain depends on the tokenizer; each function explains it for one kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

#: A function (text, length) that cuts a text into parts of at least ``length`` characters; the last may be shorter.
Cutter = Callable[[str, int], Iterator[str]]

#: Characters that are letters or digits in every version of Unicode. A tokenizer library may use an older version than
#: Python does, so cuts are made only beside these characters.
LETTER = ("0-9A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u03b1-\u03c9\u0400-\u0481"
          "\u05d0-\u05ea\u0621-\u064a\u0904-\u0939\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3")
GPT2_BORDER = re.compile(f"(?<=[{LETTER}])(?=[ \\n.,;:!?\u3002\u3001\uff0c\uff01\uff1f])")
BEFORE_BLANK = re.compile(f"(?<=[{LETTER}])(?= [{LETTER}])")
META = "\u2581"  # the character that stands for a blank in SentencePiece's pieces


def whole(text: str, length: int) -> Iterator[str]:
    """Yield the whole text as one part, for tokenizers of which no safe cut is known."""
    yield text


def cut_for_gpt2(text: str, length: int) -> Iterator[str]:
    """Cut a text for GPT-2's byte-level BPE, before a blank, line end or punctuation after a letter or digit.

    GPT-2 first splits a text into words with a regular expression, and merges bytes only within a word. No word has a
    letter or digit followed by a blank or by punctuation, so a word always ends at such a place. The expression looks
    ahead only after white space, so the words before the cut do not depend on the text after it.
    """
    return _cut(text, length, GPT2_BORDER, 0)


def sentencepiece_cutter(model: Any) -> Cutter:
    """Return the function that cuts texts for a SentencePiece model.

    A BPE model merges neighbouring pieces in the order of a ranking. If the vocabulary has no piece with a blank after
    another character, no merge crosses the place before a blank, and the two sides are tokenized independently. A
    unigram model adds log probabilities over the whole text in float32. The rounding then depends on the text before a
    place, and it can change the choice between segmentations of nearly equal probability. So its texts are not cut.

    Args:
        model: a ``SentencePieceProcessor``.
    """
    if not is_word_bpe(model):
        return whole
    adds_blank = model.encode("a", out_type=str)[0].startswith(META)
    if adds_blank:
        # The model adds a blank before each part, so the part must not begin with the text's own blank.
        return lambda text, length: _cut(text, length, BEFORE_BLANK, 1)
    keeps_first_blank = "".join(model.encode(" a", out_type=str)).startswith(META)
    return (lambda text, length: _cut(text, length, BEFORE_BLANK, 0)) if keeps_first_blank else whole


def is_word_bpe(model: Any) -> bool:
    """Return whether no merge of a SentencePiece model crosses the place before a blank.

    That is so if it is a BPE model and no piece has a blank after another character.
    """
    pieces = [model.id_to_piece(i) for i in range(model.vocab_size())]
    # The scores of a BPE model are ranks, those of a unigram model are logarithms.
    is_bpe = all(float(model.get_score(i)).is_integer() for i in range(model.vocab_size()))
    spans = any(META in piece.lstrip(META) for piece in pieces)
    return is_bpe and not spans and bool(model.piece_to_id(META) != model.unk_id())


def _cut(text: str, length: int, border: re.Pattern[str], skipped: int) -> Iterator[str]:
    """Cut at the first border after each ``length`` characters, and drop ``skipped`` characters after each cut."""
    start = 0
    while found := border.search(text, start + length):
        yield text[start:found.start()]
        start = found.start() + skipped
    yield text[start:]
