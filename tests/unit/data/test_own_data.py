"""``--dataset-provider``: a user's datasets, samples and documents, and what is said about their mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_sp.config.cli.flags import parse
from megatron_sp.config.load import load_run
from megatron_sp.config.schema import Data
from megatron_sp.data.batch import BatchReader
from megatron_sp.data.blend import BlendedDataset
from megatron_sp.data.build import Splits, build_datasets
from megatron_sp.data.gpt_dataset import Dataset, GPTDataset
from megatron_sp.data.own_data import documents
from megatron_sp.data.token_files.indexed_dataset import IndexedDataset
from megatron_sp.data.tokenizers.tokenizer import NullTokenizer
from megatron_sp.errors import ConfigError, DataError
from megatron_sp.layout.tokens import SequenceLayout
from tests.integration.programs import ROOT
from tests.unit.data.test_indexed import SET_A

PROVIDER = """
import numpy as np, torch
from megatron_sp.data.own_data import documents

class Items:
    def __init__(self, items):
        self.items = items
    def __len__(self):
        return len(self.items)
    def __getitem__(self, i):
        return self.items[i]

class Windows:
    def __init__(self, length):
        self.seq_length = length
        self.asked = []
    def __len__(self):
        return 9
    def window(self, sample, start, stop):
        self.asked.append((sample, start, stop))
        return np.arange(start, stop)
    def document_starts(self, sample):
        return np.zeros(1, dtype=np.int64)
    def source(self, sample):
        return "windows"
    def describe(self):
        return "windows"

"""


def provided(tmp_path: Path, body: str, sizes: tuple[int, int, int] = (5, 0, 0), **flags: Any) -> Splits:
    """Return the datasets of a provider whose function ``provide(request)`` has this body; sequences of 4 tokens."""
    path = tmp_path / "provider.py"
    path.write_text(PROVIDER + "def provide(request):\n" + "".join(f"    {line}\n" for line in body.splitlines()))
    data = Data(seq_length=4, dataset_provider=f"{path}:provide", **flags)
    return build_datasets(data, None, sizes, 1234, tokenizer=NullTokenizer(1000))


def train_of(splits: Splits) -> Dataset:
    assert splits.train is not None
    return splits.train


@pytest.mark.parametrize("item", ["[5 * i, 1, 2, 3, 4]", "torch.tensor([5 * i, 1, 2, 3, 4])",
                                  "np.array([5 * i, 1, 2, 3, 4], dtype=np.uint16)",
                                  "{'input_ids': [5 * i, 1, 2, 3, 4], 'labels': None}",
                                  "{'tokens': torch.tensor([5 * i, 1, 2, 3, 4], dtype=torch.int32)}",
                                  "(torch.tensor([5 * i, 1, 2, 3, 4]),)"])
def test_samples_of_each_kind(tmp_path: Path, item: str) -> None:
    train = train_of(provided(tmp_path, f"return Items([{item} for i in range(3)])"))
    assert len(train) == 5
    assert [train.window(sample, 0, 5).tolist()[0] for sample in range(5)] == [0, 5, 10, 0, 5]  # repeated
    assert train.window(1, 1, 3).tolist() == [1, 2] and train.window(1, 0, 5).dtype == np.int64
    assert "3 samples of 4 tokens, read up to 2 times for 5 samples" in train.describe()
    assert train.document_starts(2).tolist() == [0]  # type: ignore[attr-defined]


def test_cyclic_samples_are_shuffled_anew_for_each_pass(tmp_path: Path) -> None:
    train = train_of(provided(tmp_path, "return Items([[i, 1, 2, 3, 4] for i in range(20)])", (50, 0, 0),
                              dataloader_type="cyclic"))
    first, second = ([int(train.window(sample, 0, 1)[0]) for sample in range(start, start + 20)] for start in (0, 20))
    assert sorted(first) == sorted(second) == list(range(20)) and first != second != sorted(second)


def test_the_request_says_what_the_run_needs(tmp_path: Path) -> None:
    splits = provided(tmp_path, "assert (request.split, request.num_samples) in (('train', 5), ('test', 2)), request\n"
                                "assert (request.seq_length, request.seed, request.tokenizer.eod) == (4, 1234, 999)\n"
                                "assert request.arguments == {'a': '1=2', 'b': ''}\n"
                                "return None if request.split == 'test' else Items([[0, 1, 2, 3, 4]])", (5, 0, 2),
                      dataset_arguments=("a=1=2", "b="))
    assert splits.train is not None and splits.valid is None and splits.test is None


def test_a_users_reader_of_windows_is_asked_for_no_other_tokens(tmp_path: Path) -> None:
    train = train_of(provided(tmp_path, "return Windows(request.seq_length)"))
    with BatchReader(train, SequenceLayout(4, ring=2, kind="zigzag"), 0, 0, 1) as reader:
        [batch] = reader.read(3, 1, 1)
    assert batch.tokens.tolist() == [[0, 3]] and train.asked == [(3, 0, 2), (3, 3, 5)]  # type: ignore[attr-defined]


def test_an_item_is_read_once_for_all_its_pieces(tmp_path: Path) -> None:
    train = train_of(provided(tmp_path, "class Counting(Items):\n    read = 0\n    def __getitem__(self, i):\n"
                                        "        Counting.read += 1\n        return self.items[i]\n"
                                        "return Counting([[0, 1, 2, 3, 4]] * 9)"))
    for sample in range(3):
        train.window(sample, 0, 2)
        train.window(sample, 2, 4)
    assert train.dataset.read == 3  # type: ignore[attr-defined]


def test_documents_come_in_the_order_of_token_files(tmp_path: Path) -> None:
    """The same documents from a user's dataset and from token files give the same samples."""
    body = ("from megatron_sp.data.token_files.indexed_dataset import IndexedDataset\n"
            f"source = IndexedDataset({str(SET_A)!r})\n"
            "return documents(Items([{'ids': source.get(i)} for i in range(len(source))]), 'ids')")
    train = train_of(provided(tmp_path, body, (30_000, 0, 0), data_cache_path=str(tmp_path / "cache")))
    expected = GPTDataset(IndexedDataset(SET_A), np.arange(48), 30_000, 4, 1234)
    assert isinstance(train, GPTDataset) and not isinstance(train, BlendedDataset)
    assert np.array_equal(train.shuffle_index, expected.shuffle_index)
    for sample in (0, 17, 29_999):
        assert np.array_equal(train.window(sample, 0, 5), expected.window(sample, 0, 5))
    assert len(list((tmp_path / "cache").iterdir())) == 2  # an entry and its lock


