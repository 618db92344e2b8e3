"""Input of every format, shares, interrupted runs, and damaged input, in one process."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sp.config.schema import Data
from megatron_sp.data.corpus import preprocess, readers
from megatron_sp.data.corpus.encode import Job
from megatron_sp.data.corpus.inputs import choose_share, find_parts
from megatron_sp.data.corpus.preprocess import Output, Preprocessor
from megatron_sp.data.corpus.readers import Position, parse, read_blocks
from megatron_sp.data.corpus.records import BadRecords
from megatron_sp.data.corpus.summary import LengthCounts, Summary, read_report
from megatron_sp.data.token_files.checksums import checksum_path, find_damage
from megatron_sp.data.token_files.indexed_dataset import IndexedDataset
from megatron_sp.data.token_files.token_writer import IndexedDatasetBuilder
from megatron_sp.errors import DataError, InstallationError
from tools import merge_datasets

NULL = Job(Data(tokenizer_type="NullTokenizer"), 1000, ("text",), True)


def job(**changes: Any) -> Job:
    return Job(**{**NULL.__dict__, **changes})


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def texts_of(paths: list[Path | str], file_format: str = "auto", separator: bytes = b"", skip: bool = False,
             start: Position = Position()) -> list[str]:  # noqa: B008
    found = []
    for block in read_blocks(find_parts(list(map(str, paths)), file_format), ("text",), separator, start):
        found += [row[0] for row in parse(block, ("text",), BadRecords(block.place_of, skip))[1]]
    return found


def run(paths: list[Path], prefix: Path, job: Job = NULL, **output: Any) -> Summary:
    return Preprocessor(find_parts(list(map(str, paths))), job, Output(str(prefix), **output)).run(1)


def files(directory: Path, prefix: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob(f"{prefix}*document.*") if path.suffix != ".json"}


# Formats


@pytest.mark.parametrize("block_bytes", [1, 7, 1 << 19])
def test_every_compression_is_read_and_seen_without_an_ending(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(readers, "BLOCK_BYTES", block_bytes)
    data = write(tmp_path / "a.jsonl", ["1", "2 3", "4"]).read_bytes()
    packed: dict[str, bytes] = {"a.gz": gzip.compress(data), "b.bz2": bz2.compress(data), "c.xz": lzma.compress(data),
                                "no_ending": gzip.compress(data), "two.gz": gzip.compress(data) + gzip.compress(data)}
    try:
        import zstandard
        packed["d.zst"] = zstandard.compress(data)
        packed["frames.zst"] = zstandard.compress(data) + zstandard.compress(data)
    except ImportError:
        pass
    for name, content in packed.items():
        path = tmp_path / name
        path.write_bytes(content)
        assert texts_of([path]) == ["1", "2 3", "4"] * (1 + (name in ("two.gz", "frames.zst")))
        if name != "no_ending":
            path.write_bytes(content[:-9])
            with pytest.raises(DataError, match=f"{name} cannot be read: "):
                texts_of([path])


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    (tmp_path / "a.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    for name, package in (("a.parquet", "pyarrow"), ("a.zst", "zstandard")):
        with pytest.raises(InstallationError, match=f"pip install {package}"):
            find_parts([str(tmp_path / name)])


def test_text_files_are_documents(tmp_path):
    names = ["b.txt", "a.md", "sub/c.rst", ".hidden.txt", ".git/d.txt", "image.png", "out.report.json"]
    for place, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + f"{place}\n".encode())
    (tmp_path / "e.txt.gz").write_bytes(gzip.compress(b"6"))
    assert texts_of([tmp_path]) == ["1\n", "0\n", "6", "2\n"]
    assert texts_of([tmp_path / "image.png"], "text") == ["5\n"]
    with pytest.raises(DataError, match="has no files whose names end in"):
        (tmp_path / "empty").mkdir()
        find_parts([str(tmp_path / "empty")])


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 1 << 19])
def test_a_separator_divides_text_files(tmp_path, monkeypatch, block_bytes):
    """The documents do not depend on where blocks end, also where separators could overlap."""
    monkeypatch.setattr(readers, "BLOCK_BYTES", block_bytes)
    for content in ("a\n\n\nb\n\nc\n\n", "\n\n\n\n\n", "abc", "", "x\n\n", "\nx\n\n\n\ny\n"):
        (tmp_path / "a.txt").write_text(content)
        expected = content.split("\n\n")
        expected = expected[:-1] if not expected[-1] else expected
        assert texts_of([tmp_path / "a.txt"], separator=b"\n\n") == expected


def test_parquet_files_are_read(tmp_path, monkeypatch):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    monkeypatch.setattr(readers, "BLOCK_RECORDS", 3)
    texts = [f"{number} 7" for number in range(10)]
    parquet.write_table(arrow.table({"n": list(range(10)), "text": texts}), tmp_path / "a.parquet", row_group_size=4)
    assert texts_of([tmp_path / "a.parquet"]) == texts
    assert texts_of([tmp_path / "a.parquet"], start=Position(0, 5, 5)) == texts[5:]
    blocks = list(read_blocks(find_parts([str(tmp_path / "a.parquet")]), ("text",)))
    assert sum(block.bytes_read for block in blocks) == (tmp_path / "a.parquet").stat().st_size
    parquet.write_table(arrow.table({"text": ["1", None, "2"]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="b.parquet, row 2: 'text' is not a string .it is a NoneType"):
        texts_of([tmp_path / "b.parquet"])
    parquet.write_table(arrow.table({"body": ["1"]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match="c.parquet has no column 'text'; its columns are 'body'"):
        texts_of([tmp_path / "c.parquet"])
    (tmp_path / "d.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(DataError, match="d.parquet cannot be read"):
        texts_of([tmp_path / "d.parquet"])


@pytest.mark.parametrize("content, reason", [(b"a\xffb", "invalid UTF-8"), (b"a\0b", "NUL byte")])
def test_files_that_are_not_text_are_named(tmp_path, content, reason):
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "b.txt").write_bytes(b"5")
    with pytest.raises(DataError, match=f"a.txt: {reason} .byte 2"):
        texts_of([tmp_path])
    assert texts_of([tmp_path], skip=True) == ["5"]


def test_input_that_cannot_be_read_is_named_at_the_start(tmp_path):
    (tmp_path / "a.zip").touch()
    for word, message in ((tmp_path / "a.zip", "this format is not read"), (tmp_path / "no", "does not exist")):
        with pytest.raises(DataError, match=message):
            find_parts([str(word)])
    with pytest.raises(DataError, match="twice"):
        find_parts(["-", "-"])


# Shares


@settings(max_examples=60, deadline=None, derandomize=True)
@given(sizes=st.lists(st.lists(st.integers(0, 30), max_size=6), min_size=1, max_size=4), count=st.integers(1, 9),
       compressed=st.sets(st.integers(0, 3)), last_line_end=st.booleans())
def test_shares_are_the_whole_input_in_order(tmp_path_factory, sizes, count, compressed, last_line_end):
    directory, expected = tmp_path_factory.mktemp("shares"), []
    for place, lengths in enumerate(sizes):
        texts = [f"{place} {number} " + "7" * length for number, length in enumerate(lengths)]
        expected += texts
        data = write(directory / f"{place}.jsonl", texts).read_bytes()
        data = data if last_line_end else data[:-1]
        (directory / f"{place}.jsonl").write_bytes(gzip.compress(data) if place in compressed else data)
    parts = find_parts([str(directory)])
    found, places = [], []
    for index in range(count):
        for block in read_blocks(choose_share(parts, index, count)):
            rows = parse(block, ("text",), BadRecords(block.place_of, False))
            found += [row[0] for row in rows[1]]
            places += [block.place_of(place) for place in rows[0]]
    assert found == expected
    assert places == [f"{directory}/{text.split()[0]}.jsonl, line {int(text.split()[1]) + 1}" for text in expected]


def test_merged_shares_are_the_bytes_of_the_whole(tmp_path):
    source = write(tmp_path / "in.jsonl", ["1 2", "", "3", "4 5 6", "", "7"] * 20)
    run([source], tmp_path / "whole")
    for index in range(3):
        parts = choose_share(find_parts([str(source)]), index, 3)
        Preprocessor(parts, NULL, Output(str(tmp_path / f"part_{index}"), may_be_empty=True)).run(1)
    merge_datasets.main(["--input", f"{tmp_path}/part_*_document.idx", "--output-prefix", f"{tmp_path}/merged",
                         "--checksum"])
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"merged{ending}").read_bytes() == (tmp_path / f"whole_text_document{ending}").read_bytes()
    assert find_damage(tmp_path / "merged") == []


def test_what_cannot_be_merged_is_refused(tmp_path):
    for name, dtype in (("a", np.uint16), ("b", np.int32)):
        with IndexedDatasetBuilder(tmp_path / name, dtype) as builder:
            builder.add_document([1, 2])
            builder.finalize()
    a, b, out = (str(tmp_path / name) for name in ("a", "b", "out"))
    nothing = str(tmp_path / "no*")
    for words, message in (([a, b], "int32 tokens"), ([a, a + ".bin"], "twice"), ([nothing], "no token set")):
        with pytest.raises(DataError, match=message):
            merge_datasets.main(["--input", *words, "--output-prefix", out])
    with pytest.raises(DataError, match="also an input"):
        merge_datasets.main(["--input", a, "--output-prefix", a])
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx", "b.bin", "b.idx"]


# Interrupted runs


class Stop(Exception):
    """Ends a run in the middle."""


def interrupted(paths: list[Path], prefix: Path, blocks: int, job: Job = NULL, partitions: int = 1) -> None:
    """Run until ``blocks`` blocks are written, and stop there as a killed process would: without cleaning up."""
    seen = 0

    def progress(count: int, summary: Summary) -> None:
        nonlocal seen
        seen += 1
        if seen == blocks:
            raise Stop

    output = Output(str(prefix), partitions, resume=True)
    with pytest.raises(Stop):
        Preprocessor(find_parts(list(map(str, paths))), job, output).run(1, progress)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few records, and a note after each of them."""
    monkeypatch.setattr(readers, "BLOCK_BYTES", 30)
    monkeypatch.setattr(readers, "BLOCK_RECORDS", 2)
    monkeypatch.setattr(preprocess, "SECONDS_BETWEEN_NOTES", -1.0)


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_run_is_continued_any_number_of_times(tmp_path, small_blocks, partitions):
    one = write(tmp_path / "a.jsonl", ["1", "", "2 3"] * 4)
    two = tmp_path / "b.jsonl.gz"
    two.write_bytes(gzip.compress(write(tmp_path / "b", ["4 5 6"] * 9).read_bytes()))
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(f"{number}")
    paths = [one, two, *sorted(tmp_path.glob("*.txt")), one]
    whole = run(paths, tmp_path / "whole", partitions=partitions)
    interrupted(paths, tmp_path / "out", 2, partitions=partitions)
    with pytest.raises(DataError, match="an unfinished run is there .* Pass --resume"):
        run(paths, tmp_path / "out")
    with pytest.raises(DataError, match=r"differs in --append-eod"):
        run(paths, tmp_path / "out", job(append_eod=False), resume=True, partitions=partitions)
    for blocks in (3, 2, 2, 4):
        interrupted(paths, tmp_path / "out", blocks, partitions=partitions)
        assert not list(tmp_path.glob("out*.bin")) and not list(tmp_path.glob("out*.idx"))
    summary = run(paths, tmp_path / "out", resume=True, partitions=partitions)
    # A decompressor reads ahead, so that its place on the disk, which only the progress bar shows, may differ.
    assert {**summary.as_json(), "bytes_read": 0} == {**whole.as_json(), "bytes_read": 0}
    assert {name.replace("out", "whole"): data for name, data in files(tmp_path, "out").items()} == \
        files(tmp_path, "whole")
    assert not list(tmp_path.glob("*unfinished*"))


