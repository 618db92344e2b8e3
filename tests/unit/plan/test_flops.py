"""FLOPs counted by hand, product by product."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_sp.config.schema import Model
from megatron_sp.plan.flops import Repeats, SequenceFlops, repeats_of, sequence_flops
from megatron_sp.proof.data import batch
from megatron_sp.proof.reference import random_weights
from megatron_sp.proof.steps import step_in_layout
from tests.helpers.configs import STYLES, tiny_run
from tests.helpers.trace import fake_world

#: 8 query heads and 2 key/value heads of width 10 (not hidden / heads), SwiGLU.
LLAMA = Model(num_layers=3, hidden_size=64, num_attention_heads=8, num_query_groups=2, kv_channels=10,
              ffn_hidden_size=96, activation="swiglu", vocab_size=1000, padded_vocab_size=1024)


def weights(flops: SequenceFlops) -> float:
    """All products with weights."""
    return flops.projections + flops.mlp + flops.output


def test_every_matrix_product() -> None:
    s = 128
    per_layer = 2 * s * (64 * 80 + 64 * 20 + 64 * 20     # q, k, v
                         + 80 * 64                       # output projection
                         + 64 * 96 + 64 * 96 + 96 * 64)  # gate, up, down
    output = 2 * s * 64 * 1000                           # real rows only
    scores_and_values = 2 * (2 * s * s * 10) * 8         # two products a head
    flops = sequence_flops(LLAMA, s)
    assert flops.projections + flops.mlp + flops.output == 3 * per_layer + output
    assert flops.attention == 3 * scores_and_values
    assert flops.train(causal="full") == 3 * (3 * per_layer + output + 3 * scores_and_values)
    assert flops.train() == 3 * (3 * per_layer + output) + 3 * 3 * scores_and_values / 2
    # recomputation repeats the layers' forward, not the output layer's
    again = flops.train(repeats=Repeats(1, 1, 1)) - flops.train()
    assert again == 3 * per_layer + 3 * scores_and_values / 2


def test_without_a_gate_there_are_two_matrices() -> None:
    gelu = Model(num_layers=1, hidden_size=4, num_attention_heads=1, num_query_groups=1, kv_channels=4,
                 ffn_hidden_size=16, vocab_size=10)
    assert weights(sequence_flops(gelu, 1)) == 2 * (4 * 4 * 4 + 2 * 4 * 16 + 10 * 4)


def test_key_value_heads_count_however_few_they_are() -> None:
    """An integer division of groups makes their products vanish in some tools."""
    def model(groups: int) -> Model:
        return Model(num_layers=1, hidden_size=64, num_attention_heads=8, num_query_groups=groups, kv_channels=8,
                     ffn_hidden_size=96, activation="swiglu", vocab_size=1000)

    for groups in (1, 2, 4, 8):
        without = 2 * (64 * 64 + 64 * 64 + 3 * 64 * 96 + 1000 * 64)
        assert weights(sequence_flops(model(groups), 1)) - without == 2 * 2 * (64 * 8 * groups)
        assert sequence_flops(model(groups), 16).attention == 4 * 64 * 16**2     # does not depend on them


def test_the_width_of_the_feed_forward_layer_is_the_given_one() -> None:
    """4 h is assumed in some tools."""
    narrow, wide = (Model(num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=4, kv_channels=16,
                          ffn_hidden_size=f, activation="swiglu", vocab_size=10) for f in (100, 172))
    assert weights(sequence_flops(wide, 1)) - weights(sequence_flops(narrow, 1)) == 2 * 2 * 3 * 64 * 72


def test_the_count_knows_nothing_of_padding_and_layout() -> None:
    padded = Model(num_layers=3, hidden_size=64, num_attention_heads=8, num_query_groups=2, kv_channels=10,
                   ffn_hidden_size=96, activation="swiglu", vocab_size=1000, padded_vocab_size=4096)
    assert sequence_flops(padded, 128) == sequence_flops(LLAMA, 128)


#: Products with weights: plain ones, and those that add to a gradient.
WITH_WEIGHTS = ("aten.mm", "aten.addmm", "aten.addmm_")


def _flops_of_sum(_: object, x: tuple[int, ...], weight: tuple[int, ...], **further: object) -> int:
    """FLOPs of ``total.addmm_(x, weight)``, which torch's counter does not know."""
    return 2 * x[0] * x[1] * weight[1]


def products(flags: str, operators: Sequence[str] = WITH_WEIGHTS) -> float:
    """FLOPs of the products that a step really makes: with weights, or by ``aten.bmm`` of unfused attention."""
    run = tiny_run([*SIZES.split(), *flags.split()])
    with fake_world(1), FlopCounterMode(
            display=False, custom_mapping={torch.ops.aten.addmm_: _flops_of_sum}) as counter:
        step_in_layout(run, random_weights(run), *batch(run))
    return sum(count for name, count in counter.get_flop_counts()["Global"].items() if str(name) in operators)


FULL = "--recompute-granularity full"
SELECTIVE = "--recompute-granularity selective"
UNITS = "--recompute-num-layers 2"
CHUNKS = "--sequence-chunk-size 32"
TILES, GROUPS = "--mlp-tile-size 16", "--attention-head-groups 2"
SIZES = STYLES["eight_heads"].replace("--num-layers 2", "--num-layers 4") + " --make-vocab-size-divisible-by 1"


@pytest.mark.parametrize("flags", [
    "", FULL, SELECTIVE, f"{FULL} --recompute-method block --recompute-num-layers 1", f"{FULL} {UNITS}",
    TILES, GROUPS, f"{TILES} {GROUPS}", f"{FULL} {TILES}", f"{SELECTIVE} {TILES}", f"{FULL} {GROUPS}",
    f"{FULL} {TILES} {GROUPS}", f"{FULL} {TILES} {UNITS}", f"{FULL} {GROUPS} {UNITS}", CHUNKS, f"{FULL} {CHUNKS}",
    f"{SELECTIVE} {GROUPS} {CHUNKS}"])
def test_what_is_computed_again_is_counted(flags: str) -> None:
    run = tiny_run([*SIZES.split(), *flags.split()])
    flops, repeats = sequence_flops(run.model, run.data.seq_length), repeats_of(run)
    counted = 3 * flops.output + (3 + repeats.projections) * flops.projections + (3 + repeats.mlp) * flops.mlp
    assert products(flags) == pytest.approx(run.train.global_batch_size * counted, rel=1e-12)


@pytest.mark.parametrize("flags", [
    "", FULL, SELECTIVE, f"{SELECTIVE} --attention-core unfused", f"{SELECTIVE} {UNITS}", GROUPS,
    f"{FULL} {GROUPS}", f"{FULL} {UNITS}",
    f"{FULL} {GROUPS} {UNITS}", f"{FULL} --recompute-method block --recompute-num-layers 1"])
def test_attention_dropout_computes_scores_again(flags: str) -> None:
    """A block of queries is computed again in backward, also where the layer or the group has been already."""
    check_scores(f"{flags} --attention-dropout 0.1")


@pytest.mark.parametrize("flags", ["", FULL, SELECTIVE])
def test_attention_that_keeps_its_probabilities_is_recomputed_with_its_layer(flags: str) -> None:
    check_scores(f"{flags} --attention-core unfused")


def check_scores(flags: str) -> None:
    run = tiny_run([*SIZES.split(), *flags.split()])
    attention = sequence_flops(run.model, run.data.seq_length).attention  # one block: no score is left out
    assert products(flags, ["aten.bmm"]) == pytest.approx(
        run.train.global_batch_size * (3 + repeats_of(run).attention) * attention, rel=1e-12)
