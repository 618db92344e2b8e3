"""Blends: training on several token sets that are mixed by weight, in the same order as in Megatron-core."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_sp.config.cli.values import parse_words
from megatron_sp.data.gpt_dataset import Dataset, check_window, unlabelled
from megatron_sp.data.index_cache import Arrays, IndexCache
from megatron_sp.errors import DataError
from megatron_sp.progress import progress_bar

SURPLUS = 0.005  # Megatron builds this share more samples of each member than its weight asks for
MOST = 2**15 - 1  # largest number of members of a blend, because their numbers are stored as int16
SHOWN = 40  # largest number of members that a blend's description lists; of more, those with the largest shares
FEW = 8  # a Python loop over up to this many members is faster than numpy
CHUNK = 1 << 18  # samples to draw between two updates of the progress bar


@dataclass(frozen=True)
class Blend:
    """The value of ``--data-path``, parsed.

    Attributes:
        prefixes: paths of the token sets without ``.bin`` and ``.idx``.
        weights: share of each set, summing to 1; None: the share of a set is its share of all samples.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None


def parse_data_path(arguments: Sequence[str], flag: str = "--data-path") -> Blend:
    """Parse the value of ``--data-path``, ``--train-data-path`` and so on.

    An even number of values with numbers in the first, third ... place is a list of weights and prefixes, ``W1 P1 W2 P2
    ...``. All other lists are prefixes without weights. One argument may hold several values ("0.3 A"). Weights are
    relative. A set with weight 0 is left out. The weight of a single set has no effect.

    Args:
        arguments: the values of the flag.
        flag: name of the flag, for messages.

    Raises:
        DataError: the flag has no value, or the weights are not numbers of at least 0 with a positive sum.
    """
    words = list(parse_words(arguments))
    if not words:
        raise DataError(f"{flag} is empty; give dataset prefixes, or weights and prefixes in turn.")
    blend = _blend_of(words, flag)
    if len(blend.prefixes) > MOST:
        raise DataError(f"{flag} names {len(blend.prefixes)} token sets; a blend holds at most {MOST}. Merge some of "
                        "them.")
    return blend


def _blend_of(words: list[str], flag: str) -> Blend:
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
    """Return the weights divided by their sum, to the last bit as Megatron computes it: in float64, summed by numpy."""
    values = np.array(weights, dtype=np.float64)
    return tuple((values / np.sum(values)).tolist())


def member_sizes(weights: Sequence[float], num_samples: int, surplus: float = 0.0) -> list[int]:
    """Return how many samples each member of a blend must provide, rounded up as in Megatron.

    Args:
        weights: share of each member, summing to 1.
        num_samples: number of samples of the blend.
        surplus: fraction by which to increase each number, since a blend can draw more of a member than its weight
            says.
    """
    return [math.ceil(math.ceil(num_samples * weight) * (1 + surplus)) for weight in weights]


