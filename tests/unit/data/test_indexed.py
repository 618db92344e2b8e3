"""Token files: the same bytes as Megatron's, and damage is seen when a file is opened."""

import hashlib
import os
import resource
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron_sp.data.token_files import indexed_dataset as files
from megatron_sp.data.token_files import token_writer
from megatron_sp.data.token_files.checksums import write_checksums
from megatron_sp.data.token_files.indexed_dataset import IndexedDataset, best_dtype
from megatron_sp.data.token_files.token_writer import IndexedDatasetBuilder
from megatron_sp.errors import DataError
from tests.helpers.small_disk import FULL, small_disk

FIXTURES = Path(__file__).parents[2] / "fixtures"
SET_A = FIXTURES / "bin" / "gpt2_small_a_eod_text_document"
SET_B = FIXTURES / "bin" / "gpt2_small_b_eod_text_document"


def checksums() -> dict[str, str]:
    """SHA-256 of Megatron's outputs by file name."""
    lines = (FIXTURES / "bin" / "SHA256SUMS").read_text().splitlines()
    return {name.lstrip("*./"): digest for digest, name in (line.split() for line in lines)}


def digest(path: str | Path) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def write(prefix: Path, documents: list[list[int]], dtype: type = np.uint16) -> IndexedDataset:
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            builder.add_document(document)
        builder.finalize()
    return IndexedDataset(prefix)


def test_rewriting_gives_the_same_bytes(tmp_path):
    source = IndexedDataset(SET_A)
    with IndexedDatasetBuilder(tmp_path / "one", source.dtype) as one, \
            IndexedDatasetBuilder(tmp_path / "all", source.dtype) as together:
        for i in range(len(source)):
            one.add_document(source.get(i))
        together.add_documents(np.concatenate([source.get(i) for i in range(len(source))]), source.lengths)
        one.finalize()
        together.finalize()
    for name in ("one", "all"):
        for ending in (".bin", ".idx"):
            assert (tmp_path / (name + ending)).read_bytes() == Path(str(SET_A) + ending).read_bytes()


def test_appending_sets_gives_the_bytes_of_megatrons_merge(tmp_path):
    sets = [IndexedDataset(SET_A), IndexedDataset(SET_B)]
    with IndexedDatasetBuilder(tmp_path / "merged", np.uint16) as builder:
        for one in sets:
            builder.add_dataset(one)
        builder.finalize()
    for ending in ("bin", "idx"):
        assert digest(tmp_path / f"merged.{ending}") == checksums()[f"gpt2_merged_ab.{ending}"]
    merged = IndexedDataset(tmp_path / "merged")
    assert merged.num_documents == sets[0].num_documents + sets[1].num_documents
    assert np.array_equal(merged.get(len(sets[0])), sets[1].get(0))


def test_empty_documents_only_repeat_a_document_entry(tmp_path):
    dataset = write(tmp_path / "x", [[], [1, 2], [], [3]])
    assert dataset.lengths.tolist() == [2, 1]
    assert dataset.document_indices.tolist() == [0, 0, 1, 1, 2]
    assert dataset.num_documents == 4
    nothing = write(tmp_path / "y", [[], []])
    assert len(nothing) == 0 and nothing.num_documents == 2


def test_windows_of_a_sequence(tmp_path):
    dataset = write(tmp_path / "x", [[1, 2, 3, 4], [5]])
    assert dataset.get(0, 1, 2).tolist() == [2, 3]
    assert dataset.get(0, 2).tolist() == [3, 4]
    with pytest.raises(IndexError):
        dataset.get(0, 3, 2)


def test_dtype_follows_the_vocabulary(tmp_path):
    assert best_dtype(65499) == np.uint16 and best_dtype(65500) == np.int32
    with pytest.raises(DataError, match="70000"):
        write(tmp_path / "x", [[70000]])
    assert not list(tmp_path.iterdir())


