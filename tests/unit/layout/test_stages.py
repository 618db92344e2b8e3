"""Every layer lives in exactly one pipeline stage, and stages are balanced."""

from __future__ import annotations

import pytest

from megatron_sp.config.schema import Model, Parallel
from megatron_sp.layout.schedules import stages_of_rank
from megatron_sp.layout.stages import split_layers, stage_layers


@pytest.mark.parametrize("layers", range(1, 20))
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_no_layer_is_dropped(layers: int, stages: int) -> None:
    if stages > layers:
        return
    split = split_layers(layers, stages, last_cost=1.5)
    assert [layer for stage in split for layer in stage] == list(range(layers))
    assert all(len(stage) for stage in split)


def test_the_loss_counts_as_work_when_layers_do_not_divide() -> None:
    model = Model(num_layers=5, hidden_size=64, num_attention_heads=4, num_query_groups=4, kv_channels=16,
                  ffn_hidden_size=256, vocab_size=2000)
    assert [len(stage) for stage in stage_layers(model, Parallel(pp=2, stages_per_rank=1))] == [4, 1]


def test_layers_that_divide_are_split_evenly_and_a_given_split_is_obeyed() -> None:
    model = Model(num_layers=8, hidden_size=64, num_attention_heads=4, vocab_size=10**6)
    assert [len(stage) for stage in stage_layers(model, Parallel(pp=2, stages_per_rank=2))] == [2, 2, 2, 2]
    given = Parallel(pp=2, stages_per_rank=1, pipeline_layers=(3, 5))
    assert stage_layers(model, given) == [range(0, 3), range(3, 8)]


@pytest.mark.parametrize("schedule,per_rank", [("1f1b", 1), ("interleaved", 3), ("zbv", 2), ("dualpipev", 2)])
def test_every_stage_has_one_rank(schedule: str, per_rank: int) -> None:
    held = sorted(stage for rank in range(4) for stage in stages_of_rank(schedule, 4, per_rank, rank))
    assert held == list(range(4 * per_rank))
