"""Sampling text from a model, token by token: one process, or the ranks of a tensor-parallel group.

:func:`generate_batch` yields tokens; :class:`TextStream` turns them into text as whole characters, and
:class:`StopWords` ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_sp.errors import ConfigError
from megatron_sp.model.attention.key_value_cache import KeyValueCache
from megatron_sp.parallel.tensor import TensorRegion


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


def gather_vocabulary(logits: Tensor, region: TensorRegion | None) -> Tensor:
    """[b, v/tp] -> [b, v], the same on every rank of the region."""
    if region is None or region.size == 1:
        return logits
    parts = [torch.empty_like(logits) for _ in range(region.size)]
    dist.all_gather(parts, logits.contiguous(), group=region.group)
    return torch.cat(parts, dim=-1)


def generate(model: nn.Module, prompt: Sequence[int], max_new_tokens: int, sampling: Sampling, *, vocab_size: int,
             eod: int | None = None, seed: int = 1234, use_cache: bool = True) -> Iterator[int]:
    """Continue one prompt: the new token ids, one at a time; see ``generate_batch``."""
    for (token,) in generate_batch(model, [prompt], max_new_tokens, sampling, vocab_size=vocab_size, eod=eod, seed=seed,
                                   use_cache=use_cache):
        if token is not None:
            yield token


def generate_batch(model: nn.Module, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling, *,
                   vocab_size: int, eod: int | None = None, seed: int = 1234, use_cache: bool = True,
                   region: TensorRegion | None = None) -> Generator[list[int | None], Collection[int] | None, None]:
    """Continue several prompts in lockstep.

    All rows are at the same position at all times, so nothing is padded or masked: together they read as
    much as the shortest prompt has; then each step gives a row the next token of its prompt, or draws one.

    Args:
        model: a ``GPT`` in evaluation mode, whole on this process or split over ``region``.
        prompts: token ids, at least one each.
        max_new_tokens: end a row after this many.
        vocab_size: tokens from here on are padding and never drawn.
        eod: end a row before this token; None: never.
        seed: of the draws, of which each row has its own: a row does not depend on the others.
        use_cache: keep keys and values; without it every token reads the whole text again.
        region: the tp ranks that the vocabulary is split over; all of them call this and draw the same.

    Yields:
        A new token of each row, or None for a row that has ended or still reads its prompt. ``send`` row
        numbers to end these rows.

    Raises:
        ConfigError: a prompt is empty.
    """
    if not all(prompts):
        raise ConfigError("the prompt has no tokens; give --prompt at least one character")
    device = next(model.parameters()).device
    generators = [torch.Generator().manual_seed(seed) for _ in prompts]
    cache = KeyValueCache() if use_cache else None
    rows, length, seen = [list(prompt) for prompt in prompts], min(map(len, prompts)), 0
    left = [max_new_tokens] * len(rows)
    while any(left):
        logits = gather_vocabulary(_next_logits(model, [row[:length] for row in rows], seen, cache, device), region)
        seen = length if use_cache else 0
        new: list[int | None] = [None] * len(rows)
        for number, row in enumerate(rows):
            if len(row) > length:  # still in the prompt
                continue
            token = 0  # a row that has ended reads on, unheeded
            if left[number]:
                weights = probabilities(logits[number, :vocab_size].cpu(), sampling)
                token = int(torch.multinomial(weights, 1, generator=generators[number]))
                left[number] -= 1
                if token == eod:
                    left[number] = 0
                else:
                    new[number] = token
            row.append(token)
        length += 1
        for number in (yield new) or ():
            left[number] = 0


@torch.no_grad()
def _next_logits(model: nn.Module, rows: list[list[int]], seen: int, cache: KeyValueCache | None,
                 device: torch.device) -> Tensor:
    """Logits [b, v/tp] of the tokens after these rows of equal length, of which the cache holds the first ``seen``."""
    ids = torch.tensor([row[seen:] for row in rows], device=device)
    positions = torch.arange(seen, len(rows[0]), device=device).expand(len(rows), -1)
    return model(ids, positions, torch.zeros(len(rows), dtype=torch.int64), cache=cache)[:, -1]


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


class StopWords:
    """Ends a text before the first of some words, which need not fall together with tokens.

    Text that may be the beginning of such a word is held back until it is known not to be.
    """

    def __init__(self, words: Sequence[str]):
        self.words = [word for word in words if word]
        self.found = False
        self._held = ""

    def push(self, text: str) -> str:
        """What can be given out now."""
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
        """What was held back, when the text ends by itself."""
        held, self._held = self._held, ""
        return held
