"""Microbatches: every label is there once, each rank reads its own tokens, ids and positions are global."""

import numpy as np
import pytest
import torch

from megatron_sp.config.schema import Data
from megatron_sp.data.batch import BatchReader
from megatron_sp.data.build import CyclicDataset, build_datasets
from megatron_sp.data.gpt_dataset import GPTDataset
from megatron_sp.data.mock import MockDataset
from megatron_sp.data.sampler import GlobalBatchSampler
from megatron_sp.data.token_files.indexed_dataset import IndexedDataset
from megatron_sp.errors import DataError
from megatron_sp.layout.tokens import SequenceLayout
from tests.unit.data.test_indexed import SET_A, write
from tests.unit.data.test_order import stored

LAYOUTS = [SequenceLayout(48), SequenceLayout(48, ulysses=4), SequenceLayout(48, ring=2, ulysses=2),
           SequenceLayout(48, ring=3, ulysses=2, kind="zigzag"), SequenceLayout(48, ring=4, kind="zigzag")]


class Ramp:
    """Sample k is k*1000, k*1000 + 1, ...; remembers which tokens were read."""

    seq_length = 48

    def __init__(self, count: int = 64):
        self.count, self.touched = count, 0

    def __len__(self) -> int:
        return self.count

    def window(self, sample: int, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= self.seq_length + 1
        self.touched += stop - start
        return np.arange(start, stop) + 1000 * sample

    def document_starts(self, sample: int) -> np.ndarray:
        return np.array([0, 5, 24, 30]) if sample % 2 else np.array([0])

    def source(self, sample: int) -> str:
        return "ramp.bin"

    def describe(self) -> str:
        return "ramp"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_token_predicts_the_next_one_exactly_once(layout):
    seen: list[tuple[int, int]] = []
    for sp_rank in range(layout.sp):
        dataset = Ramp()
        [batch] = BatchReader(dataset, layout, sp_rank, 0, 1).read(0, 2, 2)
        assert batch.tokens.shape == batch.labels.shape == batch.positions.shape == (2, 48 // layout.sp)
        assert torch.equal(batch.labels, batch.tokens + 1)
        assert torch.equal(batch.tokens, batch.positions + torch.tensor([[0], [1000]]))
        assert batch.num_valid == batch.labels.numel() and batch.sample_ids.tolist() == [0, 1]
        assert dataset.touched == 2 * (layout.local_length + len(layout.ranges(sp_rank)))
        seen += zip(batch.tokens[0].tolist(), batch.labels[0].tolist())
    assert sorted(seen) == [(place, place + 1) for place in range(48)]


def test_order_over_microbatches_and_data_parallel_ranks():
    assert GlobalBatchSampler.microbatches(100, 12, 2, 0, 3) == [[100, 101], [106, 107]]
    assert GlobalBatchSampler.microbatches(100, 12, 2, 2, 3) == [[104, 105], [110, 111]]
    with pytest.raises(ValueError):
        GlobalBatchSampler.microbatches(0, 10, 2, 0, 3)
    ids: list[int] = []
    for dp_rank in range(3):
        for batch in BatchReader(Ramp(), LAYOUTS[0], 0, dp_rank, 3).read(24, 12, 2):
            assert batch.tokens[:, 0].tolist() == [1000 * sample for sample in batch.sample_ids.tolist()]
            ids += batch.sample_ids.tolist()
    assert sorted(ids) == list(range(24, 36))


def test_eod_mask_equals_megatrons():
    expected = stored("gpt_a_s1024_reset_eodmask")
    dataset = GPTDataset(IndexedDataset(SET_A), np.arange(48), 40, 1024, 1234)
    count = len(expected["s_tokens"])
    layout = SequenceLayout(1024, ulysses=4)
    masks = []
    for sp_rank in range(4):
        [batch] = BatchReader(dataset, layout, sp_rank, 0, 1, 50256, True).read(0, count, count)
        assert torch.equal(batch.labels == -100, batch.tokens == 50256)
        assert batch.num_valid == int((batch.labels != -100).sum())
        masks.append(batch.labels != -100)
    found = torch.cat(masks, dim=1).numpy()
    assert not found.all() and np.array_equal(found, expected["s_loss_mask"].astype(bool))


def test_eod_mask_needs_an_eod():
    with pytest.raises(DataError, match="--eod-mask-loss"):
        BatchReader(Ramp(), LAYOUTS[0], 0, 0, 1, None, True)


def test_reading_ahead_changes_nothing():
    with BatchReader(Ramp(), LAYOUTS[1], 1, 0, 2, read_ahead=True) as ahead:
        now = BatchReader(Ramp(), LAYOUTS[1], 1, 0, 2)
        for consumed, size in ((0, 4), (4, 4), (8, 8), (0, 4), (60, 4)):  # also jumps and another batch size
            for one, other in zip(ahead.read(consumed, size, 2), now.read(consumed, size, 2), strict=True):
                assert torch.equal(one.tokens, other.tokens) and torch.equal(one.labels, other.labels)
    with pytest.raises(DataError, match="68.*built for 64"):
        now.read(64, 4, 2)


def test_an_error_in_the_background_surfaces_when_its_batch_is_read():
    class Broken(Ramp):
        def window(self, sample: int, start: int, stop: int) -> np.ndarray:
            if sample >= 4:
                raise DataError("cannot read sample 4")
            return super().window(sample, start, stop)

    with BatchReader(Broken(), LAYOUTS[0], 0, 0, 1, read_ahead=True) as reader:
        assert len(reader.read(0, 4, 2)) == 2
        with pytest.raises(DataError, match="sample 4"):
            reader.read(4, 4, 2)
        assert reader.read(0, 4, 2)[0].sample_ids.tolist() == [0, 1]
    reader.close()


def test_tokens_outside_of_the_vocabulary_are_refused():
    with pytest.raises(DataError, match="ramp.bin has the token id 1048.*1048 ids"):
        BatchReader(Ramp(), LAYOUTS[0], 0, 0, 1, vocab_size=1048).read(0, 2, 2)
    assert BatchReader(Ramp(), LAYOUTS[0], 0, 0, 1, vocab_size=1049).read(0, 2, 2)


def test_to_moves_the_tensors():
    [batch] = BatchReader(Ramp(), LAYOUTS[0], 0, 0, 1).read(0, 1, 1)
    moved = batch.to(torch.device("meta"))
    assert moved.tokens.device.type == moved.positions.device.type == "meta"
    assert moved.labels.device.type == "meta" and moved.sample_ids.device.type == "meta" and moved.num_valid == 48


def test_mock_tokens_depend_on_seed_sample_and_position_only():
    dataset = MockDataset(100, 1000, 50, seed=1)
    whole = dataset.window(7, 0, 1001)
    assert whole.dtype == np.int64 and whole.min() >= 0 and whole.max() < 100 and len(np.unique(whole)) == 100
    assert np.array_equal(dataset.window(7, 250, 501), whole[250:501])
    assert not np.array_equal(dataset.window(8, 0, 1001), whole)
    assert not np.array_equal(MockDataset(100, 1000, 50, seed=2).window(7, 0, 1001), whole)
    counts = np.bincount(np.concatenate([dataset.window(i, 0, 1001) for i in range(50)]), minlength=100)
    assert 350 < counts.min() and counts.max() < 650  # about 500 each
    with pytest.raises(IndexError):
        dataset.window(50, 0, 1)


def test_mock_splits():
    splits = build_datasets(Data(seq_length=8, mock_data=True), None, (10, 5, 0), 1, vocab_size=50)
    assert splits.train is not None and splits.valid is not None and splits.test is None
    assert len(splits.train) == 10 and not np.array_equal(splits.train.window(0, 0, 9), splits.valid.window(0, 0, 9))
    assert "made-up" in splits.describe()


def test_cyclic_order_shuffles_every_epoch():
    dataset = CyclicDataset(Ramp(10), seed=3)
    epochs = [[int(dataset.window(epoch * 10 + i, 0, 1)[0]) // 1000 for i in range(10)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs) and epochs[0] != epochs[1]
    again = [int(CyclicDataset(Ramp(10), seed=3).window(13, 0, 1)[0]) // 1000]
    assert again == [epochs[1][3]]


def test_cyclic_reads_every_sample_once_before_any_repeats(tmp_path):
    """49 samples an epoch and 147 asked for: each pass of 49 holds all tokens of the epoch, and no sample twice."""
    write(tmp_path / "a", [list(range(20 * i, 20 * i + 20)) for i in range(40)])  # 800 tokens, each a different one
    data = Data(seq_length=16, data_path=(str(tmp_path / "a"),), split="100", dataloader_type="cyclic")
    train = build_datasets(data, None, (147, 0, 0), 1234).train
    assert train is not None
    orders = []
    for epoch in range(3):
        firsts = [int(train.window(49 * epoch + k, 0, 1)[0]) for k in range(49)]
        tokens = np.concatenate([train.window(49 * epoch + k, 0, 16) for k in range(49)])
        assert len(set(firsts)) == 49 and len(np.unique(tokens)) == 784
        orders.append(firsts)
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2]) and orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("weights", [(), ("0.25", "0.75")])
def test_cyclic_blends_repeat_no_sample_early(tmp_path, weights):
    write(tmp_path / "a", [list(range(80))])
    write(tmp_path / "b", [list(range(1000, 1160))])
    paths = (str(tmp_path / "a"), str(tmp_path / "b"))
    words = tuple(word for pair in zip(weights, paths) for word in pair) if weights else paths
    data = Data(seq_length=8, data_path=words, split="100", dataloader_type="cyclic")
    train = build_datasets(data, None, (112, 0, 0), 1).train
    assert train is not None
    firsts = [int(train.window(k, 0, 1)[0]) for k in range(112)]
    assert {train.source(k) for k in range(20)} == {path + ".bin" for path in paths}
    per_epoch = dict(a=9, b=19)  # samples of 8 + 1 tokens
    for name, own in (("a", [first for first in firsts if first < 1000]), ("b", [f for f in firsts if f >= 1000])):
        size = per_epoch[name]
        for start in range(0, len(own) - size + 1, size):
            assert len(set(own[start:start + size])) == size
    if weights:
        assert sum(first < 1000 for first in firsts) == 28
    else:
        assert all(len(set(firsts[start:start + 28])) == 28 for start in (0, 28, 56, 84))


def test_batches_are_pinned_where_a_gpu_reads_them(monkeypatch):
    pinned = []

    def pin_memory(x):
        pinned.append(x)
        return x

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    for pin in (False, True):
        reader = BatchReader(Ramp(), LAYOUTS[0], 0, 0, 1, pin=pin)
        batch = reader.read(0, 1, 1)[0]
        assert any(batch.tokens is x for x in pinned) == pin and len(pinned) == 4 * pin
        reader.close()
        pinned.clear()
