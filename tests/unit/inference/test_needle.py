"""Needle in a haystack: where the needle stands, and the scores of models that copy, or guess."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron_sp.inference.needle import Needle, grid, hide, score

NEEDLE = Needle(question=(90, 91), answer=(5, 6, 7))


class Copier(nn.Module):
    """Predicts the token that followed the last token's latest earlier occurrence within ``reach`` tokens, else 0."""

    def __init__(self, reach: int):
        super().__init__()
        self.reach, self.weight = reach, nn.Parameter(torch.zeros(1))

    def forward(self, tokens: torch.Tensor, context: Any) -> torch.Tensor:
        seen, _ = context.earlier.append((0, 0), tokens[..., None, None], tokens[..., None, None])
        row = seen[0, :, 0, 0].tolist()
        logits = torch.zeros(1, tokens.shape[1], 100)
        for column, place in enumerate(context.positions[0].tolist()):
            earlier = [at for at in range(max(0, place - self.reach), place) if row[at] == row[place]]
            logits[0, column, row[earlier[-1] + 1] if earlier else 0] = 20.0
        return logits


@pytest.mark.parametrize("depth, place", [(0.0, 0), (0.5, 5), (1.0, 10)])
def test_the_needle_stands_at_its_depth(depth: float, place: int) -> None:
    haystack = list(range(10, 30))
    text = hide(haystack, NEEDLE, 20, depth)
    assert len(text) == 20 and text[-5:] == [90, 91, 5, 6, 7]
    assert text[place:place + 5] == [90, 91, 5, 6, 7]
    assert [token for token in text[:-5] if token < 90 and token > 7] == haystack[:10]


def test_without_a_needle_there_is_more_haystack() -> None:
    assert hide(list(range(10, 30)), NEEDLE, 20, None) == [*range(10, 25), 90, 91, 5, 6, 7]


@pytest.mark.parametrize("reach, found", [(100, True), (10, False)])
def test_a_model_that_copies_finds_what_it_reaches(reach: int, found: bool) -> None:
    result = score(Copier(reach), hide(list(range(10, 60)), NEEDLE, 40, 0.0), 3, 100)
    assert result.found == found and (result.probability > 0.99) == found


def test_half_an_answer_is_not_found() -> None:
    text = hide(list(range(10, 60)), NEEDLE, 40, 0.0)
    text[4] = 8     # the needle ends with another token than the answer
    result = score(Copier(100), text, 3, 100)
    assert not result.found and 0 < result.probability < 0.01


def test_the_grid_has_each_length_without_a_needle_first() -> None:
    cells = list(grid(Copier(30), [(NEEDLE, list(range(10, 80)))] * 2, [20, 60], [0.0, 1.0], 100))
    assert [(cell.length, cell.depth, cell.found) for cell in cells] == [
        (20, None, 0), (20, 0.0, 1), (20, 1.0, 1), (60, None, 0), (60, 0.0, 0), (60, 1.0, 1)]
