"""Half precision against fp32: losses of real text stay together, and many small gradients are summed in fp32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from megatron_sp.data.token_files.token_writer import IndexedDatasetBuilder
from megatron_sp.proof.data import batch
from megatron_sp.proof.reference import Weights, random_weights
from megatron_sp.proof.steps import step_in_layout
from tests.distributed.train.test_overfit import ROOT, train_on_data
from tests.helpers.configs import STYLES, tiny_run
from tests.helpers.spawn import run_ranks
from tests.helpers.training import steps


def losses(directory: Path, precision: str) -> np.ndarray:
    """Return the loss of each step of a run on the text in this directory."""
    save = directory / (precision.strip("-").partition(" ")[0] or "fp32")
    flags = (f"{STYLES['llama']} --data-path {directory / 'text'} --split 100,0,0 --vocab-size 256 --lr 2e-3 "
             f"--lr-decay-style constant --micro-batch-size 4 --train-iters 20 --save {save} --save-interval 99 "
             f"{precision}")
    assert run_ranks(train_on_data, 1, flags) == [""]
    return np.array(steps(save, "lm_loss"))[:, 0]


def test_losses_of_real_text_follow_fp32(tmp_path: Path) -> None:
    """The tolerance is tight: computing the loss or softmax in half precision would give ten times the difference."""
    text = np.frombuffer((ROOT / "LICENSE").read_bytes(), dtype=np.uint8).astype(np.uint16)
    with IndexedDatasetBuilder(str(tmp_path / "text"), np.uint16) as builder:
        builder.add_document(text, [len(text)])
        builder.finalize()
    exact, bf16, fp16 = (losses(tmp_path, flags) for flags in ("", "--bf16", "--fp16 --initial-loss-scale 1024"))
    assert len(exact) == 20 and exact[-1] < exact[0] - 1
    assert 1e-5 < np.abs(bf16 - exact).mean() < 1e-3
    assert 1e-6 < np.abs(fp16 - exact).mean() < 2e-4


def gradients(layout: str) -> list[Weights]:
    """Return this rank's gradients of a batch of 128 microbatches in fp32, in bf16, and in bf16 with sums in bf16."""
    found = []
    for precision in ("", "--bf16", "--bf16 --grad-reduce-in-bf16"):
        run = tiny_run(f"{STYLES['llama']} --num-layers 1 --seq-length 8 --global-batch-size 128 {layout} {precision}"
                       .split(), dist.get_world_size())
        weights = {name: weight.float() for name, weight in random_weights(run).items()}
        found.append(step_in_layout(run, weights, *batch(run)).gradients)
    return found


def mean_error(gradients: Weights, exact: Weights) -> float:
    return float(np.mean([float((gradients[name] - exact[name]).norm() / exact[name].norm()) for name in exact]))


@pytest.mark.parametrize("world, layout", [(1, ""), (2, "--ulysses-size 2 --zero-stage 1")])
def test_many_microbatches_are_summed_in_fp32_unless_told_otherwise(world: int, layout: str) -> None:
    """With sums in fp32, only the rounding of single microbatches remains. Sums in bf16 add rounding of their own."""
    exact, wide, narrow = run_ranks(gradients, world, layout)[0]
    errors = mean_error(wide, exact), mean_error(narrow, exact)
    assert 0.001 < errors[0] < 0.8 * errors[1], errors
