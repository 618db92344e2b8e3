"""Blends: several token sets mixed by weight, in Megatron-core's order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_sp.config.cli.values import parse_words
from megatron_sp.data.gpt_dataset import Dataset, check_window
from megatron_sp.data.index_cache import Arrays, IndexCache
from megatron_sp.errors import DataError

SURPLUS = 0.005  # Megatron builds this much more of each member than the blend is to draw
FEW = 8  # up to this many members a plain loop over them is faster than numpy


@dataclass(frozen=True)
class Blend:
    """A parsed data path.

    Attributes:
        prefixes: token sets.
        weights: shares that sum to 1, or None: every set is read in proportion to its size.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None


def parse_data_path(arguments: Sequence[str], flag: str = "--data-path") -> Blend:
    """Understand the value of ``--data-path`` and its relatives.

    ``W1 P1 W2 P2 ...`` are weights and prefixes; an odd count, or an even count without any number in
    the places of weights, are plain prefixes. Arguments may contain blanks ("0.3 A"). Weights are
    relative; a set with weight 0 is left out. One weighted prefix is the same as the prefix alone.

    Raises:
        DataError: nothing given, or weights that make no sense.
    """
    words = list(parse_words(arguments))
    if not words:
        raise DataError(f"{flag} is empty; give dataset prefixes, or weights and prefixes in turn.")
    numbers = [_number(word) for word in words[::2]]
    if len(words) % 2 or all(number is None for number in numbers):
        loose = [word for word in words if _number(word) is not None]
        if len(words) > 1 and loose:
            raise DataError(f"{flag} has {len(words)} values and the number {loose[0]} among them; weights and "
                            "prefixes must come in pairs (W1 P1 W2 P2 ...), or give prefixes only.")
        return Blend(tuple(words))
    prefixes = words[1::2]
    for word, number in zip(words[::2], numbers, strict=True):
        if number is None:
            raise DataError(f"{flag}: {word} stands where a weight is expected; give either a weight before every "
                            "prefix or none at all.")
        if not (math.isfinite(number) and number >= 0):
            raise DataError(f"{flag}: the weight {word} is not a number of at least 0.")
    return _normalised(prefixes, [number or 0.0 for number in numbers], flag)


def _normalised(prefixes: list[str], raw: list[float], flag: str) -> Blend:
    total = float(np.sum(np.array(raw, dtype=np.float64)))
    if not (total > 0 and math.isfinite(total)):
        raise DataError(f"{flag}: the weights add up to {total:g}; at least one must be above 0.")
    used = [(prefix, weight) for prefix, weight in zip(prefixes, raw, strict=True) if weight > 0]
    if len(used) == 1:
        return Blend((used[0][0],))
    weights = np.array([weight for _, weight in used], dtype=np.float64)
    return Blend(tuple(prefix for prefix, _ in used), tuple((weights / np.sum(weights)).tolist()))


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def member_sizes(weights: Sequence[float], num_samples: int, surplus: float = 0.0) -> list[int]:
    """Samples of each member for a blend of ``num_samples``, rounded up as Megatron does."""
    return [math.ceil(math.ceil(num_samples * weight) * (1 + surplus)) for weight in weights]