@pytest.mark.parametrize("body, said", [
    ("return Items([])", "has no items"),
    ("return Items([[1, 2, 3]])", "item 0 of the train set has 3 tokens; a sample has --seq-length + 1 = 5"),
    ("return Items([[1., 2., 3., 4., 5.]])", "is an array of float64"),
    ("return Items([[[1, 2], [3, 4]], 5])", "with the shape [2, 2]"),
    ("return Items(['hello'])", "is an array of <U5"),
    ("return Items([[[1], [2, 3]]])", "cannot be read as token ids"),
    ("return Items([{'text': 'hello'}])", "has the keys text, but none of input_ids, tokens"),
    ("return 7", "returned a int for the train set"),
    ("return None", "returned no training set"),
    ("return (item for item in [[1, 2, 3, 4, 5]])", "returned a generator"),
    ("return Windows(8)", "has samples of 8 tokens, not of --seq-length 4"),
    ("class Few:\n    seq_length = 4\n    def window(self, sample, start, stop): pass\nreturn Few()",
     "has window, but not __len__, document_starts, source, describe"),
    ("return documents(Items([{'a': [1]}]), 'b')", "document 0 has the keys a, but none of b"),
    ("return documents(Items([]))", "no tokens"),
    ("return {}['x']", "failed for the train set: KeyError: 'x'"),
    ("import no_such_package", "No module named 'no_such_package'"),
    ("return open('/no/such/file')", "FileNotFoundError"),
])
def test_mistakes_are_named(tmp_path: Path, body: str, said: str) -> None:
    with pytest.raises(DataError) as error:
        train_of(provided(tmp_path, body)).window(0, 0, 5)
    assert said in str(error.value)
    if "failed" in said:
        assert "provider.py, line" in str(error.value)


