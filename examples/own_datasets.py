"""Data that is in no token files, for --dataset-provider. Copy this file and change it.

Samples of a torch.utils.data.Dataset, here the bytes of a text file, one sample after another:

    python pretrain_gpt.py --dataset-provider examples/own_datasets.py:bytes_of_a_file \\
        --dataset-arguments path=README.md --tokenizer-type NullTokenizer --vocab-size 257 FURTHER FLAGS

Documents of a Hugging Face dataset that save_to_disk() wrote, with token ids in a column:

    python pretrain_gpt.py --dataset-provider examples/own_datasets.py:hugging_face \\
        --dataset-arguments directory=data/wiki column=input_ids TOKENIZER FLAGS FURTHER FLAGS

The same with texts: they are tokenized once, and Hugging Face keeps the result on disk beside the data:

    python pretrain_gpt.py --dataset-provider examples/own_datasets.py:hugging_face_texts \\
        --dataset-arguments directory=data/wiki column=text TOKENIZER FLAGS FURTHER FLAGS
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_sp.data.own_data import DatasetRequest, OwnDocuments, documents


class Bytes(torch.utils.data.Dataset[torch.Tensor]):
    """Samples of ``seq_length + 1`` bytes; each starts with the last byte of the one before."""

    def __init__(self, data: bytes, seq_length: int):
        self.tokens, self.seq_length = torch.frombuffer(bytearray(data), dtype=torch.uint8), seq_length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_length

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self.seq_length
        return self.tokens[start:start + self.seq_length + 1]


def bytes_of_a_file(request: DatasetRequest) -> Bytes:
    """Train on the first 90% of a file, and evaluate on the rest."""
    data = Path(request.arguments["path"]).read_bytes()
    cut = len(data) * 9 // 10
    return Bytes(data[:cut] if request.split == "train" else data[cut:], request.seq_length)


def hugging_face(request: DatasetRequest) -> OwnDocuments | None:
    """Return the documents of one split of a Hugging Face dataset; "validation" is its usual name for "valid"."""
    return documents(chosen, request.arguments.get("column", "input_ids")) if (
        chosen := split_on_disk(request)) is not None else None


def hugging_face_texts(request: DatasetRequest) -> OwnDocuments | None:
    """Tokenize one split of a Hugging Face dataset with the run's tokenizer; every document ends with its EOD token."""
    chosen, tokenizer = split_on_disk(request), request.tokenizer
    if chosen is None or tokenizer is None:
        return None
    column, end = request.arguments.get("column", "text"), [] if tokenizer.eod is None else [tokenizer.eod]

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": [ids + end for ids in tokenizer.encode_batch(batch[column])]}

    return documents(chosen.map(tokenize, batched=True, remove_columns=chosen.column_names))


def split_on_disk(request: DatasetRequest) -> Any:
    """Return a split of the dataset in the directory; None where it has none of this name."""
    import datasets

    loaded = datasets.load_from_disk(request.arguments["directory"])
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded if request.split == "train" else None
    return loaded.get(request.split, loaded.get("validation") if request.split == "valid" else None)
