"""The order of samples equals Megatron-core's, index for index."""

import hashlib
import os
import resource
from unittest import mock

import numpy as np
import pytest

from benchmarks.data import data_order
from megatron_sp.config.schema import Data
from megatron_sp.data import blend as blends
from megatron_sp.data import sample_order as order
from megatron_sp.data.blend import BlendedDataset, blend_order, exhaustive_order, parse_data_path
from megatron_sp.data.build import Splits, build_datasets
from megatron_sp.data.gpt_dataset import GPTDataset
from megatron_sp.data.token_files.indexed_dataset import IndexedDataset
from megatron_sp.data.token_files.token_writer import IndexedDatasetBuilder
from megatron_sp.errors import DataError
from megatron_sp.layout.document_split import parse_split, split_bounds
from tests.unit.data.test_indexed import FIXTURES, SET_A, SET_B, write
from tests.unit.data.test_preprocess import gpt2_data, preprocess

SPLITS = ("train", "valid", "test")


def stored(name: str) -> dict[str, np.ndarray]:
    with np.load(FIXTURES / "npz" / f"{name}.npz") as arrays:
        return {key: arrays[key] for key in arrays.files}


def same_order(dataset: GPTDataset, expected: dict[str, np.ndarray], prefix: str = "") -> None:
    for name, found in (("document_index", dataset.document_index), ("sample_index", dataset.sample_index()),
                        ("shuffle_index", dataset.shuffle_index), ("indexed_indices", dataset.document_ids)):
        assert np.array_equal(found, expected[prefix + name]), name


