"""``--sequence-split N``: the sizes it chooses, and what it says about them."""

from __future__ import annotations

import itertools

import pytest

from megatron_sp.config.load import load_run
from megatron_sp.errors import ConfigError
from megatron_sp.layout.sequence_split import split_sequence
from tests.helpers.configs import TRAINING

MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --num-key-value-heads 4".split()


@pytest.mark.parametrize(("size", "heads", "kv_heads", "tp", "devices", "ulysses", "reason"), [
    (8, 32, 32, 1, 8, 8, "whole heads inside one node"),
    (8, 32, 8, 1, 8, 8, "whole heads inside one node"),
    (16, 32, 32, 1, 8, 8, "only 8 fit into a node of 8"),
    (16, 32, 32, 2, 8, 4, "only 4 fit into a node of 8"),
    (16, 32, 32, 1, 16, 16, "whole heads"),
    (16, 8, 8, 1, 16, 8, "it must divide the 8 query heads"),     # a degree above the head count
    (8, 32, 4, 1, 8, 4, "copy the 4 key/value heads"),
    (8, 32, 1, 1, 8, 1, "copy the 1 key/value heads"),
    (8, 12, 12, 1, 8, 4, "divide the 12 query heads"),
    (6, 12, 12, 1, 8, 6, "whole heads"),
    (4, 32, 8, 8, 8, 1, "only 1 fit"),
    (1, 32, 8, 1, 8, 1, "whole heads"),
])
def test_choice(size: int, heads: int, kv_heads: int, tp: int, devices: int, ulysses: int, reason: str) -> None:
    split = split_sequence(size, heads=heads, kv_heads=kv_heads, tp=tp, devices_per_node=devices)
    assert (split.ulysses, split.ring) == (ulysses, size // ulysses)
    assert reason in split.why


def test_always_possible() -> None:
    for size, heads, tp, devices in itertools.product(range(1, 33), (1, 5, 12, 32, 40), (1, 2, 5), (1, 4, 8)):
        if heads % tp == 0:
            split = split_sequence(size, heads=heads, kv_heads=heads, tp=tp, devices_per_node=devices)
            assert split.ulysses * split.ring == size
            assert heads // tp % split.ulysses == 0 and split.ulysses * tp <= max(devices, tp)


def test_flag_chooses_and_says_why() -> None:
    run, notes = load_run([*TRAINING, *MODEL, "--sequence-split", "8", "--devices-per-node", "4"], 8)
    assert (run.parallel.ulysses, run.parallel.ring, run.parallel.dp) == (4, 2, 1)
    assert any("--ulysses-size 4, --ring-size 2" in note and "a node of 4" in note for note in notes)


def test_the_launcher_knows_the_node_and_the_command_line_knows_better() -> None:
    words = [*TRAINING, *MODEL, "--sequence-split", "4"]
    assert load_run(words, 4, devices_per_node=2)[0].parallel.ulysses == 2
    assert load_run([*words, "--devices-per-node", "4"], 4, devices_per_node=2)[0].parallel.ulysses == 4
    assert load_run(words, 4)[0].parallel.ulysses == 4


def test_two_answers_are_refused() -> None:
    with pytest.raises(ConfigError, match="leave out the one or the others"):
        load_run([*TRAINING, *MODEL, "--sequence-split", "8", "--ulysses-size", "2"], 8)


def test_a_chosen_ring_refuses_attention_dropout() -> None:
    with pytest.raises(ConfigError, match="--attention-dropout 0.1 is not possible with --ring-size 2"):
        load_run([*TRAINING, *MODEL, "--sequence-split", "8", "--attention-dropout", "0.1"], 8)
