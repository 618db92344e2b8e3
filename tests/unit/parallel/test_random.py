"""Dropout masks: the same wherever they are drawn, and as random as independent draws."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_sp.parallel.random import (
    Dropout,
    mix,
    numbered_keys,
    stable_key,
    token_keys,
)

PLACES, CHANNELS = torch.arange(2048), torch.arange(768)
PROBABILITIES = [0.1, 0.5]


def mask(probability: float = 0.25, site: str = "0/mlp", sample: int = 5, seed: int = 1234) -> Tensor:
    """Return which elements of a sample are kept, [2048, 768]."""
    return Dropout(probability, seed, site).keep(token_keys(torch.tensor([sample]), PLACES), CHANNELS)[0]


def test_keys_and_masks_are_the_same_on_every_machine_and_in_every_version() -> None:
    """A run that continues draws the masks that it would have drawn without the stop."""
    assert stable_key(1, "a", 2) == 4316425502212999783
    keep = Dropout(0.5, 1234, "0/mlp").keep(token_keys(torch.tensor([5]), torch.tensor([77])), torch.arange(32))
    assert "".join(str(int(kept)) for kept in keep.flatten()) == "11001111100101111111011100001100"


def test_any_part_of_a_mask_is_drawn_alone() -> None:
    """Tokens in any order, single channels, other samples beside it, one element at a time: the same mask."""
    whole, drop = mask(), Dropout(0.25, 1234, "0/mlp")
    places, channels = torch.tensor([1999, 3, 77, 2047]), torch.tensor([700, 0, 13])
    some = drop.keep(token_keys(torch.tensor([9, 5, 1 << 40]), places), channels)
    assert some.shape == (3, 4, 3) and torch.equal(some[1], whole[places][:, channels])
    assert bool(drop.keep(token_keys(torch.tensor([5]), torch.tensor([77])), torch.tensor([13]))) == whole[77, 13]
    x = torch.ones(1, 3, 768)
    samples = torch.tensor([5])
    hidden = drop.hidden(x, token_keys(samples, torch.tensor([[7, 1, 2000]])))
    assert torch.equal(hidden[0] != 0, whole[[7, 1, 2000]])


def test_compiled_code_draws_the_same_masks_and_is_not_compiled_again() -> None:
    """Not for another layer, sample or place: their numbers are tensors."""
    compiles = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        compiles.append(graph)
        return graph.forward

    torch._dynamo.reset()

    @torch.compile(backend=backend, fullgraph=True)
    def hidden(drop: Dropout, x: Tensor, keys: Tensor) -> Tensor:
        return drop.hidden(x, keys)

    for layer in range(3):
        drop, samples = Dropout(0.25, 1234, f"{layer}/mlp"), torch.tensor([layer, 8])
        keys = token_keys(samples, PLACES[layer:50 + layer])
        x = torch.randn(2, 50, 96)
        assert torch.equal(hidden(drop, x, keys), drop.hidden(x, keys))
    assert len(compiles) == 1


def joint(masks: list[Tensor]) -> Tensor:
    """Return how often each combination of drop and keep occurs, [2^n]."""
    code = sum(part.long() << number for number, part in enumerate(masks))
    assert isinstance(code, Tensor)
    return torch.bincount(code.flatten(), minlength=1 << len(masks)).double()


def assert_independent(masks: list[Tensor], probability: float) -> None:
    """Assert by a chi-square test that masks drop at this rate, each independently of the others.

    The limit is six standard deviations of the statistic: chance exceeds it in about one of 10,000,000 tests.
    """
    found, count = joint(masks), len(masks)
    shares = torch.tensor([math.prod(1 - probability if code >> bit & 1 else probability for bit in range(count))
                           for code in range(1 << count)], dtype=torch.float64)
    expected = found.sum() * shares
    statistic, freedom = float(((found - expected) ** 2 / expected).sum()), len(shares) - 1
    assert statistic < freedom + 6 * math.sqrt(2 * freedom), (statistic, freedom)


@pytest.mark.parametrize("probability", PROBABILITIES)
def test_neighbours_drop_independently(probability: float) -> None:
    m = mask(probability)
    assert_independent([m[:, place:len(CHANNELS) - 7 + place] for place in range(8)], probability)
    assert_independent([m[place:len(PLACES) - 7 + place] for place in range(8)], probability)
    for step in (1, 16, 256):  # the corners of squares, whose numbers have the exclusive or 0
        a, b = (m[rows] for rows in (slice(step), slice(step, 2 * step)))
        assert_independent([part[:, columns] for part in (a, b)
                            for columns in (slice(256), slice(256, 512))], probability)


@pytest.mark.parametrize("probability", PROBABILITIES)
def test_samples_layers_places_in_a_layer_and_seeds_drop_independently(probability: float) -> None:
    masks = [mask(probability), mask(probability, sample=6), mask(probability, sample=5 + (1 << 31)),
             mask(probability, "1/mlp"), mask(probability, "0/attention-output"), mask(probability, seed=1235)]
    assert_independent(masks, probability)


@pytest.mark.parametrize("probability", PROBABILITIES)
def test_rows_and_columns_are_uncorrelated(probability: float) -> None:
    """A random matrix has singular values between the limits of Marchenko and Pastur; a pattern would exceed them."""
    m = (mask(probability).double() - (1 - probability)) / math.sqrt(probability * (1 - probability))
    values = torch.linalg.svdvals(m)
    larger, smaller = math.sqrt(len(PLACES)), math.sqrt(len(CHANNELS))
    assert larger - smaller - 1 < values[-1] and values[0] < larger + smaller + 1


def test_heads_queries_and_keys_drop_independently() -> None:
    drop, tokens = Dropout(0.2, 1234, "0/attention"), torch.arange(600)
    rows = mix(token_keys(torch.tensor([3]), tokens).unsqueeze(2), torch.arange(4).unsqueeze(-1))  # [2, 1, 4, 600]
    m = drop.keep(rows, tokens)[0]
    assert_independent([*m], 0.2)
    assert_independent([m[0], m[0].T, m[1], m[1].T], 0.2)
    assert_independent([m[:, :-1, :-1], m[:, 1:, :-1], m[:, :-1, 1:], m[:, 1:, 1:]], 0.2)


def test_different_numbers_give_different_keys() -> None:
    numbers = torch.cat([torch.arange(1 << 16), torch.arange(1 << 16) << 31, torch.tensor([(1 << 62) - 1])])
    keys = numbered_keys(numbers)
    assert int(keys.min()) >= 0 and int(keys.max()) < 1 << 31
    assert len(torch.unique(keys[0] << 31 | keys[1])) == len(torch.unique(numbers))


def test_probability_zero_and_evaluation_return_the_tensor_itself() -> None:
    x, samples = torch.ones(1, 2, 3), torch.zeros(1, dtype=torch.int64)
    assert Dropout(0.0, 1, "site").hidden(x, token_keys(samples, torch.arange(2))) is x
    assert Dropout(0.5, 1, "site").hidden(x, None) is x
