"""Needle in a haystack: measure whether a model repeats a short text that is hidden somewhere in a long one.

A text of ``length`` tokens is made of other text, with a needle at some depth, and a question at its end::

    | haystack ...   [needle: question answer]   ... haystack | question |  answer?
    0                depth x length                                       length

The model reads everything before the answer once, chunk by chunk, and then the answer. Its probabilities of the
answer's tokens, each given the answer's tokens before it, are the score. If each token is the most probable one, greedy
decoding writes the answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_sp.model.attention.key_value_cache import KeyValueCache
from megatron_sp.model.context import Context
from megatron_sp.model.reading import prefill


@dataclass(frozen=True)
class Score:
    """How well the model gives an answer.

    Attributes:
        probability: the geometric mean of the probabilities of the answer's tokens.
        found: whether greedy decoding writes the answer.
    """

    probability: float
    found: bool


@dataclass(frozen=True)
class Needle:
    """A needle as token ids: question and answer are hidden in the text, and the question comes again at its end."""

    question: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return what is hidden in the text."""
        return self.question + self.answer

    @property
    def least_length(self) -> int:
        """Return the tokens of the shortest text: needle, question and answer."""
        return len(self.question) + 2 * len(self.answer) + len(self.question)


def hide(haystack: Sequence[int], needle: Needle, length: int, depth: float | None) -> list[int]:
    """Return a text of ``length`` tokens that ends with the question and the answer.

    Args:
        haystack: at least ``length`` tokens.
        length: tokens of the whole text, the answer at its end included; at least ``needle.least_length``.
        depth: where the needle is, from 0 (at the start) to 1 (just before the question); None: it is left out, and
            the text has as much more of the haystack.
    """
    end = list(needle.question + needle.answer)
    hidden = list(needle.tokens) if depth is not None else []
    free = length - len(end) - len(hidden)
    place = round((depth or 0.0) * free)
    return [*haystack[:place], *hidden, *haystack[place:free], *end]


@torch.no_grad()
def score(model: nn.Module, text: Sequence[int], answer_length: int, vocab_size: int, chunk: int = 0) -> Score:
    """Return how well a model gives the last tokens of a text.

    Args:
        model: a ``GPT`` in evaluation mode on one process, built for chunks if ``chunk`` is not 0.
        text: token ids; the last ``answer_length`` of them are the answer.
        vocab_size: ids from here on are padding.
        chunk: read the text in chunks of so many tokens; 0: all at once.
    """
    device = next(model.parameters()).device
    tokens = torch.tensor([list(text)], device=device)
    before, answer = tokens[:, :-answer_length], tokens[:, -answer_length:]
    cache = KeyValueCache()
    if 0 < chunk < before.shape[1]:
        first = prefill(model, before, cache, chunk)
    else:
        context = Context(torch.arange(before.shape[1], device=device)[None], earlier=cache)
        first = model(before, context)[:, -1]
    logits = [first[:, None]]
    if answer_length > 1:
        positions = torch.arange(before.shape[1], len(text) - 1, device=device)[None]
        logits.append(model(answer[:, :-1], Context(positions, earlier=cache)))
    return _score(torch.cat(logits, dim=1)[0, :, :vocab_size].float(), answer[0])


def _score(logits: Tensor, answer: Tensor) -> Score:
    """Return the score from the logits [a, v] before each token of an answer [a]."""
    mean = logits.log_softmax(-1).gather(1, answer[:, None]).mean().item()
    return Score(math.exp(mean), bool((logits.argmax(-1) == answer).all()))


@dataclass(frozen=True)
class Cell:
    """The scores at one length and depth, averaged over the trials; without a needle at all, where depth is None."""

    length: int
    depth: float | None
    probability: float
    found: float


def grid(model: nn.Module, trials: Sequence[tuple[Needle, Sequence[int]]], lengths: Sequence[int],
         depths: Sequence[float], vocab_size: int, chunk: int = 0) -> Iterator[Cell]:
    """Yield for each length the score of a text without a needle, then the scores of all depths.

    The score without a needle says how well the model guesses.

    Args:
        trials: needles, each with its haystack of at least the longest length.
    """
    for length in lengths:
        for depth in (None, *depths):
            scores = [score(model, hide(haystack, needle, length, depth), len(needle.answer), vocab_size, chunk)
                      for needle, haystack in trials]
            yield Cell(length, depth, sum(each.probability for each in scores) / len(scores),
                       sum(each.found for each in scores) / len(scores))
