"""With dropout on, a step that recomputes activations gives the gradients of the step that keeps them."""

from __future__ import annotations

import pytest
import torch

from megatron_sp.errors import ConfigError
from megatron_sp.proof.data import batch
from megatron_sp.proof.reference import random_weights
from megatron_sp.proof.steps import step_in_layout
from tests.helpers.configs import STYLES, tiny_run
from tests.helpers.spawn import run_ranks

DROPOUT = "--attention-dropout 0.2 --hidden-dropout 0.2"
LAYOUTS = {
    "tp 2": (2, "--tensor-model-parallel-size 2"),
    "tp 2, megatron sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "ulysses 2": (2, "--ulysses-size 2"),
    "ulysses 2, overlapped": (2, "--ulysses-size 2 --ulysses-overlap-groups 2"),
    "ulysses 2, zero 3": (2, "--ulysses-size 2 --zero-stage 3"),
    "pp 2": (2, "--pipeline-model-parallel-size 2"),
    "pp 2, interleaved, tp 2": (4, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
                                   "--tensor-model-parallel-size 2"),
    "ring 2, hidden dropout": (2, "--ring-size 2 --attention-dropout 0"),
}


def gradients(flags: str) -> dict[str, torch.Tensor]:
    run = tiny_run(flags.split(), torch.distributed.get_world_size())
    step = step_in_layout(run, random_weights(run), *batch(run))
    return step.gradients | {"loss": torch.tensor(step.loss)}


@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_recompute_replays_the_masks(layout: str, style: str) -> None:
    world, words = LAYOUTS[layout]
    flags = f"{STYLES[style]} --num-layers 4 {DROPOUT} {words}"
    kept = run_ranks(gradients, world, flags)[0]
    replayed = run_ranks(gradients, world, f"{flags} --recompute-granularity full")[0]
    without = run_ranks(gradients, world, f"{flags} --attention-dropout 0 --hidden-dropout 0")[0]
    assert kept.keys() == replayed.keys()
    for name, gradient in kept.items():
        torch.testing.assert_close(replayed[name], gradient, rtol=1e-9, atol=1e-12, msg=name)
    assert abs(float(kept["loss"] - without["loss"])) > 1e-4       # dropout was really on


@pytest.mark.parametrize("layout", ["ulysses 2", "ulysses 2, overlapped", "tp 2", "pp 2"])
def test_attention_masks_are_those_of_one_process(layout: str) -> None:
    """Hidden dropout is off here, because its masks differ between token shards and so between layouts."""
    flags = f"{STYLES['llama']} --num-layers 4 --attention-dropout 0.2 --hidden-dropout 0"
    expected = run_ranks(gradients, 1, flags)[0]
    world, words = LAYOUTS[layout]
    for name, gradient in run_ranks(gradients, world, f"{flags} {words}")[0].items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12, msg=name)


def test_ring_refuses_attention_dropout() -> None:
    with pytest.raises(ConfigError, match="--attention-dropout 0.2 is not possible with --ring-size 2"):
        tiny_run(f"{STYLES['llama']} {DROPOUT} --ring-size 2".split(), 2)
