"""Packed samples: documents stay whole, every token is read once a pass, and nothing is predicted across documents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_sp.config.schema import Data
from megatron_sp.data.batch import IGNORED, BatchReader
from megatron_sp.data.build import build_datasets
from megatron_sp.data.documents import Documents
from megatron_sp.data.gpt_dataset import unlabelled
from megatron_sp.data.packing import PackedDataset, best_fit, cut_into_parcels, cuts_of_row
from megatron_sp.layout.tokens import SequenceLayout
from tests.unit.data.test_indexed import write

#: Lengths of documents: empty, short, as long as a sample of 16 tokens, longer, and twice as long.
LENGTHS = [3, 0, 16, 5, 40, 1, 7, 12, 32, 9, 2, 17]


def one_by_one(lengths: np.ndarray, capacity: int) -> list[int]:
    """Place each parcel by looking at every box, and return how full the boxes are."""
    room: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        enough = [box for box in range(len(room)) if room[box] >= length]
        if not enough:
            room.append(capacity)
            enough = [len(room) - 1]
        room[min(enough, key=room.__getitem__)] -= length
    return sorted(capacity - left for left in room)


def test_boxes_are_filled_as_when_parcels_are_placed_one_by_one() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        capacity = int(random.integers(1, 40))
        lengths = random.integers(1, capacity + 1, size=int(random.integers(1, 60)))
        boxes = best_fit(lengths, capacity)
        filled = np.bincount(boxes, weights=lengths).astype(int)
        assert filled.max() <= capacity and sorted(filled.tolist()) == one_by_one(lengths, capacity)


def test_only_documents_longer_than_a_sample_are_cut() -> None:
    documents, offsets, lengths = cut_into_parcels(np.array(LENGTHS), 16)
    parts = list(zip(documents.tolist(), offsets.tolist(), lengths.tolist()))
    assert [part for part in parts if part[0] in (0, 1, 2, 4, 8, 11)] == [
        (0, 0, 3), (2, 0, 16), (4, 0, 16), (4, 16, 16), (4, 32, 8), (8, 0, 16), (8, 16, 16), (11, 0, 16), (11, 16, 1)]


def packed(tmp_path: Path, count: int | None = None) -> PackedDataset:
    """Token k of document d is 100 d + k + 1."""
    indexed = write(tmp_path / "set", [[100 * document + token + 1 for token in range(length)]
                                       for document, length in enumerate(LENGTHS) if length])
    return PackedDataset(indexed, np.arange(len(indexed)), count, 16, seed=3)


def test_every_token_is_read_once_in_a_pass_and_each_label_follows_its_token(tmp_path: Path) -> None:
    dataset = packed(tmp_path, 2)
    assert len(dataset) == dataset.per_pass
    layout, seen, labelled = SequenceLayout(16, ulysses=2), [], 0
    for sample in range(len(dataset)):
        for sp_rank in range(2):
            [batch] = BatchReader(dataset, layout, sp_rank, 0, 1, documents=Documents(True, True)).read(sample, 1, 1)
            tokens, labels = batch.tokens[0].numpy(), batch.labels[0].numpy()
            seen += tokens[tokens > 0].tolist()
            for token, label in zip(tokens.tolist(), labels.tolist()):
                document, place = divmod(token - 1, 100)
                is_last = token == 0 or place + 1 == LENGTHS[document]
                # The last token of a part is followed by its document only where the part fills the sample.
                assert label == (IGNORED if is_last else token + 1)
                labelled += label != IGNORED
    whole = [100 * document + token + 1 for document, length in enumerate(LENGTHS) for token in range(length)]
    assert sorted(seen) == sorted(whole)
    assert labelled == len(whole) - sum(length > 0 for length in LENGTHS)


def test_positions_and_documents_start_anew_with_each_document_and_the_padding(tmp_path: Path) -> None:
    dataset = packed(tmp_path)
    for sample in range(len(dataset)):
        [batch] = BatchReader(dataset, SequenceLayout(16), 0, 0, 1, documents=Documents(True, True)).read(sample, 1, 1)
        [starts] = batch.mask.documents
        tokens = batch.tokens[0].tolist()
        assert list(starts) == [place for place in range(16) if place == 0 or (
            tokens[place] != tokens[place - 1] + 1 and (tokens[place] or tokens[place - 1]))]
        assert batch.positions[0].tolist() == [place - max(start for start in starts if start <= place)
                                               for place in range(16)]


def test_each_pass_has_an_order_of_its_own_and_the_seed_decides_it(tmp_path: Path) -> None:
    dataset, again = packed(tmp_path, 1000), packed(tmp_path, 500)
    size = dataset.per_pass
    passes = [[dataset.window(size * number + place, 0, 17).tolist() for place in range(size)] for number in range(3)]
    assert passes[0] != passes[1] != passes[2] and sorted(passes[0]) == sorted(passes[1]) == sorted(passes[2])
    assert [again.window(place, 0, 17).tolist() for place in range(size)] == passes[0]
    assert len(dataset) >= 1000 and len(dataset) % size == 0


def test_what_packing_saves_is_reported(tmp_path: Path) -> None:
    dataset = packed(tmp_path)
    row = [length for length in LENGTHS if length]
    starts = np.cumsum([0, *row])
    cut = sum(length <= 16 and start // 16 != (start + length - 1) // 16 for start, length in zip(starts.tolist(), row))
    assert cuts_of_row(np.array(LENGTHS), 16) == cut > 0
    tokens, samples, parts = sum(row), dataset.per_pass, len(cut_into_parcels(np.array(row), 16)[0])
    words = dataset.describe()
    assert f"11 documents, {tokens} tokens packed into {samples} samples" in words
    assert f"documents that are cut: 3, all longer than a sample (a row of documents would cut {cut} more)" in words
    assert f"padding: {1 - tokens / samples / 16:.2%} of the tokens ({1 - tokens / parts / 16:.2%} with one" in words


@pytest.mark.parametrize("loader", ["single", "cyclic"])
def test_flags_build_blends_of_packed_sets(tmp_path: Path, loader: str) -> None:
    packed(tmp_path)
    data = Data(seq_length=16, data_path=("0.3", str(tmp_path / "set"), "0.7", str(tmp_path / "set")), split="70,30,0",
                pack_documents="best-fit", dataloader_type=loader)
    splits = build_datasets(data, None, (50, 4, 0), 1)
    assert splits.train is not None and splits.valid is not None
    assert "packed into" in splits.describe() and len(splits.train) >= 50
    for sample in range(50):
        gone, starts = unlabelled(splits.train, sample), splits.train.document_starts(sample)
        assert set((starts[1:] - 1).tolist()) <= set(gone.tolist())
    plain = build_datasets(replace(data, pack_documents=""), None, (50, 4, 0), 1)
    assert plain.train is not None and not len(unlabelled(plain.train, 0))