def test_a_finished_run_is_not_repeated(tmp_path):
    source = write(tmp_path / "in.jsonl", ["1"])
    run([source], tmp_path / "out", resume=True)

    def finished(job: Job = NULL) -> bool:
        output = Output(str(tmp_path / "out"), resume=True)
        return Preprocessor(find_parts([str(source)]), job, output).complete_already()

    assert finished() and not finished(job(append_eod=False))
    write(source, ["1", "2"])
    assert not finished()
    # Input that changes during a run counts as changed.
    output = Output(str(tmp_path / "out"))
    Preprocessor(find_parts([str(source)]), NULL, output).run(1, lambda count, summary: os.utime(source, (1, 1)))
    assert not finished()


def test_working_files_that_were_cut_are_refused(tmp_path, small_blocks):
    source = write(tmp_path / "in.jsonl", ["1 2 3"] * 9)
    interrupted([source], tmp_path / "out", 3)
    os.truncate(tmp_path / "out_text_document.bin.unfinished", 2)
    with pytest.raises(DataError, match="has 2 bytes, but had"):
        run([source], tmp_path / "out", resume=True)
    (tmp_path / "out.unfinished.json").write_text("{")
    with pytest.raises(DataError, match="out.unfinished.json cannot be read"):
        run([source], tmp_path / "out", resume=True)