@pytest.fixture(scope="module")
def odd_set(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    from megatron_sp.data.corpus.encode import Job

    prefix = tmp_path_factory.mktemp("odd") / "odd"
    preprocess([str(FIXTURES / "jsonl" / "odd.jsonl")], str(prefix), Job(gpt2_data(), 0, ("text",), True), 1)
    return IndexedDataset(f"{prefix}_text_document")


@pytest.mark.parametrize("name", ["gpt_a_s64_1epoch", "gpt_a_s64_n100", "gpt_a_s64_n2000", "gpt_odd_s32_n2500",
                                  "gpt_a_s1024_reset_eodmask"])
def test_gpt_dataset(name, odd_set):
    expected = stored(name)
    count = int(expected["num_samples"])
    length = int(expected["seq_length"])
    dataset = GPTDataset(odd_set if "odd" in name else IndexedDataset(SET_A), expected["indexed_indices"],
                         None if count < 0 else count, length, int(expected["seed"]))
    same_order(dataset, expected)
    for sample, (tokens, labels) in enumerate(zip(expected["s_tokens"], expected["s_labels"])):
        assert np.array_equal(dataset.window(sample, 0, length), tokens)
        assert np.array_equal(dataset.window(sample, 1, length + 1), labels)


def test_sample_index_without_the_extra_token_and_with_a_partial_sample():
    indexed = IndexedDataset(SET_A)
    for name, extra, samples in (("gpt_a_s64_noextra", 0, 881), ("gpt_a_s64_valid_keep_partial", 1, 882)):
        expected = stored(name)
        starts = order.build_starts(indexed.lengths, expected["document_index"])
        assert np.array_equal(order.build_sample_index(starts, samples, 64, extra), expected["sample_index"])


def test_final_epoch_is_shuffled_alone_when_little_of_it_is_used():
    # 100 tokens, 9 samples of 10 in an epoch; 10 samples use 1 of the second epoch's.
    plan = order.plan_epochs(100, 10, 10)
    assert (plan.num_epochs, plan.first_shuffle, plan.num_samples, plan.separate_final_epoch) == (2, 9, 19, True)
    assert not order.plan_epochs(100, 10, 19).separate_final_epoch
    index = order.build_document_index(np.arange(5), plan, np.random.RandomState(0))
    assert sorted(index[:5]) == sorted(index[5:]) == list(range(5))


def test_counts_beyond_2_to_the_31():
    plan = order.plan_epochs(1_000_003, 7, 3_000_000_000)
    assert plan.num_epochs * 1_000_003 > 2**34 and plan.num_samples >= 3_000_000_000
    starts = order.build_starts(np.array([2**31 - 1, 5], dtype=np.int32), np.array([0, 0, 0, 1]))
    assert starts.tolist() == [0, 2**31 - 1, 2**32 - 2, 3 * 2**31 - 3, 3 * 2**31 + 2]
    assert order.locate(starts, 3 * 2**31 - 3) == 3


def test_a_sample_index_beyond_2_to_the_31():
    """Three epochs of two documents of 2^31 - 1 tokens: positions beyond 2^33 are found without an array of samples."""
    lengths = np.full(2, 2**31 - 1, dtype=np.int32)
    plan = order.plan_epochs(int(lengths.sum(dtype=np.int64)), 2, 3 * (2**31 - 2))
    assert (plan.num_epochs, plan.num_samples) == (3, 3 * (2**31 - 1) - 1)
    starts = order.build_starts(lengths, np.array([0, 1, 1, 0, 0, 1], dtype=np.int32))
    last = 2 * (plan.num_samples - 1)
    assert last > 2**33 and order.locate(starts, np.array([2**31 - 2, 2**31 - 1, last])).tolist() == [0, 1, 5]
    assert last + 2 + 1 <= starts[-1] < last + 4 + 1


def test_the_benchmark_of_large_corpora_runs():
    found = data_order.measure(documents=1000, samples=20_000, seq_length=8, repeats=1)
    assert found["samples"] >= 20_000 and found["bytes_per_sample"] == 4


def test_split_by_documents():
    with_split = Data(seq_length=64, data_path=(str(SET_A),), split="90,8,2")
    splits = build_without_cache(with_split, (200, 20, 10))
    assert splits.train is not None and len(splits.train) == 783
    for name, dataset in (("valid", splits.valid), ("test", splits.test)):
        assert isinstance(dataset, GPTDataset)
        same_order(dataset, stored(f"build_a_split_{name}"))


def build_without_cache(data: Data, sizes: tuple[int | None, ...]) -> Splits:
    with mock.patch("megatron_sp.data.build._Builder._cache", lambda self, prefix: blends.IndexCache()):
        return build_datasets(data, 50256, sizes, 1234)


def test_weighted_blend():
    data = Data(seq_length=64, data_path=("0.3", str(SET_A), "0.7", str(SET_B)), split="90,8,2")
    splits = build_without_cache(data, (400, 40, 10))
    for name in SPLITS:
        expected, dataset = stored(f"blend_ab_weights_{name}"), getattr(splits, name)
        assert isinstance(dataset, BlendedDataset)
        assert np.array_equal(dataset.dataset_index, expected["dataset_index"])
        assert np.array_equal(dataset.dataset_sample_index, expected["dataset_sample_index"])
        for place, member in enumerate(dataset.datasets):
            assert isinstance(member, GPTDataset)
            same_order(member, expected, f"d{place}_")
        for sample, tokens in enumerate(expected["s_tokens"]):
            assert np.array_equal(dataset.window(sample, 0, 64), tokens)


@pytest.mark.parametrize("name, sizes", [("noweights", (400, 40, 10)), ("exhaustive", (None, None, None))])
def test_blend_without_weights(name, sizes):
    splits = build_without_cache(Data(seq_length=64, data_path=(str(SET_A), str(SET_B)), split="90,8,2"), sizes)
    expected, dataset = stored(f"blend_ab_{name}_test"), splits.test
    assert isinstance(dataset, BlendedDataset)
    assert np.array_equal(dataset.dataset_index, expected["dataset_index"])
    assert np.array_equal(dataset.dataset_sample_index, expected["dataset_sample_index"])
    for place, member in enumerate(dataset.datasets):
        assert isinstance(member, GPTDataset)
        same_order(member, expected, f"d{place}_")


@pytest.mark.parametrize("few", [0, 8])
def test_blend_order(few, monkeypatch):
    monkeypatch.setattr(blends, "FEW", few)
    expected = stored("helper_blending_indices")
    for found, name in zip(blend_order(expected["weights"].tolist(), 500), ("dataset_index", "dataset_sample_index")):
        assert np.array_equal(found, expected[name])
    expected = stored("blend_ab_noweights_train")  # the weights are the members' sizes
    assert np.array_equal(blend_order(expected["weights"].tolist(), 400)[0], expected["dataset_index"])


def test_exhaustive_order():
    expected = stored("helper_exhaustive_blending_indices")
    for found, name in zip(exhaustive_order(expected["sizes"].tolist()), ("dataset_index", "dataset_sample_index")):
        assert np.array_equal(found, expected[name])


def test_blend_without_weights_repeats_when_one_epoch_is_not_enough():
    data = Data(seq_length=64, data_path=(str(SET_A), str(SET_B)), split="100")
    train = build_without_cache(data, (5000, 0, 0)).train
    assert train is not None and len(train) >= 5000
    assert len(train.window(4999, 0, 65)) == 65


@pytest.mark.parametrize("weights, count", [
    ((0.001, 0.999), 3000), ((1e-8, 14486363187.0), 3000), ((0.5,) + (1e-6,) * 20, 3000),
    ((0.5,) + (0.005,) * 100, 210),  # rounding up 100 small shares makes the blend draw more of the large one
])
def test_extreme_weights_never_leave_a_dataset(tmp_path, weights, count):
    random = np.random.RandomState(0)
    path: list[str] = []
    for place, weight in enumerate(weights):
        write(tmp_path / f"set{place}", [random.randint(0, 99, 40).tolist() for _ in range(50)])
        path += [str(weight), str(tmp_path / f"set{place}")]
    train = build_without_cache(Data(seq_length=16, data_path=tuple(path), split="100"), (count, 0, 0)).train
    assert train is not None and len(train) >= count
    for sample in range(len(train)):
        assert len(train.window(sample, 0, 2)) == 2


def test_data_path_forms():
    assert parse_data_path(["A"]).weights is None and parse_data_path(["A", "B"]).prefixes == ("A", "B")
    assert parse_data_path(["A", "B", "C"]).prefixes == ("A", "B", "C")
    blend = parse_data_path(["3 A", "1", "B"])
    assert blend.prefixes == ("A", "B") and blend.weights == (0.75, 0.25)
    assert parse_data_path(["1.0", "A"]) == parse_data_path(["A"])
    assert parse_data_path(["1", "A", "0", "B"]) == parse_data_path(["A"])


@pytest.mark.parametrize("words, match", [
    ([], "empty"), (["0", "A", "0", "B"], "add up to 0"), (["-1", "A", "2", "B"], "-1"),
    (["0.5", "A", "B", "C"], "B stands where a weight"), (["0.5", "A", "0.5"], "pairs"), (["nan", "A"], "nan"),
])
def test_data_paths_that_make_no_sense(words, match):
    with pytest.raises(DataError, match=match):
        parse_data_path(words)


def test_split_shares():
    assert parse_split("969, 30, 1") == (0.969, 0.03, 0.001)
    assert parse_split("100") == parse_split("1,0,0") == (1.0, 0.0, 0.0)
    assert split_bounds(parse_split("949,50,1"), 10**9)[2] == (999000000, 1000000000)
    for bad in ("-1,1,0", "90,abc5,5", "0,0,0", "", "1,2,3,4", "nan", "1,.,1"):
        with pytest.raises(DataError, match="--split"):
            parse_split(bad)


def test_an_empty_split_is_an_error_that_names_it(tmp_path):
    write(tmp_path / "x", [[1, 2, 3]] * 10)
    data = Data(seq_length=2, data_path=(str(tmp_path / "x"),), split="969,30,1")
    with pytest.raises(DataError, match="test split.*10 documents"):
        build_without_cache(data, (5, 0, 5))
    splits = build_without_cache(data, (5, 0, 0))
    assert splits.valid is None and splits.test is None
    write(tmp_path / "y", [[1, 2, 3]] * 50)
    with pytest.raises(DataError, match="test split.*98,1,1.*50 documents"):  # half a document, rounded to none
        build_without_cache(Data(seq_length=2, data_path=(str(tmp_path / "y"),), split="98,1,1"), (50, 5, 5))
    no_share = Data(seq_length=2, data_path=(str(tmp_path / "x"),), split="98,2,0")
    with pytest.raises(DataError, match="validation split"):
        build_without_cache(no_share, (5, 5, 5))
    assert build_without_cache(no_share, (5, 0, 5)).test is None  # a share of 0 means: no such set


def test_a_tiny_corpus_is_repeated_or_refused(tmp_path):
    indexed = write(tmp_path / "x", [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]])
    dataset = GPTDataset(indexed, np.arange(2), 3, 64, 1)
    row = np.concatenate([indexed.get(i) for i in dataset.document_index])
    for sample, place in enumerate(dataset.shuffle_index):
        assert np.array_equal(dataset.window(sample, 0, 65), row[64 * place:64 * place + 65])
    assert "10 tokens" in dataset.describe() and "times" in dataset.describe()
    with pytest.raises(DataError, match="10 tokens.*64"):
        GPTDataset(indexed, np.arange(2), None, 64, 1)
    empty = write(tmp_path / "y", [[], []])
    with pytest.raises(DataError, match="no tokens"):
        GPTDataset(empty, np.arange(0), 3, 64, 1)


