"""Build the training, validation and test datasets that the data flags describe."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from megatron_sp.config.cli.named_sets import named_sets
from megatron_sp.config.schema import Data
from megatron_sp.data import blend as blends
from megatron_sp.data import own_data
from megatron_sp.data.blend import Blend, BlendedDataset, cached_order, member_sizes, parse_data_path
from megatron_sp.data.gpt_dataset import Dataset, GPTDataset, check_window, unlabelled
from megatron_sp.data.index_cache import IndexCache
from megatron_sp.data.mock import MockDataset
from megatron_sp.data.packing import PackedDataset
from megatron_sp.data.token_files.indexed_dataset import IndexedDataset, TokenSequences
from megatron_sp.errors import DataError
from megatron_sp.layout.document_split import SPLITS, empty_split_problem, parse_split, split_bounds
from megatron_sp.progress import progress_bar

try:
    import resource
except ImportError:  # not on every platform
    resource = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from megatron_sp.data.tokenizers.tokenizer import Tokenizer

FILES_PER_SET = 5  # open files of one token set: .bin, .idx and three arrays of its order
OTHER_FILES = 1024  # open files of the rest of a run: sockets, shared memory, libraries

@dataclass(frozen=True)
class Splits:
    """The training, validation and test datasets; None for one that is not needed or has no share of the documents."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None
    #: Validation sets by name, where ``--valid-data-path`` names them; then ``valid`` is None.
    named_valid: dict[str, Dataset] = field(default_factory=dict)

    def describe(self) -> str:
        """Describe all datasets for the log, in one or more lines each."""
        datasets = (self.train, self.valid, *self.named_valid.values(), self.test)
        return "\n".join(dataset.describe() for dataset in datasets if dataset is not None)


def build_datasets(data: Data, tokenizer_eod: int | None, num_samples: Sequence[int | None], seed: int, *,
                   vocab_size: int = 0, must_store: bool = False,
                   tokenizer: Tokenizer | None = None) -> Splits:
    """Build the datasets that the data flags describe.

    A dataset is None if ``num_samples`` is 0 for it, if its share in ``--split`` is 0, or if the other datasets are
    given by their own path flags (``--train-data-path`` ...) and this one is not. All processes may call this function
    at the same time: one of them builds the index cache, and the others wait for it.

    Args:
        data: the data flags; ``seq_length`` and one source (paths or mock data) are set.
        tokenizer_eod: end-of-document token. It is not used, since the index says where documents end.
        num_samples: number of samples that training, validation and test need; None: one epoch of each.
        seed: seed of all shuffles.
        vocab_size: the random tokens of ``--mock-data`` are below it.
        tokenizer: what the function of ``--dataset-provider`` is given.
        must_store: raise an error if the index cache cannot be written. Without it, only a directory that the user
            named must be writable.

    Raises:
        DataError: a file is missing or damaged, a split has no documents, or the index cache cannot be written although
            it must be.
    """
    del tokenizer_eod
    builder = _Builder(data, seed, must_store)
    wanted = dict(zip(SPLITS, num_samples, strict=True))
    own_paths = dict(train=data.train_data_path, valid=data.valid_data_path, test=data.test_data_path)
    datasets: dict[str, Dataset | None]
    named_valid: dict[str, Dataset] = {}
    if data.mock_data:
        datasets = {name: MockDataset(vocab_size, data.seq_length, count or 0, seed + place, name) if count else None
                    for place, (name, count) in enumerate(wanted.items())}
        if data.dataloader_type == "cyclic" and datasets["train"] is not None:
            datasets["train"] = CyclicDataset(datasets["train"], seed)
    elif data.dataset_provider:
        datasets = builder.provide(wanted, tokenizer)
    elif data.data_path:
        blend = parse_data_path(data.data_path)
        shares = dict(zip(SPLITS, parse_split(data.split), strict=True))
        if wanted["train"] != 0 and shares["train"] == 0:
            raise DataError(f"--split {data.split!r} leaves nothing for training.")
        datasets = {name: builder.build(blend, name, count, data.split) if count != 0 and shares[name] > 0 else None
                    for name, count in wanted.items()}
    elif any(own_paths.values()):
        datasets = {}
        for name, count in wanted.items():
            flag = f"--{name}-data-path"
            if name == "train" and count != 0 and not own_paths[name]:
                raise DataError(f"{flag} is missing; together with --valid-data-path or --test-data-path, training "
                                "needs a path of its own.")
            if name == "valid" and "" not in named_sets(own_paths[name]):
                datasets[name] = None
                named_valid = {own: builder.build(parse_data_path(words, flag), f"valid/{own}", count)
                               for own, words in named_sets(own_paths[name]).items() if count != 0}
                continue
            use = count != 0 and own_paths[name]
            datasets[name] = builder.build(parse_data_path(own_paths[name], flag), name, count) if use else None
    else:
        raise DataError("There is no data; give --data-path, --train-data-path, --mock-data or --dataset-provider.")
    return Splits(**datasets, named_valid=named_valid)


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files, as far as the system allows, so that it can open ``count`` more."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