def test_a_bad_line_after_a_note_keeps_the_work(tmp_path, small_blocks):
    source = write(tmp_path / "in.jsonl", ["1 2"] * 9)
    source.write_text(source.read_text() + "{\n" + '{"text": "3"}\n')
    with pytest.raises(DataError, match="line 10"):
        run([source], tmp_path / "out")
    summary = run([source], tmp_path / "out", job(skip_errors=True), resume=True)
    assert summary.documents == 10 and summary.skipped.counts == {"malformed JSON": 1}
    (example,) = read_report(str(tmp_path / "out"))["skipped"]["malformed JSON"]["examples"]
    assert example[0].endswith("in.jsonl, line 10") and example[2] == "{"


def test_two_processes_do_not_write_one_output(tmp_path):
    source = write(tmp_path / "in.jsonl", ["1"])
    with Preprocessor(find_parts([str(source)]), NULL, Output(str(tmp_path / "out"))).journal.lock(), \
            pytest.raises(DataError, match="another process is writing this output"):
        run([source], tmp_path / "out")
    run([source], tmp_path / "out")


def test_checksums_are_written_and_go_with_the_files(tmp_path):
    source = write(tmp_path / "in.jsonl", ["1 2 3"])
    run([source], tmp_path / "out", checksum=True)
    prefix = tmp_path / "out_text_document"
    assert find_damage(prefix) == []
    run([source], tmp_path / "out")
    assert not os.path.exists(checksum_path(prefix)), "sums of the files before these"


