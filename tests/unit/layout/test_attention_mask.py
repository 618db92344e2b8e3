"""A mask's pieces hold exactly the pairs that it allows, each once, for any queries and keys."""

import itertools

import pytest

from megatron_sp.layout.attention_mask import CAUSAL, DOCUMENTS, AttentionMask, Range

TOKENS = 9
MASKS = [CAUSAL, AttentionMask(((0,),)), AttentionMask(((0, 4),)), AttentionMask(((0, 1, 2, 7),)),
         AttentionMask(((0, 3), tuple(range(TOKENS))))]


def allowed(mask: AttentionMask, row: int, query: int, key: int) -> bool:
    """The rule, written from its words: the same document, and no later key."""
    starts = mask.documents[row] if mask.documents else (0,)
    return key <= query and not any(key < start <= query for start in starts)


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
        found += [(query, key) for query in range(*piece.queries) for key in range(*piece.keys)
                  if not piece.causal or key <= query]
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


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_the_first_key_is_the_first_that_a_query_sees(mask: AttentionMask) -> None:
    for row, query in itertools.product(range(max(1, len(mask.documents))), range(TOKENS)):
        assert mask.first_key(row, query) == min(key for key in range(TOKENS) if allowed(mask, row, query, key))
