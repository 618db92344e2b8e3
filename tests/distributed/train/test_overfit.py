"""Training learns: after 250 steps the model predicts one batch of real text, in one process and in split layouts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_sp.data.token_files.token_writer import IndexedDatasetBuilder
from megatron_sp.train.report.metrics_file import read_metrics
from tests.helpers.configs import STYLES
from tests.helpers.spawn import RunRanks
from tests.helpers.training import train

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("world, layout", [
    (1, ""), pytest.param(2, "--ulysses-size 2 --zero-stage 3", marks=pytest.mark.slow)])
def test_one_batch_of_real_text_is_learnt_by_heart(tmp_path: Path, ranks: RunRanks, world: int, layout: str) -> None:
    text = (ROOT / "LICENSE").read_text().split()
    tokens = np.frombuffer(" ".join(text)[:129].encode("ascii"), dtype=np.uint8).astype(np.uint16)  # two samples of 64
    with IndexedDatasetBuilder(str(tmp_path / "text"), np.uint16) as builder:
        builder.add_document(tokens, [len(tokens)])
        builder.finalize()
    flags = (f"{STYLES['llama']} {layout} --data-path {tmp_path / 'text'} --split 100,0,0 --vocab-size 128 --lr 1e-2 "
             f"--train-iters 250 --global-batch-size 2 --micro-batch-size 2 --save {tmp_path} --save-interval 1000")
    assert not any(ranks(train_on_data, world, flags))
    losses = [row["lm_loss"] for row in read_metrics(tmp_path / "metrics.jsonl") if "lm_loss" in row]
    assert losses[0] > 4 and losses[-1] < 0.1


def train_on_data(flags: str) -> str:
    """Train as ``train`` does, on data files instead of the mock data that tiny runs use."""
    from tests.helpers import training

    training.TRAINING = [word for word in training.TRAINING if word != "--mock-data"]
    return train(flags)