# Damage


def damage(data: bytes, kind: str, place: int, byte: int) -> bytes:
    place = place % max(len(data), 1)
    return {"change": data[:place] + bytes([byte]) + data[place + 1:], "remove": data[:place] + data[place + 1:],
            "insert": data[:place] + bytes([byte]) + data[place:], "cut": data[:place]}[kind]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["change", "remove", "insert", "cut"]), st.integers(0, 300),
                          st.sampled_from(b'"\\{}\n\x00\xff:, u1a\xed\r')), min_size=1, max_size=3), st.booleans())
def test_damaged_lines_are_named_or_read_as_json_reads_them(tmp_path_factory, changes, skip):
    """Every line is either a document as the json module reads it, or one that the messages name and count."""
    directory = tmp_path_factory.mktemp("fuzz")
    good = [f"{number} {number * 7 % 1000}" for number in range(12)]
    data = write(directory / "in.jsonl", good).read_bytes()
    for kind, place, byte in changes:
        data = damage(data, kind, place, byte)
    (directory / "in.jsonl").write_bytes(data)
    lines = [line for line in data.split(b"\n") if line.strip()]
    expected = [ids for line in lines if (ids := _ids_of(line)) is not None]
    try:
        summary = run([directory / "in.jsonl"], directory / "out", job(skip_errors=skip))
    except DataError as error:
        assert (not skip and len(expected) < len(lines) and "in.jsonl, line " in str(error)) or \
            (not expected and "no documents" in str(error))
        assert os.listdir(directory) == ["in.jsonl"]
        return
    dataset = IndexedDataset(directory / "out_text_document")
    assert [dataset.get(i).tolist() for i in range(len(dataset))] == [[*ids, 999] for ids in expected if ids]
    assert summary.documents == len(expected) and summary.skipped.counts.total() == len(lines) - len(expected)


def _ids_of(line: bytes) -> list[int] | None:
    try:
        words = json.loads(line.removeprefix(b"\xef\xbb\xbf").decode())["text"].split()
        ids = [int(word) for word in words]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return ids if all(0 <= i < 1000 for i in ids) else None


def test_percentiles_are_those_of_the_lengths() -> None:
    lengths = np.concatenate([np.random.RandomState(1).randint(1, 3000, 5000), [5_000_001]])
    counts = LengthCounts()
    for start in range(0, len(lengths), 777):
        counts.add(lengths[start:start + 777])
    exact = np.percentile(lengths, [1, 50, 99], method="inverted_cdf")
    found = counts.percentiles()
    assert np.allclose([found[1], found[50], found[99]], exact, rtol=0.002) and counts.longest == 5_000_001
    assert LengthCounts().percentiles() == {}