def test_a_window_touches_only_its_tokens(tmp_path, monkeypatch):
    random = np.random.RandomState(0)
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        for length in random.randint(1, 30, 200):
            builder.add_document(random.randint(0, 1000, length))
        builder.finalize()
    indexed = IndexedDataset(tmp_path / "x")
    dataset = GPTDataset(indexed, np.arange(200), 50, 128, 1)
    whole = [dataset.window(sample, 0, 129) for sample in range(len(dataset))]
    touched = 0
    get = IndexedDataset.get

    def counting(self, i, offset=0, length=None):
        nonlocal touched
        tokens = get(self, i, offset, length)
        touched += len(tokens)
        return tokens

    monkeypatch.setattr(IndexedDataset, "get", counting)
    for sample in range(len(dataset)):
        for start, stop in ((0, 33), (32, 65), (96, 129), (7, 7), (128, 129)):
            touched = 0
            assert np.array_equal(dataset.window(sample, start, stop), whole[sample][start:stop])
            assert touched == stop - start
    for start, stop in ((-1, 3), (0, 130), (5, 4)):
        with pytest.raises(IndexError):
            dataset.window(0, start, stop)


def test_separate_paths_for_each_split():
    data = Data(seq_length=64, train_data_path=(str(SET_A),), valid_data_path=("1", str(SET_A), "1", str(SET_B)))
    splits = build_without_cache(data, (100, 20, 10))
    assert isinstance(splits.train, GPTDataset) and len(splits.train.document_ids) == 48
    assert isinstance(splits.valid, BlendedDataset) and splits.test is None
    with pytest.raises(DataError, match="--train-data-path"):
        build_without_cache(Data(seq_length=64, valid_data_path=(str(SET_A),)), (100, 20, 10))
    with pytest.raises(DataError, match="no data"):
        build_without_cache(Data(seq_length=64), (100, 0, 0))