class _Builder:
    """Build datasets from token files, and open each pair of files only once."""

    def __init__(self, data: Data, seed: int, must_store: bool = False):
        self.data, self.seed, self.must_store = data, seed, must_store
        self.opened: dict[str, IndexedDataset] = {}

    def build(self, blend: Blend, name: str, count: int | None, split: str = "") -> Dataset:
        """Build one split of a blend.

        Args:
            blend: token sets and weights.
            name: name of the split.
            count: how many samples are needed; None: one epoch.
            split: value of ``--split``, which selects the documents of this split; "" selects all.
        """
        if self.data.dataloader_type == "cyclic" and name == "train":
            return self._cyclic(blend, name, count, split)
        if len(blend.prefixes) == 1:
            return self._member(blend.prefixes[0], name, count, split)
        cache = self._cache(blend.prefixes[0])
        if blend.weights is None or count is None:
            members = self._members(blend.prefixes, name, [None] * len(blend.prefixes), split)
            sizes = [len(member) for member in members]
            if count is None or count <= sum(sizes):
                return self._by_size(members, sizes, name, count, cache)
            # More samples are needed than one epoch has: repeat each member in proportion to its size.
            blend = Blend(blend.prefixes, tuple(size / sum(sizes) for size in sizes))
        assert blend.weights is not None and count is not None
        members_index, numbers = self._weighted_order(blend, count)
        drawn = np.bincount(members_index, minlength=len(blend.prefixes)).tolist()
        # With extreme weights the blend draws more of a member than Megatron's formula builds.
        needed = [max(pair) for pair in zip(member_sizes(blend.weights, count, blends.SURPLUS), drawn, strict=True)]
        return BlendedDataset(self._members(blend.prefixes, name, needed, split), members_index, numbers, name)

    def _cyclic(self, blend: Blend, name: str, count: int | None, split: str) -> Dataset:
        """Build a training set that repeats no sample of a member before all samples of that member have been read.

        Without weights there is one order over the samples of all members, shuffled again for each epoch. With weights,
        members with a high weight are repeated earlier than others. So each member is shuffled on its own, again and
        again, and the blend takes the next sample of a member's order.
        """
        if len(blend.prefixes) == 1:
            return CyclicDataset(self._member(blend.prefixes[0], name, None, split), self.seed)
        members = self._members(blend.prefixes, name, [None] * len(blend.prefixes), split)
        cache = self._cache(blend.prefixes[0])
        if blend.weights is None or count is None:
            return CyclicDataset(self._by_size(members, [len(member) for member in members], name, None, cache),
                                 self.seed)
        endless = [CyclicDataset(member, self.seed + place) for place, member in enumerate(members)]
        return BlendedDataset(endless, *self._weighted_order(blend, count), name)

    def _weighted_order(self, blend: Blend, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the member of each sample of a weighted blend, and the sample's number within it."""
        assert blend.weights is not None
        # Megatron divides the weights by their sum when it computes the sizes, and again when it computes the order.
        # The second division can change the last bit of a weight, and so which of two equal members is drawn.
        return cached_order(self._cache(blend.prefixes[0]), blends.normalised(blend.weights),
                            sum(member_sizes(blend.weights, count)))

    def _by_size(self, members: list[Dataset], sizes: list[int], name: str, count: int | None,
                 cache: IndexCache) -> BlendedDataset:
        if count is None:
            return BlendedDataset(members, *cached_order(cache, sizes, None), name)
        return BlendedDataset(members, *cached_order(cache, blends.normalised(sizes), count), name)

    def provide(self, wanted: Mapping[str, int | None], tokenizer: Tokenizer | None) -> dict[str, Dataset | None]:
        """Call the function of ``--dataset-provider`` once for each dataset that the run needs samples of."""
        data, spec = self.data, self.data.dataset_provider
        function = own_data.load_provider(spec)
        arguments = dict(word.split("=", 1) for word in data.dataset_arguments)
        made: dict[str, Dataset | None] = dict.fromkeys(wanted)
        for name, count in wanted.items():
            if not count:
                continue
            request = own_data.DatasetRequest(name, count, data.seq_length, self.seed, tokenizer, arguments)
            provided = own_data.ask_provider(function, spec, request)
            if provided is None and name == "train":
                raise DataError(f"--dataset-provider {spec} returned no training set.")
            if provided is not None:
                made[name] = self._provided(provided, request)
        return made

    def _provided(self, provided: object, request: own_data.DatasetRequest) -> Dataset:
        """Return what a provider returned as a dataset; cyclic training data is shuffled again for each pass."""
        cyclic = self.data.dataloader_type == "cyclic" and request.split == "train"
        num_samples = None if cyclic else request.num_samples
        dataset: Dataset
        if isinstance(provided, own_data.OwnDocuments):
            path = self.data.data_cache_path
            dataset = self._samples(provided, np.arange(len(provided)), num_samples, request.split,
                                    IndexCache(path, required=bool(path)))
        else:
            dataset = own_data.as_samples(provided, request, self.data.dataset_provider, num_samples)
        return CyclicDataset(dataset, self.seed) if cyclic else dataset

    def _members(self, prefixes: Sequence[str], name: str, counts: Sequence[int | None], split: str) -> list[Dataset]:
        """Build the members of a blend, with the number of samples that each one needs."""
        allow_open_files(FILES_PER_SET * len(prefixes))
        return [self._member(prefix, name, count, split) for prefix, count in progress_bar(
            list(zip(prefixes, counts, strict=True)), desc=f"opening the sets of {name}", unit=" sets", delay=2,
            leave=False, disable=None)]

    def _member(self, prefix: str, name: str, count: int | None, split: str) -> Dataset:
        if prefix not in self.opened:
            self.opened[prefix] = IndexedDataset(prefix)
        indexed = self.opened[prefix]
        bounds = (0, len(indexed))
        if split:
            found = split_bounds(parse_split(split), len(indexed))[SPLITS.index(name)]
            assert found is not None
            bounds = found
        if count and split and (problem := empty_split_problem(prefix, name, split, len(indexed))):
            raise DataError(problem)
        return self._samples(indexed, np.arange(*bounds), count, name, self._cache(prefix))

    def _samples(self, documents: TokenSequences, ids: np.ndarray, count: int | None, name: str,
                 cache: IndexCache) -> Dataset:
        """Make samples of documents: cut a row of them, or pack them (``--pack-documents``)."""
        kind = PackedDataset if self.data.pack_documents else GPTDataset
        return kind(documents, ids, count, self.data.seq_length, self.seed, name, cache)

    def _cache(self, prefix: str) -> IndexCache:
        beside = os.path.join(os.path.dirname(os.path.abspath(prefix)), "cache", "megatron_sp")
        path = self.data.data_cache_path
        return IndexCache(path or beside, required=bool(path) or self.must_store)


class CyclicDataset:
    """Another dataset, repeated without end and shuffled again for each pass (``--dataloader-type cyclic``).

    Args:
        dataset: holds the samples of one pass.
        seed: seed of the shuffles.
    """

    NUM_SAMPLES = 2**62

    def __init__(self, dataset: Dataset, seed: int):
        self.dataset, self.seed, self.seq_length = dataset, seed, dataset.seq_length
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        return self.NUM_SAMPLES

    def _inner(self, sample: int) -> int:
        """Return the number that a sample has in ``dataset``."""
        passes, place = divmod(sample, len(self.dataset))
        order = self._order
        if order[0] != passes:
            order = (passes, np.random.default_rng([self.seed, passes]).permutation(len(self.dataset)))
            self._order = order
        return int(order[1][place])

    def window(self, sample: int, start: int, stop: int) -> np.ndarray:
        """Return the tokens ``[start, stop)`` of a sample, int64."""
        check_window(self, sample, start, stop)
        return self.dataset.window(self._inner(sample), start, stop)

    def document_starts(self, sample: int) -> np.ndarray:
        """Return the positions at which documents start, int64, ascending from 0."""
        check_window(self, sample, 0, 0)
        return self.dataset.document_starts(self._inner(sample))

    def unlabelled(self, sample: int) -> np.ndarray:
        """Return the positions without a label, int64, ascending."""
        return unlabelled(self.dataset, self._inner(sample))

    def source(self, sample: int) -> str:
        """Return the path of the file that holds a sample, for messages."""
        return self.dataset.source(self._inner(sample))

    def describe(self) -> str:
        return f"{self.dataset.describe()}; in a new random order every {len(self.dataset):,} samples"
