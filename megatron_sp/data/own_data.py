"""Train on data that a function of the user's provides: ``--dataset-provider FILE.py:FUNCTION``.

The function is called once for each of training, validation and test, on every rank, with a ``DatasetRequest``. It
returns one of four things::

    documents(dataset, column)   documents of any length as token ids, for example a Hugging Face dataset: they are
                                 shuffled, laid in a row and cut into samples, as token files are
    a torch.utils.data.Dataset   each item is one sample: seq_length + 1 token ids
    an object with ``window``    see ``gpt_dataset.Dataset``: ranks that share a sequence read only their own tokens
    None                         there is no such set

Each rank must get the same samples under the same numbers. Nothing here imports torch or Hugging Face's ``datasets``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_sp.data.gpt_dataset import Dataset, check_window
from megatron_sp.errors import DataError, UserError
from megatron_sp.user_function import FAILURES, in_words, load_function

if TYPE_CHECKING:
    from megatron_sp.data.tokenizers.tokenizer import Tokenizer

FLAG = "--dataset-provider"
COLUMNS = ("input_ids", "tokens")  # where the token ids of an item that is a mapping may be
METHODS = ("__len__", "window", "document_starts", "source", "describe")  # of gpt_dataset.Dataset
STEP = 4096  # documents to look at in one go


@dataclass(frozen=True)
class DatasetRequest:
    """What the run asks the user's function for: one dataset, with its size and its split.

    Attributes:
        split: "train", "valid" or "test".
        num_samples: number of samples that the run reads from the dataset. A dataset with fewer samples is read again.
        seq_length: ``--seq-length``. A sample has one token more, the label of the last input.
        seed: ``--seed``.
        tokenizer: the run's tokenizer, with ``encode(text)``, ``decode(ids)``, ``eod`` and ``vocab_size``.
        arguments: the values given by ``--dataset-arguments NAME=VALUE``, by name.
    """

    split: str
    num_samples: int
    seq_length: int
    seed: int
    tokenizer: Tokenizer | None = None
    arguments: Mapping[str, str] = field(default_factory=dict)


class OwnDocuments:
    """Documents of a user's dataset, in the form in which ``GPTDataset`` reads the sequences of token files.

    Args:
        dataset: has a length, and its item i is a mapping with the token ids of document i. Of a Hugging Face dataset
            only the tokens that a rank needs are read from disk.
        column: name of the token ids in an item; "": the item itself is the token ids.
        name: name of the data, for messages.

    Attributes:
        lengths: tokens of each document, int64 ``[num_documents]``.
    """

    def __init__(self, dataset: Any, column: str = "input_ids", name: str = ""):
        self.prefix = name or type(dataset).__name__
        self.dataset, self.column = dataset, column
        self._arrow: Any = dataset.with_format("arrow") if hasattr(dataset, "with_format") and column else None
        self.lengths = self._arrow_lengths() if self._arrow is not None else np.array(
            [len(self._whole(i)) for i in range(len(dataset))], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def path(self) -> str:
        """The name of the data, for messages."""
        return self.prefix

    def _arrow_lengths(self) -> np.ndarray:
        import pyarrow.compute  # a Hugging Face dataset is made of pyarrow's tables

        if self.column not in self.dataset.column_names:
            raise DataError(f"{self.prefix}: the dataset has no column {self.column!r}; it has "
                            f"{', '.join(self.dataset.column_names)}. Tokenize texts with dataset.map before.")
        found = []
        for start in range(0, len(self.dataset), STEP):
            column = self._arrow[start:start + STEP][self.column]
            if not hasattr(column.type, "value_type") or "int" not in str(column.type.value_type):
                raise DataError(f"{self.prefix}: the column {self.column!r} holds {column.type}, not lists of token "
                                "ids. Tokenize texts with dataset.map before.")
            found.append(pyarrow.compute.list_value_length(column).to_numpy())
        return np.concatenate([np.empty(0), *found]).astype(np.int64)

    def _whole(self, i: int) -> np.ndarray:
        return token_ids(self.dataset[i], f"{self.prefix}: document {i}", self.column)

    def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return the tokens ``[offset, offset + length)`` of document ``i``, int64."""
        length = int(self.lengths[i]) - offset if length is None else length
        if self._arrow is None:
            return self._whole(i)[offset:offset + length]
        values = self._arrow[i:i + 1][self.column][0].values  # a view, no copy
        return values.slice(offset, length).to_numpy(zero_copy_only=False).astype(np.int64)

    def fingerprint(self) -> str:
        """Return a stable hash of the lengths, which are all that the order of samples depends on."""
        return hashlib.blake2b(np.ascontiguousarray(self.lengths), digest_size=16).hexdigest()


def documents(dataset: Any, column: str = "input_ids", name: str = "") -> OwnDocuments:
    """Return documents of any length, of which samples are made in the order of token files; see ``OwnDocuments``."""
    return OwnDocuments(dataset, column, name)


class OwnSamples:
    """Samples that a user's dataset has ready: item i is sample i, and after the last one the first comes again.

    Args:
        dataset: has a length and items of ``seq_length + 1`` token ids, or mappings with them as ``input_ids``.
        seq_length: inputs in a sample.
        num_samples: how many samples the run reads; None: each item once.
        name: name of the split, for messages.
        source: where the data comes from, for messages.
    """

    def __init__(self, dataset: Any, seq_length: int, num_samples: int | None, name: str, source: str):
        self.dataset, self.seq_length, self.num_samples, self.name = dataset, seq_length, num_samples, name
        self._source = source
        self._last: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))
        if not len(dataset):
            raise DataError(f"The {name} set of {source} has no items, but the run needs samples of it.")

    def __len__(self) -> int:
        return max(self.num_samples or 0, len(self.dataset))

    def window(self, sample: int, start: int, stop: int) -> np.ndarray:
        """Return the tokens ``[start, stop)`` of a sample, int64. The item is read whole, once for all its pieces."""
        check_window(self, sample, start, stop)
        item = sample % len(self.dataset)
        last = self._last
        if last[0] != item:
            last = (item, self._read(item))
            self._last = last
        return last[1][start:stop]

    def _read(self, item: int) -> np.ndarray:
        ids = token_ids(self.dataset[item], f"{self._source}: item {item} of the {self.name} set")
        if len(ids) != self.seq_length + 1:
            raise DataError(f"{self._source}: item {item} of the {self.name} set has {len(ids)} tokens; a sample has "
                            f"--seq-length + 1 = {self.seq_length + 1}, with the label of the last input. For "
                            "documents of any length return megatron_sp.data.own_data.documents(dataset).")
        return ids

    def document_starts(self, sample: int) -> np.ndarray:
        """Return where documents start: only at 0, because each sample of a user's Dataset is one document."""
        check_window(self, sample, 0, 0)
        return np.zeros(1, dtype=np.int64)

    def source(self, sample: int) -> str:
        """Return where a sample comes from, for messages."""
        return f"{self._source}, item {sample % len(self.dataset)},"

    def describe(self) -> str:
        said = f"{self.name}: {self._source}: {len(self.dataset):,} samples of {self.seq_length:,} tokens"
        if self.num_samples is None:
            return said
        times = -(-self.num_samples // len(self.dataset))
        return f"{said}, read up to {'once' if times <= 1 else f'{times} times'} for {self.num_samples:,} samples"


def token_ids(item: Any, where: str, column: str = "") -> np.ndarray:
    """Return the token ids of an item, int64 ``[length]``.

    Args:
        item: a tensor, array or list of whole numbers, or a mapping with one.
        where: the item, for messages.
        column: name of the token ids in a mapping; "": one of ``COLUMNS``.
    """
    if isinstance(item, Mapping):
        names = [column] if column else list(COLUMNS)
        name = next((name for name in names if name in item), None)
        if name is None:
            raise DataError(f"{where} has the keys {', '.join(map(str, item))}, but none of {', '.join(names)}.")
        item = item[name]
    if isinstance(item, tuple) and len(item) == 1:  # as items of torch's TensorDataset are
        item = item[0]
    try:
        ids = np.asarray(item)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(f"{where} cannot be read as token ids: {error}.") from None
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and len(ids)):
        raise DataError(f"{where} is an array of {ids.dtype} with the shape {list(ids.shape)}; token ids are whole "
                        "numbers in one dimension.")
    return ids.astype(np.int64)


def load_provider(spec: str) -> Callable[[DatasetRequest], Any]:
    """Return the function that ``FILE.py:FUNCTION`` or ``package.module:FUNCTION`` names.

    Raises:
        DataError: the file cannot be imported, or has no such function.
    """
    return load_function(FLAG, spec, DataError)


def ask_provider(function: Callable[[DatasetRequest], Any], spec: str, request: DatasetRequest) -> Any:
    """Call the user's function, and return what it returns.

    Raises:
        DataError: the function raised an exception. The message repeats the exception and names the line of the user's
            file.
    """
    try:
        return function(request)
    except UserError:
        raise
    except FAILURES as error:
        raise DataError(f"{FLAG} {spec} failed for the {request.split} set: {in_words(error)}.") from error


def as_samples(provided: Any, request: DatasetRequest, spec: str, num_samples: int | None) -> Dataset:
    """Return what a provider returned as a dataset of the trainer's; documents are left to the caller.

    Args:
        num_samples: how many samples the run reads; None: each item once.

    Raises:
        DataError: it is none of the things that a provider may return.
    """
    if hasattr(provided, "window"):
        if getattr(provided, "seq_length", None) != request.seq_length:
            raise DataError(f"{FLAG} {spec}: the {request.split} set has samples of "
                            f"{getattr(provided, 'seq_length', 'unknown')} tokens, not of --seq-length "
                            f"{request.seq_length}.")
        if lacking := [name for name in METHODS if not hasattr(provided, name)]:
            raise DataError(f"{FLAG} {spec}: the {request.split} set has window, but not {', '.join(lacking)}; see "
                            "Dataset in megatron_sp/data/gpt_dataset.py.")
        return provided
    if not (hasattr(provided, "__len__") and hasattr(provided, "__getitem__")):
        raise DataError(f"{FLAG} {spec} returned a {type(provided).__name__} for the {request.split} set; return a "
                        "torch.utils.data.Dataset with a length, megatron_sp.data.own_data.documents(...), or None.")
    return OwnSamples(provided, request.seq_length, num_samples, request.split, spec)
