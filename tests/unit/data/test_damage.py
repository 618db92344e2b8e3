"""Random damage to token files and the index cache: a DataError or correct data, never a crash, a hang or nonsense."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sp.data.gpt_dataset import GPTDataset
from megatron_sp.data.index_cache import IndexCache
from megatron_sp.data.token_files.indexed_dataset import IndexedDataset
from megatron_sp.data.token_files.token_writer import IndexedDatasetBuilder
from megatron_sp.errors import DataError

Damage = Callable[[bytes], bytes]
VOCABULARY = 100
DOCUMENTS = st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=9), min_size=3, max_size=8)


def damages() -> st.SearchStrategy[Damage]:
    """Return a strategy of changes to a file: bytes overwritten, cut off, put in or appended."""
    place, piece = st.integers(0, 100).map(lambda percent: percent / 100), st.binary(min_size=1, max_size=9)
    number = st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32, 2**40, 2**60, 2**63 - 1, 2**63, 2**64 - 1])
    eight = number.map(lambda value: value.to_bytes(8, "little"))

    def overwrite(at: float, new: bytes) -> Damage:
        return lambda old: old[:int(at * len(old))] + new + old[int(at * len(old)) + len(new):]

    def insert(at: float, new: bytes) -> Damage:
        return lambda old: old[:int(at * len(old))] + new + old[int(at * len(old)):]

    def cut(at: float) -> Damage:
        return lambda old: old[:int(at * len(old))]

    return st.one_of(st.builds(overwrite, place, piece), st.builds(overwrite, place, eight),
                     st.builds(insert, place, piece), st.builds(cut, place),
                     st.builds(lambda new: lambda old: old + new, piece))


def header_damages() -> st.SearchStrategy[Damage]:
    """Return a strategy of changes to one of the header's numbers, by a little or to any value."""
    def change(at: int, value: int) -> Damage:
        return lambda old: old[:at] + value.to_bytes(8, "little") + old[at + 8:]

    return st.builds(change, st.sampled_from([9, 17, 18, 26]), st.one_of(st.integers(0, 20), st.integers(0, 2**64 - 1)))


examples = pytest.mark.parametrize("examples", [60, pytest.param(1500, marks=pytest.mark.slow)])


@examples
def test_damaged_token_files(examples: int) -> None:
    inputs = given(DOCUMENTS, st.sampled_from([np.uint16, np.int32]), st.sampled_from([".idx", ".bin"]), st.data())
    settings(max_examples=examples, deadline=None)(inputs(check_damaged_token_files))()


def check_damaged_token_files(documents: list[list[int]], dtype: type, ending: str, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "x"
        with IndexedDatasetBuilder(prefix, dtype) as builder:
            for document in documents:
                builder.add_document(document)
            builder.finalize()
        path = prefix.with_suffix(ending)
        damage = data.draw(st.one_of(damages(), header_damages()) if ending == ".idx" else damages())
        before = path.read_bytes()
        path.write_bytes(after := damage(before))
        try:
            dataset = IndexedDataset(prefix)
        except DataError as error:
            assert str(prefix) in str(error)
            return
        whole = [token for document in documents for token in document]
        lengths = [len(document) for document in documents if document]
        assert dataset.lengths.tolist() == lengths, "the lengths are those that were written, or the index is refused"
        if ending == ".idx":  # with the same size, a changed .bin holds other tokens, which only checksums can tell
            assert [token for i in range(len(dataset)) for token in dataset.get(i)] == whole
        else:
            assert len(after) == len(before)
        entries = dataset.document_indices.tolist()
        assert entries[0] == 0 and entries[-1] == len(lengths) and entries == sorted(entries)
        with contextlib.suppress(DataError):  # no tokens
            samples = GPTDataset(dataset, np.arange(len(dataset)), 5, 4, 1)
            assert all(len(samples.window(i, 0, 5)) == 5 for i in range(5))


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> tuple[IndexedDataset, Path]:
    """A token set with lengths that tell the documents apart, and its index cache."""
    folder = tmp_path_factory.mktemp("cached")
    with IndexedDatasetBuilder(folder / "x", np.uint16) as builder:
        for length in range(12):
            builder.add_document([length] * length)
        builder.finalize()
    indexed = IndexedDataset(folder / "x")
    GPTDataset(indexed, np.arange(11), 40, 4, 1, cache=IndexCache(str(folder / "cache")))
    return indexed, folder / "cache"


@examples
def test_a_damaged_index_cache(cached: tuple[IndexedDataset, Path], examples: int) -> None:
    """Every sample is one of the set's tokens, whatever an entry of the cache says, or a DataError."""
    names = st.sampled_from(["document_index.npy", "starts.npy", "shuffle_index.npy", "description.json"])

    def check(name: str, damage: Damage) -> None:
        check_damaged_cache(*cached, name, damage)

    settings(max_examples=examples, deadline=None)(given(names, damages())(check))()


def check_damaged_cache(indexed: IndexedDataset, cache: Path, name: str, damage: Damage) -> None:
    [entry] = [path.name for path in cache.iterdir() if path.is_dir()]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "cache"
        shutil.copytree(cache, copy)
        path = copy / entry / name
        path.write_bytes(damage(path.read_bytes()))
        try:
            dataset = GPTDataset(indexed, np.arange(11), 40, 4, 1, cache=IndexCache(str(copy)))
            for sample in range(len(dataset)):
                window = dataset.window(sample, 0, 5)
                assert window.min() >= 0 and window.max() < 12
                dataset.document_starts(sample)
        except DataError as error:
            assert entry in str(error) or indexed.prefix in str(error)