def test_pointers_are_64_bit():
    lengths = np.array([2**30, 2**30, 2**30, 1], dtype=np.int32)  # 6 GiB of int32 tokens
    assert files.pointers_of(lengths, 4).tolist() == [0, 2**32, 2**33, 3 * 2**32]


def test_the_writers_pointers_are_64_bit_over_several_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(token_writer, "STEP", 2)  # lengths that are held in memory at a time
    lengths = np.array([2**30, 2**31 - 1, 5, 2**30, 7], dtype="<i4")
    with IndexedDatasetBuilder(tmp_path / "x", np.int32) as builder:
        builder._write("lengths", lengths)  # as if so many tokens had been written
        builder._write("documents", np.ones(5, dtype="<i4"))
        builder.position()
        builder._write_index(5, 5)
        index = Path(builder.working_path("idx")).read_bytes()[files.HEADER.size:]
        builder.abort()
    assert np.frombuffer(index, "<i8", 5, 20).tolist() == [0, *(4 * np.cumsum(lengths.astype(np.int64))[:-1])]
    assert np.frombuffer(index, "<i8", 6, 60).tolist() == list(range(6))


def test_index_of_millions_of_documents_is_vectorised(tmp_path):
    count = 3_000_000
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        builder.add_documents(np.zeros(count // 2, dtype=np.uint16), np.arange(count) % 2)
        builder.finalize()
    dataset = IndexedDataset(tmp_path / "x")
    assert dataset.num_documents == count and dataset.num_tokens == count // 2


def test_an_unfinished_set_leaves_nothing(tmp_path):
    write(tmp_path / "x", [[1, 2]])
    before = digest(tmp_path / "x.bin")
    with pytest.raises(RuntimeError), IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        builder.add_document([3])
        raise RuntimeError("stopped")
    assert sorted(os.listdir(tmp_path)) == ["x.bin", "x.idx"] and digest(tmp_path / "x.bin") == before


def test_an_interrupt_while_cleaning_up_leaves_nothing(tmp_path, monkeypatch):
    remove = os.remove
    calls = []

    def interrupted_once(path):
        calls.append(path)
        if len(calls) == 1:
            raise KeyboardInterrupt
        remove(path)

    monkeypatch.setattr(os, "remove", interrupted_once)
    with pytest.raises(KeyboardInterrupt), IndexedDatasetBuilder(tmp_path / "x", np.uint16):
        raise RuntimeError("stopped")
    assert not os.listdir(tmp_path)


def _damage_magic(idx: bytearray) -> None:
    idx[:4] = b"NOPE"


def _damage_version(idx: bytearray) -> None:
    idx[9] = 2


def _damage_dtype(idx: bytearray) -> None:
    idx[17] = 77


def _other_dtype(idx: bytearray) -> None:
    idx[17] = 4


def _damage_count(idx: bytearray) -> None:
    struct.pack_into("<Q", idx, 18, 49)


def _damage_length(idx: bytearray) -> None:
    struct.pack_into("<i", idx, 34 + 4 * 5, -3)


def _damage_pointer(idx: bytearray) -> None:
    struct.pack_into("<q", idx, 34 + 4 * 48 + 8 * 7, 12)


def _damage_document(idx: bytearray) -> None:
    struct.pack_into("<q", idx, 34 + 12 * 48 + 8 * 3, 40)


def _cut(idx: bytearray) -> None:
    del idx[-10:]


@pytest.mark.parametrize("damage", [_damage_magic, _damage_version, _damage_dtype, _other_dtype, _damage_count,
                                    _damage_length, _damage_pointer, _damage_document, _cut])
def test_a_damaged_index_is_refused_when_opened(tmp_path, damage):
    for ending in (".bin", ".idx"):
        shutil.copyfile(str(SET_A) + ending, tmp_path / ("x" + ending))
    content = bytearray((tmp_path / "x.idx").read_bytes())
    damage(content)
    (tmp_path / "x.idx").write_bytes(content)
    with pytest.raises(DataError, match="x.idx"):
        IndexedDataset(tmp_path / "x")


def test_the_end_of_a_document_that_moved_is_seen_by_checksums(tmp_path):
    """Offsets and lengths do not change, so nothing but a checksum can tell."""
    write(tmp_path / "x", [[1, 2], [3], [4, 5, 6]])
    content = bytearray((tmp_path / "x.idx").read_bytes())
    struct.pack_into("<q", content, 34 + 12 * 3 + 8, 2)
    write_checksums(tmp_path / "x")
    (tmp_path / "x.idx").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.idx: bytes 0 to .* remove .*x\.checksums\.json"):
        IndexedDataset(tmp_path / "x")
    (tmp_path / "x.checksums.json").unlink()
    assert IndexedDataset(tmp_path / "x").document_indices.tolist() == [0, 2, 2, 3]


def test_files_of_different_runs_are_refused(tmp_path):
    shutil.copyfile(str(SET_A) + ".idx", tmp_path / "x.idx")
    shutil.copyfile(str(SET_B) + ".bin", tmp_path / "x.bin")
    with pytest.raises(DataError, match="72904 bytes.*112818"):
        IndexedDataset(tmp_path / "x")
    (tmp_path / "x.bin").write_bytes(Path(str(SET_A) + ".bin").read_bytes()[:-10])
    with pytest.raises(DataError, match="x.bin"):
        IndexedDataset(tmp_path / "x")


def test_a_wrong_prefix_gets_a_hint(tmp_path):
    write(tmp_path / "corpus_text_document", [[1]])
    with pytest.raises(DataError, match="Did you mean .*corpus_text_document"):
        IndexedDataset(tmp_path / "corpus")
    with pytest.raises(DataError, match="without its ending"):
        IndexedDataset(tmp_path / "corpus_text_document.bin")
    with pytest.raises(DataError, match="directory"):
        IndexedDataset(tmp_path / "nowhere" / "x")


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_file_cut_short_while_it_is_read_is_named(tmp_path, ending):
    """A mapped file would end the process with SIGBUS here."""
    dataset = write(tmp_path / "x", [list(range(5000))] * 4)
    assert dataset.get(3, 4990).tolist() == list(range(4990, 5000))
    os.truncate(f"{tmp_path / 'x'}{ending}", 100)
    with pytest.raises(DataError, match=rf"x{ending} has 100 bytes, but had \d+ when it was opened"):
        dataset.get(3)


def test_files_are_closed_with_their_dataset(tmp_path):
    write(tmp_path / "x", [[1, 2]])
    before = len(os.listdir("/dev/fd"))
    for _ in range(5):
        assert IndexedDataset(tmp_path / "x").get(0).tolist() == [1, 2]
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.parametrize("documents", [1, 20_000])  # the tokens do not fit; the index does not fit
def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path, documents):
    tokens = np.zeros(60_000 if documents == 1 else 20_000, dtype=np.uint16)
    with small_disk(tmp_path / "disk") as disk:
        with pytest.raises(DataError, match=rf"x\.(bin|idx) cannot be written: {FULL}"), \
                IndexedDatasetBuilder(disk / "x", np.uint16) as builder:
            builder.add_documents(tokens, np.full(documents, len(tokens) // documents))
            builder.finalize()
        assert not os.listdir(disk)
        builder = IndexedDatasetBuilder(disk / "y", np.uint16)  # the space was given back
        with builder:
            builder.add_document([1, 2, 3])
            builder.finalize()
        assert IndexedDataset(disk / "y").get(0).tolist() == [1, 2, 3]


def test_a_disk_that_is_full_when_buffered_tokens_are_written(tmp_path):
    """Few tokens wait in the file's buffer until ``finalize``; closing the file tries to write them once more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # no file can grow
    try:
        with pytest.raises(DataError, match=rf"x\.bin cannot be written: {FULL}"), \
                IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
            builder.add_document([1, 2, 3])
            builder.finalize()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == []
