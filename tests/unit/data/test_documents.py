"""Documents inside samples: boundaries, position ids, masks and loss masks are those that Megatron makes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_sp.config.schema import Data
from megatron_sp.data import documents
from megatron_sp.data.batch import BatchReader, Microbatch
from megatron_sp.data.blend import BlendedDataset
from megatron_sp.data.build import CyclicDataset
from megatron_sp.data.documents import Documents, attention_work
from megatron_sp.data.gpt_dataset import Dataset, GPTDataset
from megatron_sp.data.mock import MOST_DOCUMENTS, MockDataset
from megatron_sp.data.sampler import GlobalBatchSampler
from megatron_sp.data.token_files.indexed_dataset import IndexedDataset
from megatron_sp.errors import DataError
from megatron_sp.layout.masks.attention_mask import CAUSAL
from megatron_sp.layout.tokens import SequenceLayout
from tests.unit.data.test_indexed import SET_A, write
from tests.unit.data.test_order import stored

EOD = 50256
BY_INDEX, BY_EOD = Documents(True, True), Documents(True, True, EOD)
LAYOUTS = [SequenceLayout(1024), SequenceLayout(1024, ulysses=4), SequenceLayout(1024, ring=2, kind="zigzag")]


def set_a() -> GPTDataset:
    return GPTDataset(IndexedDataset(SET_A), np.arange(48), 40, 1024, 1234)


def read(layout: SequenceLayout, rules: Documents, count: int) -> list[Microbatch]:
    """Return the microbatch of each rank, with all samples in it."""
    found = []
    for sp_rank in range(layout.sp):
        [batch] = BatchReader(set_a(), layout, sp_rank, 0, 1, EOD, True, documents=rules).read(0, count, count)
        found.append(batch)
    return found


@pytest.mark.parametrize("name, rules", [("gpt_a_s1024_reset_eodmask", BY_EOD), ("gpt_a_s1024_interdoc", BY_INDEX)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["whole", "ulysses", "zigzag"])
def test_positions_and_masks_are_megatrons(name: str, rules: Documents, layout: SequenceLayout) -> None:
    """The set ends each document with the token, so Megatron's scan and its index agree, and so do ours."""
    expected = stored(name)
    count = len(expected["s_tokens"])
    for sp_rank, batch in enumerate(read(layout, rules, count)):
        mine = layout.positions(sp_rank)
        assert np.array_equal(batch.tokens.numpy(), expected["s_tokens"][:, mine])
        assert np.array_equal(batch.positions.numpy(), expected["s_position_ids"][:, mine])
        if name.endswith("eodmask"):
            assert np.array_equal(batch.labels.numpy() != -100, expected["s_loss_mask"][:, mine].astype(bool))
        if "s_cu_seqlens" in expected:
            cumulative = [tuple(np.unique(row[row < 1024]).tolist()) for row in expected["s_cu_seqlens"]]
            assert batch.mask.documents == tuple(cumulative) and any(len(starts) > 1 for starts in cumulative)
            assert [max(np.diff(starts, append=1024)) for starts in cumulative] == expected["s_max_seqlen"].tolist()


def write_set(tmp_path: Path, *texts: list[int]) -> IndexedDataset:
    return write(tmp_path / "set", list(texts))


def test_index_and_tokens_differ_where_documents_do_not_end_with_the_token(tmp_path: Path) -> None:
    """Documents 1 2 3, 4 E 5, an empty one, 6 E: the index knows three, a scan for the token E = 9 sees others."""
    dataset = GPTDataset(write_set(tmp_path, [1, 2, 3], [4, 9, 5], [], [6, 9]), np.arange(3), None, 7, 1)
    order = [list(dataset.indexed.get(int(document))) for document in dataset.document_index]
    row = [token for document in order for token in document]
    by_index, place = {0}, 0
    for document in order:
        by_index |= {place}
        place += len(document)
    assert dataset.document_starts(0).tolist() == sorted(start for start in by_index if start < 7)
    by_eod = [0, *(place + 1 for place, token in enumerate(row[:6]) if token == 9)]
    assert Documents(True, True, 9).starts(dataset, 0).tolist() == by_eod != dataset.document_starts(0).tolist()


def test_boundaries_of_every_sample_follow_from_the_row_of_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = GPTDataset(IndexedDataset(SET_A), np.arange(48), 2000, 64, 1234)
    lengths = dataset.indexed.lengths[dataset.document_index]
    numbers = np.repeat(np.arange(len(lengths)), lengths)
    monkeypatch.setattr(documents, "SCAN", 10)
    several = 0
    for sample in range(len(dataset)):
        first = int(dataset.shuffle_index[sample]) * 64
        inside = numbers[first:first + 64]
        starts = [0, *(np.flatnonzero(np.diff(inside)) + 1).tolist()]
        assert dataset.document_starts(sample).tolist() == starts
        assert BY_EOD.starts(dataset, sample).tolist() == starts  # this set has the token at each end and nowhere else
        several += len(starts) > 1
    assert several > 50


