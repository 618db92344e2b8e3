"""The data of a phase of a length schedule: every token once, in an order that a resume does not change."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_sp.data import length_phase
from megatron_sp.data.build import CyclicDataset
from megatron_sp.data.length_phase import LengthPhaseDataset
from megatron_sp.layout.length_schedule import Phase


class Numbers:
    """Samples of 8 tokens that count on: sample k is 8k ... 8k + 8. Documents of 3 tokens, no label for each fifth."""

    seq_length = 8

    def __len__(self) -> int:
        return 40

    def window(self, sample: int, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= 9
        return np.arange(8 * sample + start, 8 * sample + stop)

    def document_starts(self, sample: int) -> np.ndarray:
        places = np.arange(8)
        return places[((places + 8 * sample) % 3 == 0) | (places == 0)]

    def unlabelled(self, sample: int) -> np.ndarray:
        places = np.arange(8)
        return places[(places + 8 * sample) % 5 == 0]

    def source(self, sample: int) -> str:
        return f"sample {sample}"

    def describe(self) -> str:
        return "numbers"


def make(first: int, stop: int, length: int = 2, seed: int = 1) -> LengthPhaseDataset:
    return LengthPhaseDataset(Numbers(), Phase(1, length, 8 // length, first, stop), seed)


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("block", [1 << 20, 16, 1])
def test_phases_read_every_token_once(length: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two phases and a last one with whole samples, for blocks that hold all parts, some samples, or one."""
    monkeypatch.setattr(length_phase, "SHUFFLED", block)
    read, order = [], []
    for first, stop in ((0, 12), (12, 31)):
        data = make(first, stop, length)
        for sequence in range(first * 8 // length, stop * 8 // length):
            window = data.window(sequence, 0, length + 1)
            assert window.tolist() == list(range(window[0], window[0] + length + 1))    # with the last label
            read += window[:-1].tolist()
            order.append(int(window[0]))
            assert data.source(sequence) == f"sample {window[0] // 8}"
        assert sorted(read) == list(range(8 * stop))
    assert order != sorted(order)


def test_parts_of_a_sample_do_not_stay_together() -> None:
    places = [int(make(0, 40).window(sequence, 0, 1)[0]) // 8 for sequence in range(160)]
    assert sum(one == other for one, other in zip(places, places[1:])) < 20     # 120 without a shuffle


def test_the_order_depends_on_the_seed_and_on_nothing_that_a_resume_changes() -> None:
    one, other = make(4, 20), make(4, 20)
    backwards = [other.window(sequence, 0, 2).tolist() for sequence in reversed(range(16, 80))]
    assert [one.window(sequence, 0, 2).tolist() for sequence in range(16, 80)] == backwards[::-1]
    assert [make(4, 20, seed=2).window(sequence, 0, 1)[0] for sequence in range(16, 80)] != [
        one.window(sequence, 0, 1)[0] for sequence in range(16, 80)]


def test_a_batch_that_is_read_ahead_of_the_phase_has_its_place() -> None:
    assert make(0, 4).window(16, 0, 3).tolist() == [32, 33, 34] and len(make(0, 4)) == 160


def test_documents_and_labels_are_those_of_the_part() -> None:
    data = make(0, 40, length=4)
    for sequence in range(80):
        tokens = data.window(sequence, 0, 4)
        starts = [place for place in range(4) if tokens[place] % 3 == 0 or place == 0 or tokens[place] % 8 == 0]
        assert data.document_starts(sequence).tolist() == starts
        assert data.unlabelled(sequence).tolist() == [place for place in range(4) if tokens[place] % 5 == 0]


def test_a_dataset_without_end_has_a_length() -> None:
    data = LengthPhaseDataset(CyclicDataset(Numbers(), 1), Phase(1, 2, 4, 0, 40), 1)
    assert len(data) == 2**62
    assert sorted(int(data.window(sequence, 0, 1)[0]) for sequence in range(160)) == list(range(0, 320, 2))