def test_descriptions_are_in_plain_words():
    data = Data(seq_length=64, data_path=("0.3", str(SET_A), "0.7", str(SET_B)), split="90,8,2")
    text = build_without_cache(data, (400, 0, 0)).describe()
    assert "blend of 2 datasets" in text and "50,168 tokens" in text and "per epoch" in text and "280 samples" in text


def test_missing_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.idx does not exist"):
        build_without_cache(Data(seq_length=8, data_path=(str(tmp_path / "nowhere"),)), (1, 0, 0))


def drawn_plainly(weights, size):
    """Megatron's rule in its plainest form."""
    counts, members = [0] * len(weights), []
    for step in range(size):
        errors = [weight * max(step, 1) - count for weight, count in zip(weights, counts)]
        best = errors.index(max(errors))
        members.append(best)
        counts[best] += 1
    return members


def test_weights_are_normalised_twice_as_megatron_does(tmp_path):
    """Dividing 7 9 4 5 5 by their sum a second time changes last bits, and these decide which set is drawn at a tie."""
    raw = [7, 9, 4, 5, 5]
    once = np.array(raw, dtype=np.float64) / np.sum(np.array(raw, dtype=np.float64))
    twice = once / np.sum(once)
    sizes = blends.member_sizes(once.tolist(), 400)
    expected = drawn_plainly(twice.tolist(), sum(sizes))
    assert expected != drawn_plainly(once.tolist(), sum(sizes))  # otherwise this test could not tell the two apart
    path: list[str] = []
    for place, weight in enumerate(raw):
        write(tmp_path / f"set{place}", [[place] * 40] * 20)
        path += [str(weight), str(tmp_path / f"set{place}")]
    train = build_without_cache(Data(seq_length=16, data_path=tuple(path), split="100"), (400, 0, 0)).train
    assert isinstance(train, BlendedDataset) and train.dataset_index.tolist() == expected