def test_the_index_reads_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = set_a()
    monkeypatch.setattr(IndexedDataset, "get", None)
    assert dataset.document_starts(0).tolist() == [0, 422]


def test_blends_and_endless_orders_pass_boundaries_on() -> None:
    members: list[Dataset] = [MockDataset(100, 64, 5, seed) for seed in (1, 2)]
    blend = BlendedDataset(members, np.array([1, 0, 1]), np.array([0, 3, 4]))
    for sample, (member, number) in enumerate([(1, 0), (0, 3), (1, 4)]):
        assert blend.document_starts(sample).tolist() == members[member].document_starts(number).tolist()
    endless = CyclicDataset(members[0], 7)
    assert [endless.document_starts(8).tolist()] == [members[0].document_starts(k).tolist() for k in range(5) if (
        endless.window(8, 0, 9).tolist() == members[0].window(k, 0, 9).tolist())]


def test_random_tokens_have_random_documents() -> None:
    dataset = MockDataset(100, 64, 300, seed=1)
    found = [dataset.document_starts(sample) for sample in range(300)]
    assert {len(starts) for starts in found} == set(range(1, MOST_DOCUMENTS + 1))
    for starts in found:
        assert starts[0] == 0 and (np.diff(starts) > 0).all() and starts[-1] < 64


def test_each_flag_changes_its_own_part() -> None:
    layout = SequenceLayout(1024)
    for rules in (Documents(), Documents(True, False), Documents(False, True)):
        [batch] = read(layout, rules, 1)
        resets = torch.equal(batch.positions[0], torch.arange(1024))
        assert resets != rules.reset_positions
        assert (batch.mask == CAUSAL) != rules.reset_attention


def test_flags_become_rules() -> None:
    both = Data(reset_position_ids=True, reset_attention_mask=True)
    assert Documents.of(Data(), None) == Documents() and Documents.of(both, None) == BY_INDEX
    by_eod = Data(reset_attention_mask=True, document_boundaries="eod")
    assert Documents.of(by_eod, 7) == Documents(False, True, 7)
    with pytest.raises(DataError, match="--document-boundaries eod needs a tokenizer with"):
        Documents.of(by_eod, None)


def test_samples_are_dealt_out_by_their_work() -> None:
    """Each sample goes to one rank; ranks have nearly equal work in total and similar work in each microbatch."""
    work = [100, 1, 1, 64, 50, 2, 4, 36, 90, 9, 16, 25]
    parts = [GlobalBatchSampler.balanced(1000, work, 2, rank, 3) for rank in range(3)]
    assert sorted(sample for part in parts for ids in part for sample in ids) == list(range(1000, 1012))
    assert all(len(part) == 2 and all(len(ids) == 2 for ids in part) for part in parts)
    totals = [sum(work[sample - 1000] for ids in part for sample in ids) for part in parts]
    in_turn = [sum(work[sample] for ids in GlobalBatchSampler.microbatches(0, 12, 2, rank, 3) for sample in ids)
               for rank in range(3)]
    assert max(totals) < 1.06 * sum(work) / 3 < 1.2 * sum(work) / 3 < max(in_turn)
    of_first = [sum(work[sample - 1000] for sample in part[0]) for part in parts]  # the second evens out the totals
    assert sum(of_first) > 0.8 * sum(work) and max(of_first) < 1.1 * sum(of_first) / 3
    assert GlobalBatchSampler.balanced(8, [5] * 12, 2, 1, 3) == GlobalBatchSampler.microbatches(8, 12, 2, 1, 3)


@pytest.mark.parametrize("rules, changes", [(BY_INDEX, True), (BY_EOD, False), (Documents(True), False)])
def test_the_reader_deals_out_by_work_where_the_index_tells_it(rules: Documents, changes: bool) -> None:
    layout, dataset, found = SequenceLayout(1024), set_a(), []
    for dp_rank in range(2):
        batches = BatchReader(dataset, layout, 0, dp_rank, 2, documents=rules).read(0, 8, 1)
        found.append([int(batch.sample_ids[0]) for batch in batches])
    assert sorted(found[0] + found[1]) == list(range(8))
    assert (found != [[0, 2, 4, 6], [1, 3, 5, 7]]) == changes


def test_work_is_the_sum_of_squared_lengths() -> None:
    assert attention_work(np.array([0, 3, 4]), 10) == 9 + 1 + 36
