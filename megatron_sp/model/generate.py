"""Sampling text from a model, token by token, on one process.

:func:`generate` yields tokens; :class:`TextStream` turns them into text as whole characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_sp.errors import ConfigError
from megatron_sp.model.cache import KeyValueCache


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Args:
        temperature: logits are divided by it; 0 always takes the most probable token.
        top_k: draw among the k most probable tokens; 0: among all.
        top_p: draw among the fewest tokens whose probabilities sum to at least p.

    Raises:
        ConfigError: a value outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.temperature < float("inf"):
            problems.append(f"--temperature {self.temperature} must be 0 (greedy) or more")
        if self.top_k < 0:
            problems.append(f"--top-k {self.top_k} must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            problems.append(f"--top-p {self.top_p} must be above 0 and at most 1")
        if problems:
            raise ConfigError(problems)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities to draw from.

    Args:
        logits: [v], any floating type.

    Returns:
        [v] float32 that sums to 1; zero where top-k or top-p leaves a token out.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        return nn.functional.one_hot(logits.argmax(), logits.numel()).float()
    logits = (logits - logits.max()) / sampling.temperature  # the maximum first: a tiny temperature must not overflow
    order = logits.argsort(descending=True, stable=True)
    shares = logits[order].softmax(-1)
    if 0 < sampling.top_k < logits.numel():
        shares[sampling.top_k:] = 0
        shares /= shares.sum()
    if sampling.top_p < 1:
        before = shares.cumsum(-1) - shares
        before[0] = 0.0  # the most probable token always stays
        shares[before >= sampling.top_p] = 0
        shares /= shares.sum()
    return torch.zeros_like(shares).scatter_(0, order, shares)


def generate(model: nn.Module, prompt: Sequence[int], max_new_tokens: int, sampling: Sampling, *, vocab_size: int,
             eod: int | None = None, seed: int = 1234, use_cache: bool = True) -> Iterator[int]:
    """Continue ``prompt``.

    Args:
        model: a ``GPT`` in evaluation mode, whole on this process.
        prompt: token ids, at least one.
        max_new_tokens: stop after this many.
        vocab_size: tokens from here on are padding and never drawn.
        eod: stop before this token; None: never.
        seed: of the draws; the same seed and prompt give the same tokens.
        use_cache: keep keys and values; without it every token reads the whole text again.

    Yields:
        New token ids, one at a time.

    Raises:
        ConfigError: the prompt is empty.
    """
    if not prompt:
        raise ConfigError("the prompt has no tokens; give --prompt at least one character")
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    cache = KeyValueCache() if use_cache else None
    tokens, seen = list(prompt), 0
    for _ in range(max_new_tokens):
        logits = _next_logits(model, tokens, seen, cache, device)
        seen = len(tokens) if use_cache else 0
        weights = probabilities(logits[:vocab_size].cpu(), sampling)
        token = int(torch.multinomial(weights, 1, generator=generator))
        if token == eod:
            return
        tokens.append(token)
        yield token


@torch.no_grad()
def _next_logits(model: nn.Module, tokens: list[int], seen: int, cache: KeyValueCache | None,
                 device: torch.device) -> Tensor:
    """Logits [v] of the token after ``tokens``, of which the cache holds the first ``seen``."""
    ids = torch.tensor([tokens[seen:]], device=device)
    positions = torch.arange(seen, len(tokens), device=device)[None]
    return model(ids, positions, torch.zeros(1, dtype=torch.int64), cache=cache)[0, -1]


class TextStream:
    """Turns tokens into text as they come, whole characters only.

    A character may need several tokens (byte fallback) and a token's text may depend on the one
    before it (leading spaces), so a few tokens are decoded together and only what is new and
    complete is given out.

    Args:
        decode: text of a list of token ids.
        prompt: tokens that came before; their text is not given out.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int] = ()):
        self._decode = decode
        self._context = list(prompt[-8:])  # tokens whose text has been given out
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Text that is complete with this token; may be empty."""
        self._pending.append(token)
        text = self._new_text()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        return self._give(text)

    def finish(self) -> str:
        """What is left, also an incomplete character."""
        return self._give(self._new_text())

    def _new_text(self) -> str:
        return self._decode(self._context + self._pending)[len(self._decode(self._context)):]

    def _give(self, text: str) -> str:
        self._context, self._pending = (self._pending or self._context)[-8:], []
        return text
