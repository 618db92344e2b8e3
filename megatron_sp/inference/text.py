"""Text from tokens as they are generated: whole characters only, ended by stop words."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class TextStream:
    """Turns tokens into text as they come, and returns whole characters only.

    A character may need several tokens (byte fallback), and the text of a token may depend on the token before it
    (leading spaces). So a few tokens are decoded together, and only the part that is new and complete is returned.

    Args:
        decode: returns the text of a list of token ids.
        prompt: tokens that came before; their text is not returned.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int] = ()):
        self._decode = decode
        self._context = list(prompt[-8:])  # the last tokens whose text has been returned
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Add a token and return the text that is complete with it, which may be empty."""
        self._pending.append(token)
        text = self._new_text()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        return self._return(text)

    def finish(self) -> str:
        """Return the remaining text, even if its last character is incomplete."""
        return self._return(self._new_text())

    def _new_text(self) -> str:
        return self._decode(self._context + self._pending)[len(self._decode(self._context)):]

    def _return(self, text: str) -> str:
        self._context, self._pending = (self._pending or self._context)[-8:], []
        return text


class StopWords:
    """Ends a text before the first of some words. The words need not begin or end where tokens do.

    Text that may be the beginning of such a word is held back until more text decides.

    Attributes:
        found: a stop word has been met.
    """

    def __init__(self, words: Sequence[str]):
        self.words = [word for word in words if word]
        self.found = False
        self._held = ""

    def push(self, text: str) -> str:
        """Add text and return the text before any stop word that need not be held back."""
        if self.found:
            return ""
        held = self._held + text
        places = [(place + len(word), place) for word in self.words if (place := held.find(word)) >= 0]
        if places:
            self.found, self._held = True, ""
            return held[:min(places)[1]]  # the word that ends first, however the text was cut into pieces
        longest = max(map(len, self.words), default=1) - 1
        keep = next((size for size in range(min(longest, len(held)), 0, -1)
                     if any(word.startswith(held[-size:]) for word in self.words)), 0)
        self._held = held[len(held) - keep:]
        return held[:len(held) - keep]

    def finish(self) -> str:
        """Return the text that was held back. Called when the text ends without a stop word."""
        held, self._held = self._held, ""
        return held
