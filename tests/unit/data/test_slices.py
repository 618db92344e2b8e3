"""A rank reads the tokens that it owns, and the label after each of its ranges: counted in bytes read from the file."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from megatron_sp.data.batch import BatchReader
from megatron_sp.data.blend import BlendedDataset, blend_order
from megatron_sp.data.gpt_dataset import Dataset, GPTDataset
from megatron_sp.layout.tokens import SequenceLayout
from tests.unit.data.test_indexed import write

LENGTH, SAMPLES = 48, 12


@pytest.fixture(params=["short", "long", "blend"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> Dataset:
    """Samples that span many documents, samples inside one document, and a blend of both."""
    random = np.random.RandomState(0)

    def samples(name: str, most: int) -> GPTDataset:
        documents = [random.randint(0, 1000, random.randint(0, most)).tolist() for _ in range(3000 // most)]
        indexed = write(tmp_path / name, documents)
        return GPTDataset(indexed, np.arange(len(indexed)), SAMPLES, LENGTH, 1)

    if request.param != "blend":
        return samples("x", 9 if request.param == "short" else 900)
    return BlendedDataset([samples("short", 9), samples("long", 900)], *blend_order([0.5, 0.5], SAMPLES))


@pytest.mark.parametrize("layout", [
    SequenceLayout(LENGTH), SequenceLayout(LENGTH, ulysses=3), SequenceLayout(LENGTH, ring=2, kind="zigzag"),
    SequenceLayout(LENGTH, ring=3, ulysses=2, kind="zigzag"), SequenceLayout(LENGTH, ring=4, kind="contiguous"),
], ids=["whole", "ulysses 3", "ring 2", "ring 3 x ulysses 2", "contiguous ring 4"])
def test_bytes_touched(dataset: Dataset, layout: SequenceLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = np.stack([dataset.window(sample, 0, LENGTH + 1) for sample in range(SAMPLES)])
    touched = 0
    pread = os.pread

    def counting(file: int, count: int, position: int) -> bytes:
        nonlocal touched
        piece = pread(file, count, position)
        touched += len(piece)
        return piece

    monkeypatch.setattr(os, "pread", counting)
    for rank in range(layout.sp):
        touched = 0
        with BatchReader(dataset, layout, rank, 0, 1) as reader:
            batches = reader.read(0, SAMPLES, 4)
        places = layout.positions(rank)
        assert np.array_equal(np.concatenate([batch.tokens for batch in batches]), whole[:, places])
        assert np.array_equal(np.concatenate([batch.labels for batch in batches]), whole[:, places + 1])
        ranges = layout.ranges(rank)
        assert touched == SAMPLES * 2 * sum(stop - start + 1 for start, stop in ranges)  # 2 bytes a token
        assert len(places) == LENGTH // layout.sp