def blend_order(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the order of a weighted blend: which sample of which member comes at each place.

    Step k takes the next sample of the member that is furthest behind its share, which is the largest
    ``weight * k - samples drawn so far``; among equals the first member. So after any number of steps each member's
    share is close to its weight.

    Args:
        weights: share of each member, summing to 1.
        size: samples to draw.

    Returns:
        The member of each sample, int16 ``[size]``, and the sample's number within the member, int64 ``[size]``.
    """
    return _draw(list(weights), size, [size + 1] * len(weights))


def exhaustive_order(sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return an order that has every sample of every member once, with the members mixed in proportion to their sizes.

    The rule is that of ``blend_order`` with the sizes as weights, but a member is left out once all its samples are
    drawn.

    Args:
        sizes: number of samples of each member.

    Returns:
        The same two arrays as ``blend_order``.
    """
    return _draw(list(normalised(sizes)), int(sum(sizes)), [int(size) for size in sizes])


def _draw(weights: list[float], size: int, limits: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Draw ``size`` samples by weight, leaving out each member once its number in ``limits`` is drawn."""
    members = np.empty(size, dtype=np.int16)
    weights = [weight if limit else -math.inf for weight, limit in zip(weights, limits, strict=True)]
    draw = _draw_few if len(weights) <= FEW else _draw_many
    drawn = [0] * len(weights)
    # A million samples take about a second. The bar appears only where drawing takes more than two seconds.
    for start in progress_bar(range(0, size, CHUNK), desc="mixing the data sets", delay=2, unit_scale=CHUNK,
                              unit=" samples", leave=False):
        draw(weights, drawn, limits, members, start, min(start + CHUNK, size))
    return members, _numbers_within(members, len(weights))


def _draw_few(weights: list[float], drawn: list[int], limits: list[int], members: np.ndarray, start: int,
              stop: int) -> None:
    """Fill ``members[start:stop]``, count in ``drawn``, and set the weight of a member at its limit to -infinity."""
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
    """Return for each sample how many samples of the same member come before it, int64."""
    by_member = np.argsort(members, kind="stable")  # the places of member 0 in order, then those of member 1 ...
    drawn = np.bincount(members, minlength=count)
    numbers = np.empty(len(members), dtype=np.int64)
    numbers[by_member] = np.arange(len(members)) - np.repeat(np.cumsum(drawn) - drawn, drawn)
    return numbers


class BlendedDataset:
    """The samples of several datasets in the order of a blend.

    Args:
        datasets: the members, all with the same sequence length.
        dataset_index: member of each sample, int16 ``[num_samples]``.
        dataset_sample_index: number of each sample within its member, int64 ``[num_samples]``.
        name: name of the split, for messages.

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

    def document_starts(self, sample: int) -> np.ndarray:
        """Return the positions at which documents start, int64, ascending from 0."""
        check_window(self, sample, 0, 0)
        return self.datasets[int(self.dataset_index[sample])].document_starts(int(self.dataset_sample_index[sample]))

    def unlabelled(self, sample: int) -> np.ndarray:
        """Return the positions without a label, int64, ascending."""
        return unlabelled(self.datasets[int(self.dataset_index[sample])], int(self.dataset_sample_index[sample]))

    def source(self, sample: int) -> str:
        """Return the path of the file that holds a sample, for messages."""
        return self.datasets[int(self.dataset_index[sample])].source(int(self.dataset_sample_index[sample]))

    def describe(self) -> str:
        lines = [f"{self.name}: blend of {len(self.datasets)} datasets, {len(self):,} samples"]
        largest = np.argsort(-self.drawn, kind="stable")[:SHOWN].tolist()
        for place in range(len(self.datasets)) if len(self.datasets) <= SHOWN else sorted(largest):
            drawn, dataset = int(self.drawn[place]), self.datasets[place]
            lines.append(f"  {self._share(drawn)} drawn from {dataset.describe()}")
        if len(self.datasets) > SHOWN:
            rest = int(self.drawn.sum() - self.drawn[largest].sum())
            lines.append(f"  {self._share(rest)} drawn from the {len(self.datasets) - SHOWN} other datasets")
        return "\n".join(lines)

    def _share(self, drawn: int) -> str:
        return f"{drawn / max(1, len(self)):7.2%} = {drawn:,} samples ({drawn * self.seq_length:,} tokens)"


def cached_order(cache: IndexCache, weights: Sequence[float], size: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Read the order of a blend from the cache, or compute it and store it there.

    Args:
        cache: stores the order.
        weights: share of each member; where ``size`` is None, number of samples of each member.
        size: number of samples to draw by ``blend_order``; None: draw every sample once, by ``exhaustive_order``.

    Returns:
        The two arrays of ``blend_order``.
    """
    def build() -> Arrays:
        members, numbers = (exhaustive_order([int(weight) for weight in weights]) if size is None
                            else blend_order(weights, size))
        return dict(dataset_index=members, dataset_sample_index=numbers)

    arrays = cache.get(dict(kind="blend", weights=[float(weight) for weight in weights], size=size), build)
    return arrays["dataset_index"], arrays["dataset_sample_index"]
