"""The index cache: complete or absent, reused, keyed by everything it depends on."""

import os
from typing import Any

import numpy as np
import pytest

from megatron_sp.config.schema import Data
from megatron_sp.data import index_cache
from megatron_sp.data.build import build_datasets
from megatron_sp.data.gpt_dataset import GPTDataset
from megatron_sp.data.index_cache import IndexCache
from megatron_sp.data.token_files.indexed_dataset import IndexedDataset
from megatron_sp.errors import DataError
from tests.helpers.cache_races import killed_builds, start_together
from tests.helpers.small_disk import FULL, small_disk
from tests.unit.data.test_indexed import SET_A, write


def entries(directory: str | os.PathLike[str]) -> list[str]:
    return sorted(name for name in os.listdir(directory) if not name.endswith(".lock"))


def test_the_second_time_nothing_is_built(tmp_path):
    cache, built = IndexCache(str(tmp_path / "cache")), []

    def build() -> dict[str, np.ndarray]:
        built.append(1)
        return {"x": np.arange(5), "empty": np.zeros((0, 2)), "large": np.zeros(20_000)}

    for _ in range(2):
        arrays = cache.get({"a": 1}, build)
        assert arrays["x"].tolist() == [0, 1, 2, 3, 4] and isinstance(arrays["large"], np.memmap)
    assert len(built) == 1
    cache.get({"a": 2}, build)
    assert len(built) == 2 and len(entries(tmp_path / "cache")) == 2


def test_a_build_that_stops_halfway_leaves_no_entry(tmp_path):
    cache = IndexCache(str(tmp_path))

    def stop() -> dict[str, np.ndarray]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.get({"a": 1}, stop)
    assert cache.get({"a": 1}, lambda: {"x": np.ones(1)})["x"].tolist() == [1.0]


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_many_processes_build_each_array_once(tmp_path, rounds):
    """8 processes start on an empty cache; the blend has two sets and one order."""
    words = []
    for place in range(2):
        write(tmp_path / f"set{place}", [[place] * 40] * 20)
        words += [str(1 + place), str(tmp_path / f"set{place}")]
    found = start_together(tmp_path, words, processes=8, rounds=rounds)
    assert found == [{"succeeded": 8, "gpt": 2, "blend": 1}] * rounds


def test_a_build_killed_at_any_instant_is_built_again(tmp_path):
    """Each attempt is killed before another change of the file system; the next process finds or builds the entry."""
    attempts = killed_builds(tmp_path)
    assert attempts > 8
    for number in range(attempts):
        [entry] = entries(tmp_path / str(number))  # nothing of the killed build is left
        assert IndexCache(str(tmp_path / str(number))).get({"a": 1}, dict)["x"].tolist() == list(range(50_000))
        assert len(entry) == 32


def test_another_machine_with_its_own_disk_builds_its_own(tmp_path):
    write(tmp_path / "x", [[1, 2, 3, 4, 5]] * 10)
    for node in ("a", "b"):
        data = Data(seq_length=4, data_path=(str(tmp_path / "x"),), split="100", data_cache_path=str(tmp_path / node))
        build_datasets(data, None, (5, 0, 0), 1)
        assert len(entries(tmp_path / node)) == 1


def test_where_there_are_no_locks_two_may_build_and_nothing_is_removed(tmp_path, monkeypatch):
    """A process without a lock must not remove what another one is still building."""
    monkeypatch.setattr(index_cache, "fcntl", None)
    cache = IndexCache(str(tmp_path))

    def build() -> dict[str, np.ndarray]:
        cache.get({"a": 1}, lambda: {"x": np.arange(4)})  # another process builds the same entry meanwhile
        (tmp_path / f"{entries(tmp_path)[0]}.building-by-another").mkdir()
        return {"x": np.arange(4)}

    assert cache.get({"a": 1}, build)["x"].tolist() == [0, 1, 2, 3]
    assert [name[32:] for name in entries(tmp_path)] == ["", ".building-by-another"]


def test_the_key_covers_what_the_order_depends_on(tmp_path):
    cache, indexed = IndexCache(str(tmp_path / "cache")), IndexedDataset(SET_A)
    variants: list[dict[str, Any]] = [dict(), dict(seed=2), dict(seq_length=32), dict(num_samples=2000),
                                      dict(document_ids=np.arange(40)), dict(document_ids=np.array([1, 5, 7]))]
    for count, change in enumerate(variants, 1):
        arguments: dict[str, Any] = dict(indexed=indexed, document_ids=np.arange(48), num_samples=100, seq_length=64,
                                         seed=1) | change
        cached = GPTDataset(**arguments, cache=cache)
        fresh = GPTDataset(**arguments)
        assert len(entries(tmp_path / "cache")) == count
        assert np.array_equal(cached.shuffle_index, fresh.shuffle_index)
        assert np.array_equal(cached.window(3, 0, 9), fresh.window(3, 0, 9))
    GPTDataset(indexed, np.arange(48), 101, 64, 1, cache=cache)  # as many epochs: the same order
    assert len(entries(tmp_path / "cache")) == len(variants)
    other = write(tmp_path / "x", [[1] * 1000] * 48)
    GPTDataset(other, np.arange(48), 100, 64, 1, cache=cache)
    assert len(entries(tmp_path / "cache")) == len(variants) + 1


def test_places_of_the_cache(tmp_path):
    write(tmp_path / "x", [[1, 2, 3, 4, 5]] * 10)
    path = (str(tmp_path / "x"),)
    build_datasets(Data(seq_length=4, data_path=path, split="100"), None, (5, 0, 0), 1)
    assert len(entries(tmp_path / "cache" / "megatron_sp")) == 1
    build_datasets(Data(seq_length=4, data_path=path, split="100", data_cache_path=str(tmp_path / "other")), None,
                   (5, 0, 0), 1)
    assert len(entries(tmp_path / "other")) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="--data-cache-path"):
        build_datasets(Data(seq_length=4, data_path=path, split="100", data_cache_path=str(tmp_path / "file")), None,
                       (5, 0, 0), 1)
    # A cache beside the data that cannot be written is not an error: the arrays are computed.
    assert IndexCache(str(tmp_path / "file" / "cache")).get({}, lambda: {"x": np.ones(2)})["x"].tolist() == [1, 1]


def test_a_damaged_entry_is_named(tmp_path):
    cache = IndexCache(str(tmp_path))
    cache.get({"a": 1}, lambda: {"x": np.arange(100)})
    [entry] = entries(tmp_path)
    whole = (tmp_path / entry / "x.npy").read_bytes()
    for content in (b"", b"nonsense", whole[:200], None):
        (tmp_path / entry / "x.npy").unlink()
        if content is None:
            with pytest.raises(DataError, match="x.npy is missing"):
                cache.get({"a": 1}, lambda: {"x": np.arange(100)})
            break
        (tmp_path / entry / "x.npy").write_bytes(content)
        with pytest.raises(DataError, match=entry):
            cache.get({"a": 1}, lambda: {"x": np.arange(100)})


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        with pytest.raises(DataError, match=rf"--data-cache-path .*disk cannot be written: {FULL}"):
            IndexCache(str(disk), required=True).get({"a": 1}, lambda: {"x": np.zeros(100_000)})
        assert not entries(disk)
        assert len(IndexCache(str(disk)).get({"a": 1}, lambda: {"x": np.zeros(100_000)})["x"]) == 100_000
        assert not entries(disk)