@pytest.mark.parametrize("raw, count, megatrons", [
    ((0.001, 1), 5001, "21060ac316624cdd"),
    ((0.3, 5, 10.5, 2, 10.5, 5, 10.5, 5, 0.3, 2, 10.5, 2), 1007, "f2c8f7685195940e"),
])
def test_ties_fall_as_in_megatron(raw, count, megatrons):
    """The digests are of megatron-core 0.16.1's blended builder for the same weights and number of samples.

    Its helper has no fused multiply-add on x86-64, and Python computes with the same float64 operations.
    """
    once = blends.normalised(raw)
    size = sum(blends.member_sizes(once, count))
    members, numbers = blend_order(blends.normalised(once), size)
    assert hashlib.sha256(members.tobytes() + numbers.tobytes()).hexdigest()[:16] == megatrons
    assert blend_order(once, size)[0].tolist() != members.tolist()  # else the second division would not matter here


def test_a_blend_has_at_most_as_many_members_as_its_index_can_number():
    words = [word for place in range(2**15) for word in ("1", f"set{place}")]
    assert len(parse_data_path(words[2:]).prefixes) == 2**15 - 1
    with pytest.raises(DataError, match="names 32768 token sets; a blend holds at most 32767"):
        parse_data_path(words)


def test_a_blend_of_very_many_sets_lists_the_largest(tmp_path):
    path: list[str] = []
    for place in range(50):
        write(tmp_path / f"set{place}", [[place] * 40] * 3)
        path += [str(100 if place == 49 else 1), str(tmp_path / f"set{place}")]
    train = build_without_cache(Data(seq_length=16, data_path=tuple(path), split="100"), (300, 0, 0)).train
    assert isinstance(train, BlendedDataset)
    lines = train.describe().splitlines()
    assert len(lines) == 1 + 40 + 1 and "set49:" in lines[-2] and "the 10 other datasets" in lines[-1]


def test_more_sets_than_files_may_be_open(tmp_path):
    """The limit of open files is raised as far as the system allows; beyond that the message names it."""
    path: list[str] = []
    for place in range(60):
        write(tmp_path / f"set{place}", [[place] * 40] * 3)
        path += ["1", str(tmp_path / f"set{place}")]
    data = Data(seq_length=16, data_path=tuple(path), split="100")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = len(os.listdir("/dev/fd")) + 40
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (least, before[1]))
        assert len(build_without_cache(data, (300, 0, 0)).describe().splitlines()) == 42
        resource.setrlimit(resource.RLIMIT_NOFILE, (least, before[1]))
        with mock.patch("megatron_sp.data.build.allow_open_files", lambda count: None), \
                pytest.raises(DataError, match=r"set\d+\.(idx|bin) cannot be read: Too many open files \(ulimit -n"):
            build_without_cache(data, (300, 0, 0))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("few", [0, 8])
def test_exhaustive_order_leaves_out_what_is_used_up(few, monkeypatch):
    monkeypatch.setattr(blends, "FEW", few)
    monkeypatch.setattr(blends, "CHUNK", 7)
    for sizes in ([3, 0, 50], [1, 1, 1, 20], [10, 10], [0, 5]):
        left, members = list(sizes), []
        for step in range(sum(sizes)):
            errors = [size / sum(sizes) * max(step, 1) - (size - rest) if rest else -np.inf
                      for size, rest in zip(sizes, left)]
            members.append(int(np.argmax(errors)))
            left[members[-1]] -= 1
        found, numbers = exhaustive_order(sizes)
        assert found.tolist() == members and np.bincount(found, minlength=len(sizes)).tolist() == sizes
        for member, size in enumerate(sizes):
            assert numbers[found == member].tolist() == list(range(size))