def test_flags(tmp_path: Path) -> None:
    def problems(words: str) -> str:
        with pytest.raises(ConfigError) as error:
            load_run(words.split(), 1)
        return str(error.value)

    assert "must be FILE.py:FUNCTION" in problems("--dataset-provider x.py")
    assert "--dataset-arguments: a must be NAME=VALUE" in problems("--dataset-provider x.py:f --dataset-arguments a")
    assert "has no effect without --dataset-provider" in problems("--dataset-arguments a=b --mock-data")
    assert "--mock-data and --dataset-provider exclude each other" in problems("--mock-data --dataset-provider x.py:f")
    assert f"there is no file {tmp_path}/x.py" in problems(f"--dataset-provider {tmp_path}/x.py:f")
    assert not parse(["--dataset-provider", "package.module:f"]).problems


@pytest.mark.parametrize("content, name, said", [
    ("def f(request): pass", "g", "has no function g"), ("f = 3", "f", "has no function f"),
    ("import no_such_package", "f", "cannot be imported: ModuleNotFoundError"), ("def f(", "f", "SyntaxError"),
    ("raise SystemExit", "f", r"cannot be imported: SystemExit \(.*x.py, line 1\)"),
])
def test_files_that_cannot_be_imported(tmp_path: Path, content: str, name: str, said: str) -> None:
    (tmp_path / "x.py").write_text(content)
    with pytest.raises(DataError, match=said):
        build_datasets(Data(seq_length=4, dataset_provider=f"{tmp_path}/x.py:{name}"), None, (5, 0, 0), 1)


def test_the_bytes_of_the_example(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(100)))
    data = Data(seq_length=8, dataset_provider=f"{ROOT}/examples/own_datasets.py:bytes_of_a_file",
                dataset_arguments=(f"path={tmp_path}/text",))
    splits = build_datasets(data, None, (3, 1, 0), 1)
    assert train_of(splits).window(2, 0, 9).tolist() == list(range(16, 25))
    assert splits.valid is not None and splits.valid.window(0, 0, 9).tolist() == list(range(90, 99))


@pytest.mark.parametrize("name, column", [("hugging_face", "input_ids"), ("hugging_face_texts", "text")])
def test_a_hugging_face_directory(tmp_path: Path, name: str, column: str) -> None:
    """Runs where the package ``datasets`` is installed, which is optional."""
    datasets = pytest.importorskip("datasets")
    rows = [list(range(start, start + length)) for start, length in ((0, 3), (10, 0), (20, 9), (40, 1))]
    whole = datasets.Dataset.from_dict({"input_ids": rows, "text": [" ".join(map(str, row)) for row in rows]})
    directory = str(tmp_path / "data")
    datasets.DatasetDict({"train": whole.select([3, 2, 1, 0]), "validation": whole}).save_to_disk(directory)
    data = Data(seq_length=4, dataset_provider=f"{ROOT}/examples/own_datasets.py:{name}",
                dataset_arguments=(f"directory={directory}", f"column={column}"))
    splits = build_datasets(data, None, (7, 2, 0), 1, tokenizer=NullTokenizer(1000))
    end = [999] if column == "text" else []
    for dataset, expected in ((splits.train, [rows[i] + end for i in (3, 2, 1, 0)]),
                              (splits.valid, [row + end for row in rows])):
        assert isinstance(dataset, GPTDataset) and dataset.indexed.lengths.tolist() == list(map(len, expected))
        row = [token for document in dataset.document_index for token in expected[document]]
        for sample in range(len(dataset)):
            place = 4 * int(dataset.shuffle_index[sample])
            assert dataset.window(sample, 0, 5).tolist() == row[place:place + 5]
            assert dataset.window(sample, 2, 4).tolist() == row[place + 2:place + 4]
    with pytest.raises(DataError, match="no column 'x'; it has input_ids, text"):
        documents(whole, "x")
    with pytest.raises(DataError, match="not lists of token ids"):
        documents(whole, "text")
