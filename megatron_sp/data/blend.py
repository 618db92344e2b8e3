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
from megatron_sp.progress import progress_bar

SURPLUS = 0.005  # Megatron builds this much more of each member than the blend is to draw
FEW = 8  # up to this many members a plain loop over them is faster than numpy
CHUNK = 1 << 18  # samples between two steps of the progress bar


@dataclass(frozen=True)
class Blend:
    """A parsed data path.

    Attributes:
        prefixes: paths of token sets without ending.
        weights: shares that sum to 1, or None: every set is read in proportion to its size.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None


def parse_data_path(arguments: Sequence[str], flag: str = "--data-path") -> Blend:
    """Parse the value of ``--data-path``, ``--train-data-path`` and so on.

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
    return _weighted_blend(prefixes, [number or 0.0 for number in numbers], flag)


def _weighted_blend(prefixes: list[str], raw: list[float], flag: str) -> Blend:
    total = float(np.sum(np.array(raw, dtype=np.float64)))
    if not (total > 0 and math.isfinite(total)):
        raise DataError(f"{flag}: the weights add up to {total:g}; at least one must be above 0.")
    used = [(prefix, weight) for prefix, weight in zip(prefixes, raw, strict=True) if weight > 0]
    if len(used) == 1:
        return Blend((used[0][0],))
    return Blend(tuple(prefix for prefix, _ in used), normalised([weight for _, weight in used]))


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def normalised(weights: Sequence[float]) -> tuple[float, ...]:
    """Divide weights by their sum, in float64 and with numpy's order of summation, as Megatron does."""
    values = np.array(weights, dtype=np.float64)
    return tuple((values / np.sum(values)).tolist())


def member_sizes(weights: Sequence[float], num_samples: int, surplus: float = 0.0) -> list[int]:
    """Return the samples of each member for a blend of ``num_samples``, rounded up as Megatron does."""
    return [math.ceil(math.ceil(num_samples * weight) * (1 + surplus)) for weight in weights]


def blend_order(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw ``size`` samples so that each member's share of the first k samples is near its weight, for every k.

    Step k takes the member for which ``weight * k - samples drawn so far`` is largest; of equals the first.

    Args:
        weights: shares, summing to 1.
        size: samples to draw.

    Returns:
        member of each sample int16 ``[size]``, and its number within the member int64 ``[size]``.
    """
    return _draw(list(weights), size, [size + 1] * len(weights))


def exhaustive_order(sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Draw every sample of every member once, in proportion to the sizes.

    The order is that of ``blend_order`` with the sizes as weights, except that a member whose samples are all
    drawn takes no further part.

    Args:
        sizes: samples of each member.

    Returns:
        The same two arrays as ``blend_order``.
    """
    return _draw(list(normalised(sizes)), int(sum(sizes)), [int(size) for size in sizes])


def _draw(weights: list[float], size: int, limits: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Draw ``size`` samples by weight; a member is left out once ``limits`` of its samples are drawn."""
    members = np.empty(size, dtype=np.int16)
    weights = [weight if limit else -math.inf for weight, limit in zip(weights, limits, strict=True)]
    draw = _draw_few if len(weights) <= FEW else _draw_many
    drawn = [0] * len(weights)
    # The order of a million samples takes about a second: a bar appears when it takes longer than a moment.
    for start in progress_bar(range(0, size, CHUNK), desc="mixing the data sets", delay=2, unit_scale=CHUNK,
                              unit=" samples", leave=False):
        draw(weights, drawn, limits, members, start, min(start + CHUNK, size))
    return members, _numbers_within(members, len(weights))


def _draw_few(weights: list[float], drawn: list[int], limits: list[int], members: np.ndarray, start: int,
              stop: int) -> None:
    """Fill ``members[start:stop]``; updates ``drawn``, and ``weights`` of members that reach their limit."""
    others = list(enumerate(weights))[1:]
    first = weights[0]
    for step in range(start, stop):
        scale = step or 1
        best, most = 0, first * scale - drawn[0]
        for member, weight in others:
            behind = weight * scale - drawn[member]
            if behind > most:
                best, most = member, behind
        members[step] = best
        drawn[best] += 1
        if drawn[best] == limits[best]:
            weights[best] = -math.inf
            others, first = list(enumerate(weights))[1:], weights[0]


def _draw_many(weights: list[float], drawn: list[int], limits: list[int], members: np.ndarray, start: int,
               stop: int) -> None:
    """Do the same as ``_draw_few`` with numpy, which is faster for many members."""
    shares, counts, behind = np.array(weights), np.array(drawn, dtype=np.float64), np.empty(len(weights))
    for step in range(start, stop):
        np.multiply(shares, step or 1, out=behind)
        behind -= counts
        best = int(behind.argmax())
        members[step] = best
        counts[best] += 1
        drawn[best] += 1
        if drawn[best] == limits[best]:
            shares[best] = weights[best] = -math.inf


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
        """Return the tokens ``[start, stop)`` of a sample, int64."""
        check_window(self, sample, start, stop)
        member = self.datasets[int(self.dataset_index[sample])]
        return member.window(int(self.dataset_sample_index[sample]), start, stop)

    def source(self, sample: int) -> str:
        """Return the file that holds a sample."""
        return self.datasets[int(self.dataset_index[sample])].source(int(self.dataset_sample_index[sample]))

    def describe(self) -> str:
        lines = [f"{self.name}: blend of {len(self.datasets)} datasets, {len(self):,} samples"]
        for dataset, drawn in zip(self.datasets, self.drawn.tolist(), strict=True):
            share = drawn / max(1, len(self))
            lines.append(f"  {share:7.2%} = {drawn:,} samples ({drawn * self.seq_length:,} tokens) drawn from "
                         f"{dataset.describe()}")
        return "\n".join(lines)


def cached_order(cache: IndexCache, weights: Sequence[float], size: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Read the order of a blend from the cache, or compute it and store it there.

    Args:
        cache: where the order is kept.
        weights: of the members; with ``size`` None their numbers of samples.
        size: samples to draw by ``blend_order``; None: all of them once, by ``exhaustive_order``.
    """
    def build() -> Arrays:
        members, numbers = (exhaustive_order([int(weight) for weight in weights]) if size is None
                            else blend_order(weights, size))
        return dict(dataset_index=members, dataset_sample_index=numbers)

    arrays = cache.get(dict(kind="blend", weights=[float(weight) for weight in weights], size=size), build)
    return arrays["dataset_index"], arrays["dataset_sample_index"]
