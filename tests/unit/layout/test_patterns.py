"""Patterns of blocks: which pairs they allow, counted and cut into pieces, against rules for single pairs."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from megatron_sp.config.schema import Model
from megatron_sp.errors import ConfigError
from megatron_sp.layout.masks.attention_mask import CAUSAL, AttentionMask, Range
from megatron_sp.layout.patterns.blocks import BigBird, BlockPattern, Fixed, Longformer, Strided, pairs_in_pattern
from megatron_sp.layout.patterns.choice import layer_patterns
from megatron_sp.layout.patterns.own import own_pattern, problems_of
from megatron_sp.layout.patterns.pieces import pattern_pieces
from megatron_sp.proof.reference_masks import visible_keys

HEADS, TOKENS, BLOCK = 6, 43, 3
SHAPES = [
    dict(attention_pattern="fixed", attention_local_blocks=4, attention_global_blocks=1),
    dict(attention_pattern="fixed", attention_local_blocks=5, attention_global_blocks=2, attention_blocks_by_head=True),
    dict(attention_pattern="fixed", attention_local_blocks=1, attention_global_blocks=0),
    dict(attention_pattern="longformer", attention_local_blocks=2, attention_global_blocks=3),
    dict(attention_pattern="longformer", attention_local_blocks=1, attention_global_blocks=0),
    dict(attention_pattern="bigbird", attention_local_blocks=2, attention_global_blocks=1, attention_random_blocks=3),
    dict(attention_pattern="bigbird", attention_local_blocks=3, attention_blocks_by_head=True,
         attention_pattern_seed=7),
    dict(attention_pattern="strided", attention_local_blocks=2, attention_stride=5),
    dict(attention_pattern="strided", attention_local_blocks=3, attention_blocks_by_head=True)]


def model(shape: dict[str, object]) -> Model:
    return Model(num_layers=1, num_attention_heads=HEADS, attention_block_size=BLOCK, **shape)  # type: ignore[arg-type]


def pattern(shape: dict[str, object]) -> BlockPattern:
    found = layer_patterns(model(shape))[0]
    assert found is not None
    return found


def allowed(shape: dict[str, object]) -> list[list[list[bool]]]:
    """The rule from its definition, and causal: for each head, query and key."""
    visible = visible_keys(model(shape), 0, TOKENS)
    assert visible is not None
    return visible.tril().tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_follow_the_definition(shape: dict[str, object]) -> None:
    """In every head, in every block; heads of one kind see the same, and counts are those of the lists."""
    seen, ours = allowed(shape), pattern(shape)
    for head, block in itertools.product(range(HEADS), range(-(-TOKENS // BLOCK))):
        earlier = ours.earlier(head, block)
        row = seen[head][block * BLOCK]
        assert earlier == [number for number in range(block) if row[number * BLOCK]]
        assert earlier == ours.earlier(ours.kind(head), block)
        for first in range(block + 2):
            assert ours.count(head, block, first) == sum(number >= first for number in earlier), (block, first)
    differ = len({tuple(map(tuple, head)) for head in seen}) > 1
    assert differ == ours.by_head


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pairs_are_counted_in_documents(shape: dict[str, object]) -> None:
    seen, ours = allowed(shape), pattern(shape)
    for start, stop in ((0, TOKENS), (0, 1), (4, 11), (5, 6), (3, 40), (7, 43)):
        pairs = sum(seen[head][query][key] for head in range(HEADS) for query in range(start, stop)
                    for key in range(start, query + 1))
        assert pairs_in_pattern(ours, range(HEADS), start, stop) == pytest.approx(pairs / HEADS)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("starts", [(), (0, 4, 5, 20)], ids=str)
def test_pieces_are_the_allowed_pairs_each_once(shape: dict[str, object], starts: tuple[int, ...]) -> None:
    mask = CAUSAL.within(0, pattern(shape))
    mask = AttentionMask((starts,) if starts else (), pattern=mask.pattern)
    seen = allowed(shape)
    chunk = (16, 32)
    for head in (0, 1, HEADS - 1):
        for queries, keys in (((0, TOKENS),) * 2, (chunk, chunk), (chunk, (0, 16)), (chunk, (8, 16)),
                              ((40, 43), (3, 40))):
            assert pairs(mask, head, queries, keys) == sorted(
                (query, key) for query in range(*queries) for key in range(*keys)
                if key <= query and seen[head][query][key] and not any(key < start <= query for start in starts))


def pairs(mask: AttentionMask, head: int, queries: Range, keys: Range) -> list[tuple[int, int]]:
    found = []
    for piece in pattern_pieces(mask, 0, head, queries, keys):
        places = [key for low, high in piece.keys for key in range(low, high)]
        assert len(places) == piece.num_keys and (not piece.causal or piece.keys == (piece.queries,))
        found += [(query, key) for query in range(*piece.queries) for key in places if not piece.causal or key <= query]
        if not piece.causal:
            parts = [(number, key) for number, part in piece.by_chunk(8) for low, high in part.keys
                     for key in range(low, high)]
            assert parts == [(key // 8, key) for key in places]
    return sorted(found)


def test_random_blocks_do_not_depend_on_the_length_and_differ() -> None:
    ours, other = BigBird(16, True, 1, 0, 2, seed=0), BigBird(16, True, 1, 0, 2, seed=1)
    assert ours.earlier(0, 50) != ours.earlier(1, 50) != other.earlier(1, 50)
    drawn = [number for block in range(200, 260) for number in ours.earlier(3, block)]
    assert len(drawn) == 120 and min(drawn) < 40 and max(drawn) > 160
    assert BigBird(16).earlier(0, 9) == [0, 1, 6, 7, 8]  # a fixed value: checkpoints rely on it


def test_work_grows_as_the_patterns_say() -> None:
    """Longformer and bigbird see a bounded number of blocks, fixed a quarter of the earlier ones at 4 and 1."""
    for ours, most in ((Longformer(16), 5), (BigBird(16), 6)):
        assert ours.count(0, 10_000) + 1 == most
    assert Fixed(16).count(0, 10_000) == 2500 and Strided(16, stride=10).count(0, 10_000) == 3 + 1000


def test_a_function_of_the_users(tmp_path: Path) -> None:
    path, flag = tmp_path / "own.py", "--attention-pattern"
    path.write_text("def same(block):\n    return [block, 0, block // 2, 0]\n"
                    "def differs(head, block):\n    return {head} if head < block else ()\n"
                    "def late(block):\n    return [block + 1]\ndef wrong(block):\n    return ['x']\n"
                    "import random\ndef unsteady(block):\n    return random.sample(range(block + 1), 1)\n"
                    "def three(a, b, c):\n    return []\ndef none(block):\n    return None\n"
                    "def half(block):\n    return [block / 2]\ndef endless(block):\n    while True:\n        yield 0\n"
                    "def leave(block):\n    raise SystemExit\ndef fails(block):\n    raise KeyError('a\\nb')\n"
                    "def several(block):\n    yield from {0.0, block}\n")
    assert own_pattern(flag, f"{path}:same", 8).earlier(3, 9) == [0, 4]
    ours = own_pattern(flag, f"{path}:differs", 8)
    assert ours.by_head and ours.earlier(2, 9) == [2] and ours.earlier(9, 9) == [] and problems_of(ours, 4, 20) == []
    assert own_pattern(flag, f"{path}:same", 8) == own_pattern(flag, f"{path}:same", 8)
    for name, said in (("late", "returns 1; blocks that a query may see have the whole numbers 0 to 0"),
                       ("wrong", "returns 'x'; blocks"), ("unsteady", "returns other blocks"),
                       ("none", "returns None; it must return a list"),
                       ("half", "for block 1 returns 0.5; blocks"), ("endless", "returns more than 1,000,000 numbers"),
                       ("leave", f"SystemExit ({path}, line "), ("fails", r"KeyError: 'a\nb'")):
        (problem,) = problems_of(own_pattern(flag, f"{path}:{name}", 8), 2, 50)
        assert said in problem and "--attention-pattern" in problem
    assert own_pattern(flag, f"{path}:several", 8).earlier(0, 9) == [0]
    for name, said in (("three", "must take the number of a block"), ("nothing", "has no function nothing")):
        with pytest.raises(ConfigError, match=said):
            own_pattern(flag, f"{path}:{name}", 8)
    random.seed()
