"""Turn tokens into text while they are generated, in complete characters, and end the text at stop words."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class TextStream:
    """Turns tokens into text one after another, and returns only complete characters.

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
    """Ends a text before the first stop word. A stop word may begin or end in the middle of a token.

    Text that may be the beginning of a stop word is held back until the following text decides.

    Attributes:
        found: whether the text has reached a stop word.
    """

    def __init__(self, words: Sequence[str]):
        self.words = [word for word in words if word]
        self.found = False
        self._held = ""

    def push(self, text: str) -> str:
        """Add text; return the text that comes before any stop word and cannot be the beginning of one."""
        if self.found:
            return ""
        held = self._held + text
        places = [(place + len(word), place) for word in self.words if (place := held.find(word)) >= 0]
        if places:
            self.found, self._held = True, ""
            # The word that ends first decides. So the result does not depend on how the text is split into tokens.
            return held[:min(places)[1]]
        longest = max(map(len, self.words), default=1) - 1
        keep = next((size for size in range(min(longest, len(held)), 0, -1)
                     if any(word.startswith(held[-size:]) for word in self.words)), 0)
        self._held = held[len(held) - keep:]
        return held[:len(held) - keep]

    def finish(self) -> str:
        """Return the text that was held back. Called when the text ends without a stop word."""
        held, self._held = self._held, ""
        return held
