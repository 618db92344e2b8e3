"""Cut long texts at places that no token can span, so that memory does not grow with the longest document.

Each function gives parts whose tokens, one part after another, are those of the whole text. What makes a place safe
depends on the tokenizer and is explained at each function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

#: From a text and a number of characters to parts of at least that many characters, except the last.
Cutter = Callable[[str, int], Iterator[str]]

#: Letters and digits that every version of Unicode counts as such; the rest of their blocks is left out.
LETTER = ("0-9A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u03b1-\u03c9\u0400-\u0481"
          "\u05d0-\u05ea\u0621-\u064a\u0904-\u0939\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3")
GPT2_BORDER = re.compile(f"(?<=[{LETTER}])(?=[ \\n.,;:!?\u3002\u3001\uff0c\uff01\uff1f])")
BEFORE_BLANK = re.compile(f"(?<=[{LETTER}])(?= [{LETTER}])")
META = "\u2581"  # how SentencePiece writes a blank


def whole(text: str, length: int) -> Iterator[str]:
    """Give the whole text as one part: no safe place is known."""
    yield text


def cut_for_gpt2(text: str, length: int) -> Iterator[str]:
    """Cut a text for GPT-2's byte-level BPE, before a blank, a line end or punctuation that follows a letter or digit.

    GPT-2's pattern first splits a text into words; merges stay within a word. No alternative of the pattern goes on
    from a letter or digit to a blank or to punctuation, so a word always ends there. The pattern looks ahead only after
    white space, so the part before the border does not depend on what follows.
    """
    return _cut(text, length, GPT2_BORDER, 0)


def sentencepiece_cutter(model: Any) -> Cutter:
    """Choose how to cut texts for a SentencePiece model.

    A BPE model merges neighbours by the rank of the merged piece. If no piece has a blank after another character, no
    merge crosses the place before a blank, and both sides are independent. A unigram model adds up probabilities over
    the whole text in float32, and its choice between nearly equal ways depends on how much came before: it is not cut.

    Args:
        model: a ``SentencePieceProcessor``.
    """
    pieces = [model.id_to_piece(i) for i in range(model.vocab_size())]
    is_bpe = all(float(model.get_score(i)).is_integer() for i in range(model.vocab_size()))  # ranks, no logarithms
    spans = any(META in piece.lstrip(META) for piece in pieces)
    if not is_bpe or spans or model.piece_to_id(META) == model.unk_id():
        return whole
    adds_blank = model.encode("a", out_type=str)[0].startswith(META)
    if adds_blank:
        # The model puts a blank before each part: leave the text's own blank out.
        return lambda text, length: _cut(text, length, BEFORE_BLANK, 1)
    keeps_first_blank = "".join(model.encode(" a", out_type=str)).startswith(META)
    return (lambda text, length: _cut(text, length, BEFORE_BLANK, 0)) if keeps_first_blank else whole


def _cut(text: str, length: int, border: re.Pattern[str], skipped: int) -> Iterator[str]:
    """Cut at the first border after every ``length`` characters, and leave out ``skipped`` characters there."""
    start = 0
    while found := border.search(text, start + length):
        yield text[start:found.start()]
        start = found.start() + skipped
    yield text[start:]
