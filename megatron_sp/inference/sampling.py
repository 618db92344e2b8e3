"""Sampling tokens from a model one after another, on one process or on the ranks of a tensor-parallel group.

``inference.text`` turns the tokens into text.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_sp.errors import ConfigError
from megatron_sp.model.attention.key_value_cache import KeyValueCache
from megatron_sp.model.context import Context
from megatron_sp.model.reading import prefill
from megatron_sp.parallel.tensor import TensorRegion


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the model's probabilities.

    Args:
        temperature: logits are divided by it; 0 always takes the most probable token.
        top_k: draw among the k most probable tokens; 0 draws among all.
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
    """Return the probabilities from which the next token is drawn.

    Args:
        logits: [v], any floating type.

    Returns:
        [v] fp32 with the sum 1; zero for a token that top-k or top-p leaves out.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        return nn.functional.one_hot(logits.argmax(), logits.numel()).float()
    # The maximum is subtracted first, because dividing by a tiny temperature would overflow.
    logits = (logits - logits.max()) / sampling.temperature
    order = logits.argsort(descending=True, stable=True)
    shares = logits[order].softmax(-1)
    if 0 < sampling.top_k < logits.numel():
        shares[sampling.top_k:] = 0
        shares /= shares.sum()
    if sampling.top_p < 1:
        before = shares.cumsum(-1) - shares
        before[0] = 0.0  # never remove the most probable token, whatever rounding makes of the sums
        shares[before >= sampling.top_p] = 0
        shares /= shares.sum()
    return torch.zeros_like(shares).scatter_(0, order, shares)


def gather_vocabulary(logits: Tensor, region: TensorRegion | None) -> Tensor:
    """Return the logits of the whole vocabulary on every tp rank: [b, v/tp] -> [b, v]."""
    if region is None or region.size == 1:
        return logits
    parts = [torch.empty_like(logits) for _ in range(region.size)]
    dist.all_gather(parts, logits.contiguous(), group=region.group)
    return torch.cat(parts, dim=-1)


def generate(model: nn.Module, prompt: Sequence[int], max_new_tokens: int, sampling: Sampling, *, vocab_size: int,
             eod: int | None = None, seed: int = 1234, use_cache: bool = True) -> Iterator[int]:
    """Continue one prompt and yield the new token ids. The arguments are those of ``generate_batch``."""
    for (token,) in generate_batch(model, [prompt], max_new_tokens, sampling, vocab_size=vocab_size, eod=eod, seed=seed,
                                   use_cache=use_cache):
        if token is not None:
            yield token


def generate_batch(model: nn.Module, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling, *,
                   vocab_size: int, eod: int | None = None, seed: int = 1234, use_cache: bool = True,
                   region: TensorRegion | None = None,
                   chunk: int = 0) -> Generator[list[int | None], Collection[int] | None, None]:
    """Continue several prompts together, one token of each per step.

    All rows are at the same position at every step, so nothing is padded or masked. The first step reads as many tokens
    of each prompt as the shortest prompt has. Each later step gives a row the next token of its prompt or, where its
    prompt has ended, draws one:

        step      1          2           3
        prompt A  a0 a1 -> draw       draw
        prompt B  b0 b1    read b2 -> draw

    Args:
        model: a ``GPT`` in evaluation mode, whole on this process or split over ``region``.
        prompts: token ids, at least one for each prompt.
        max_new_tokens: end a row after this many drawn tokens.
        vocab_size: token ids from here on are padding and are never drawn.
        eod: a row ends when this token is drawn, and the token is not yielded; None: no token ends a row.
        seed: seed of the draws. Each row has a generator of its own, so a row does not depend on the others.
        use_cache: keep keys and values; without them every step computes the whole text again.
        chunk: read the prompts in chunks of so many tokens, with a model that was built for chunks; 0: all at once.
        region: the tp ranks over which the vocabulary is split. All of them call this and draw the same tokens.

    Yields:
        For each row its new token, or None for a row that has ended or that still reads its prompt. The caller may
        ``send`` numbers of rows, which end these rows.

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
        texts = [row[:length] for row in rows]
        if cache is not None and not seen and 0 < chunk < length:
            logits = prefill(model, torch.tensor(texts, device=device), cache, chunk)
        else:
            logits = _next_logits(model, texts, seen, cache, device)
        logits = gather_vocabulary(logits, region)
        seen = length if use_cache else 0
        new: list[int | None] = [None] * len(rows)
        for number, row in enumerate(rows):
            if len(row) > length:  # this row still reads its prompt
                continue
            # A row that has ended keeps decoding with the batch. Its input is token 0, and its output is discarded.
            token = 0
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
    """Return the logits [b, v/tp] of the token after each row.

    Args:
        rows: token ids, equally many in each row.
        seen: number of tokens that the cache holds already.
    """
    ids = torch.tensor([row[seen:] for row in rows], device=device)
    positions = torch.arange(seen, len(rows[0]), device=device).expand(len(rows), -1)
    return model(ids, Context(positions, earlier=cache))[:, -1]
