"""A mask's pieces hold exactly the pairs that it allows, each once, for any queries and keys."""

import itertools

import pytest

from megatron_sp.layout.masks.attention_mask import CAUSAL, DOCUMENTS, WINDOW, AttentionMask, Range
from megatron_sp.layout.masks.windows import attended_area
from megatron_sp.layout.patterns.choice import LayerAttention

TOKENS = 9
MASKS = [CAUSAL, AttentionMask(((0,),)), AttentionMask(((0, 4),)), AttentionMask(((0, 1, 2, 7),)),
         AttentionMask(((0, 3), tuple(range(TOKENS)))), *[CAUSAL.within(window) for window in range(1, TOKENS + 2)],
         AttentionMask(((0, 5), (0, 1, 7)), window=3)]


def allowed(mask: AttentionMask, row: int, query: int, key: int) -> bool:
    """The rule, written from its words: the same document, no later key, and none of the window's length ago."""
    starts = mask.documents[row] if mask.documents else (0,)
    near = not mask.window or query - key < mask.window
    return near and key <= query and not any(key < start <= query for start in starts)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_pieces_are_the_allowed_pairs_each_once(mask: AttentionMask) -> None:
    ranges = [(start, stop) for start, stop in itertools.combinations(range(TOKENS + 1), 2)]
    for row, queries, keys in itertools.product(range(max(1, len(mask.documents))), ranges, ranges):
        assert pairs(mask, row, queries, keys) == sorted(
            (query, key) for query in range(*queries) for key in range(*keys) if allowed(mask, row, query, key))


def pairs(mask: AttentionMask, row: int, queries: Range, keys: Range) -> list[tuple[int, int]]:
    """Return the pairs of query and key in all pieces; a causal piece must be a square of the same tokens."""
    found = []
    for piece in mask.pieces(row, queries, keys):
        assert not piece.causal or piece.queries == piece.keys
        (first, last), (low, high) = piece.queries, piece.keys
        assert not piece.mirrored or (last - first == high - low and not piece.causal)
        found += [(query, key) for query in range(first, last) for key in range(low, high)
                  if (not piece.causal or key <= query) and (not piece.mirrored or key - low >= query - first)]
    return sorted(found)


def test_whole_sequences_give_one_causal_piece_for_each_document() -> None:
    mask = AttentionMask(((0, 4, 6),))
    assert [(piece.queries, piece.causal) for piece in mask.pieces(0, (0, 8), (0, 8))] == [
        ((0, 4), True), ((4, 6), True), ((6, 8), True)]


def test_work_is_the_sum_of_squared_lengths() -> None:
    assert CAUSAL.attention_share(3, 10) == AttentionMask(((0,), (0,))).attention_share(2, 10) == 1.0
    assert AttentionMask(((0, 3, 4), (0,))).attention_share(2, 10) == (9 + 1 + 36 + 100) / 200


def test_a_mask_says_what_it_needs() -> None:
    assert CAUSAL.needs == AttentionMask(((0,), (0,))).needs == frozenset()
    assert AttentionMask(((0,), (0, 3))).needs == {DOCUMENTS}
    assert AttentionMask(((0,), (0, 3)), window=2).needs == {DOCUMENTS, WINDOW} and CAUSAL.within(0) is CAUSAL


def test_a_whole_sequence_has_two_pieces_for_each_window() -> None:
    pieces = CAUSAL.within(10).pieces(0, (0, 1000), (0, 1000))
    assert len(pieces) == 2 * 100 - 1 and {piece.causal or piece.mirrored for piece in pieces} == {True}


def test_work_in_a_window_is_its_band() -> None:
    for tokens, window in ((9, 3), (9, 9), (9, 20), (9, 1)):
        pairs = sum(min(query + 1, window) for query in range(tokens))
        assert attended_area(tokens, window) == 2 * pairs - min(tokens, window)
    inside = AttentionMask(((0, 4),))
    areas = 2 * (16 + 25) + attended_area(4, 3) + attended_area(5, 3)
    assert inside.attention_share(1, 9, tuple(map(LayerAttention, (0, 3, 0)))) == areas / (2 * 81 + attended_area(9, 3))


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_the_first_key_is_the_first_that_a_query_sees(mask: AttentionMask) -> None:
    for row, query in itertools.product(range(max(1, len(mask.documents))), range(TOKENS)):
        assert mask.first_key(row, query) == min(key for key in range(TOKENS) if allowed(mask, row, query, key))
