"""FLOPs counted by hand, product by product."""

from __future__ import annotations

from megatron_sp.config.schema import Model
from megatron_sp.model.flops import sequence_flops

#: 8 query heads and 2 key/value heads of width 10 (not hidden / heads), SwiGLU.
LLAMA = Model(num_layers=3, hidden_size=64, num_attention_heads=8, num_query_groups=2, kv_channels=10,
              ffn_hidden_size=96, activation="swiglu", vocab_size=1000, padded_vocab_size=1024)


def test_every_matrix_product() -> None:
    s = 128
    per_layer = 2 * s * (64 * 80 + 64 * 20 + 64 * 20     # q, k, v
                         + 80 * 64                       # output projection
                         + 64 * 96 + 64 * 96 + 96 * 64)  # gate, up, down
    output = 2 * s * 64 * 1000                           # real rows only
    scores_and_values = 2 * (2 * s * s * 10) * 8         # two products a head
    flops = sequence_flops(LLAMA, s)
    assert flops.linear == 3 * per_layer + output
    assert flops.attention == 3 * scores_and_values
    assert flops.train(causal="full") == 3 * (3 * per_layer + output + 3 * scores_and_values)
    assert flops.train() == 3 * (3 * per_layer + output) + 3 * 3 * scores_and_values / 2
    # recomputation repeats the layers' forward, not the output layer's
    assert flops.train(recompute=True) - flops.train() == 3 * per_layer + 3 * scores_and_values / 2


def test_without_a_gate_there_are_two_matrices() -> None:
    gelu = Model(num_layers=1, hidden_size=4, num_attention_heads=1, num_query_groups=1, kv_channels=4,
                 ffn_hidden_size=16, vocab_size=10)
    assert sequence_flops(gelu, 1).linear == 2 * (4 * 4 * 4 + 2 * 4 * 16 + 10 * 4)


def test_key_value_heads_count_however_few_they_are() -> None:
    """An integer division of groups makes their products vanish in some tools."""
    def model(groups: int) -> Model:
        return Model(num_layers=1, hidden_size=64, num_attention_heads=8, num_query_groups=groups, kv_channels=8,
                     ffn_hidden_size=96, activation="swiglu", vocab_size=1000)

    for groups in (1, 2, 4, 8):
        without = 2 * (64 * 64 + 64 * 64 + 3 * 64 * 96 + 1000 * 64)
        assert sequence_flops(model(groups), 1).linear - without == 2 * 2 * (64 * 8 * groups)
        assert sequence_flops(model(groups), 16).attention == 4 * 64 * 16**2     # does not depend on them


def test_the_width_of_the_feed_forward_layer_is_the_given_one() -> None:
    """4 h is assumed in some tools."""
    narrow, wide = (Model(num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=4, kv_channels=16,
                          ffn_hidden_size=f, activation="swiglu", vocab_size=10) for f in (100, 172))
    assert sequence_flops(wide, 1).linear - sequence_flops(narrow, 1).linear == 2 * 2 * 3 * 64 * 72


def test_the_count_knows_nothing_of_padding_and_layout() -> None:
    padded = Model(num_layers=3, hidden_size=64, num_attention_heads=8, num_query_groups=2, kv_channels=10,
                   ffn_hidden_size=96, activation="swiglu", vocab_size=1000, padded_vocab_size=4096)
    assert sequence_flops(padded, 128) == sequence_flops(LLAMA, 128)
