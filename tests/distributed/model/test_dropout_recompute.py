"""With dropout on, a step that recomputes activations gives the gradients of the plain model, in every layout."""

from __future__ import annotations

import pytest

from megatron_sp.errors import ConfigError
from tests.helpers.configs import STYLES, Case, tiny_run
from tests.parity.against_one_process import check_gradients

#: Two different probabilities, so that the test notices when one is used in the place of the other.
DROPOUT = "--hidden-dropout 0.2 --attention-dropout 0.3"
FULL = "--recompute-granularity full"
LAYOUTS = {
    2: {
        "tp 2": "--tensor-model-parallel-size 2",
        "tp 2, megatron sp, head groups": "--tensor-model-parallel-size 2 --sequence-parallel "
                                          "--attention-head-groups 2",
        "ulysses 2, units of 2": "--ulysses-size 2 --recompute-num-layers 2",
        "ulysses 2, overlapped": "--ulysses-size 2 --ulysses-overlap-groups 2 --no-shared-memory",
        "ulysses 2, zero 3": "--ulysses-size 2 --zero-stage 3",
        "pp 2, documents": "--pipeline-model-parallel-size 2 --reset-position-ids --reset-attention-mask",
        "ring 2, hidden dropout": "--ring-size 2 --attention-dropout 0 --reset-position-ids",
    },
    4: {
        "pp 2, interleaved, tp 2": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
                                   "--tensor-model-parallel-size 2",
        "ring 2, ulysses 2, hidden dropout": "--ring-size 2 --ulysses-size 2 --attention-dropout 0",
    },
}


@pytest.mark.parametrize("world", LAYOUTS)
def test_recompute_replays_the_masks_of_the_plain_model(world: int) -> None:
    check_gradients(world, [Case(name, world, f"{FULL} {flags}", ("eight_heads", "gpt2")[number % 2],
                                 f"--num-layers 4 {DROPOUT}", "ragged")
                            for number, (name, flags) in enumerate(LAYOUTS[world].items(), start=world // 4)])


def test_ring_refuses_attention_dropout() -> None:
    with pytest.raises(ConfigError, match="--attention-dropout 0.3 is not possible with --ring-size 2"):
        tiny_run(f"{STYLES['llama']} {DROPOUT} --ring-size 2".split(), 2)