def blend_order(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw ``size`` samples so that the shares follow the weights at every moment.

    Each step takes the member that is furthest behind its share (the first of equals).

    Args:
        weights: shares, summing to 1.
        size: samples to draw.

    Returns:
        member of each sample int16 ``[size]``, and its number within the member int64 ``[size]``.
    """
    members = np.empty(size, dtype=np.int16)
    if len(weights) <= FEW:
        _draw_few(list(weights), members)
    else:
        _draw_many(np.array(weights, dtype=np.float64), members)
    return members, _numbers_within(members, len(weights))


def _draw_few(weights: list[float], members: np.ndarray) -> None:
    drawn = [0] * len(weights)
    others = list(enumerate(weights))[1:]
    first = weights[0]
    for step in range(len(members)):
        scale = step or 1
        best, most = 0, first * scale - drawn[0]
        for member, weight in others:
            behind = weight * scale - drawn[member]
            if behind > most:
                best, most = member, behind
        members[step] = best
        drawn[best] += 1


def _draw_many(weights: np.ndarray, members: np.ndarray) -> None:
    drawn, behind = np.zeros(len(weights)), np.empty(len(weights))
    for step in range(len(members)):
        np.multiply(weights, step or 1, out=behind)
        behind -= drawn
        best = int(behind.argmax())
        members[step] = best
        drawn[best] += 1


def exhaustive_order(sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Draw every sample of every member once, in proportion to the sizes; results as ``blend_order``."""
    left = np.array(sizes, dtype=np.int64)
    weights, drawn = left / left.sum(), np.zeros(len(left))
    members = np.empty(int(left.sum()), dtype=np.int16)
    for step in range(len(members)):
        behind = np.where(left > 0, weights * (step or 1) - drawn, -np.inf)
        best = int(behind.argmax())
        members[step] = best
        drawn[best] += 1
        left[best] -= 1
    return members, _numbers_within(members, len(sizes))


def _numbers_within(members: np.ndarray, count: int) -> np.ndarray:
    numbers = np.empty(len(members), dtype=np.int64)
    for member in range(count):
        places = np.flatnonzero(members == member)
        numbers[places] = np.arange(len(places))
    return numbers


class BlendedDataset:
    """Samples of several datasets in blend order.

    Args:
        datasets: the members, all with the same sequence length.
        dataset_index: member of each sample, int16 ``[num_samples]``.
        dataset_sample_index: its number within the member, int64 ``[num_samples]``.
        name: of the split.

    Raises:
        DataError: the order asks a member for more samples than it has.
    """

    def __init__(self, datasets: Sequence[Dataset], dataset_index: np.ndarray, dataset_sample_index: np.ndarray,
                 name: str = "train"):
        self.datasets, self.name = list(datasets), name
        self.dataset_index, self.dataset_sample_index = dataset_index, dataset_sample_index
        self.seq_length = self.datasets[0].seq_length
        self.drawn = np.bincount(dataset_index, minlength=len(self.datasets))
        for dataset, drawn in zip(self.datasets, self.drawn.tolist(), strict=True):
            if drawn > len(dataset):
                raise DataError(f"The blend draws {drawn} samples from a dataset of {len(dataset)} "
                                f"({dataset.describe()}).")

    def __len__(self) -> int:
        return len(self.dataset_index)

    def window(self, sample: int, start: int, stop: int) -> np.ndarray:
        """Tokens ``[start, stop)`` of a sample, int64."""
        check_window(self, sample, start, stop)
        member = self.datasets[int(self.dataset_index[sample])]
        return member.window(int(self.dataset_sample_index[sample]), start, stop)

    def describe(self) -> str:
        lines = [f"{self.name}: blend of {len(self.datasets)} datasets, {len(self):,} samples"]
        for dataset, drawn in zip(self.datasets, self.drawn.tolist(), strict=True):
            share = drawn / max(1, len(self))
            lines.append(f"  {share:7.2%} = {drawn:,} samples ({drawn * self.seq_length:,} tokens) drawn from "
                         f"{dataset.describe()}")
        return "\n".join(lines)


def cached_order(cache: IndexCache, weights: Sequence[float], size: int | None) -> tuple[np.ndarray, np.ndarray]:
    """``blend_order`` (or, with size None, ``exhaustive_order`` of the sizes in ``weights``) through a cache."""
    def build() -> Arrays:
        members, numbers = (exhaustive_order([int(weight) for weight in weights]) if size is None
                            else blend_order(weights, size))
        return dict(dataset_index=members, dataset_sample_index=numbers)

    arrays = cache.get(dict(kind="blend", weights=[float(weight) for weight in weights], size=size), build)
    return arrays["dataset_index"], arrays["dataset_sample_index"]
