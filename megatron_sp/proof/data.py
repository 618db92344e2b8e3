"""Make the tokens of a proof: random samples in memory, token files of random documents, and whole batches.

A proof masks losses as ``--eod-mask-loss`` does: a prediction has no loss if its input is the end-of-document token. So
a mask is made by placing that token, and the framework's own data reader computes the labels of each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_sp.config.schema import Run
from megatron_sp.data.batch import BatchReader, Microbatch
from megatron_sp.data.documents import Documents
from megatron_sp.data.gpt_dataset import Dataset, GPTDataset
from megatron_sp.data.token_files.indexed_dataset import best_dtype
from megatron_sp.data.token_files.token_writer import IndexedDatasetBuilder
from megatron_sp.layout.tokens import SequenceLayout
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.proof.reference import Batch, Numbering, documents_after

#: The label of a position that has no loss.
IGNORED = -100
#: End-of-document token in batches that ``batch`` makes.
END = 0
#: Number of documents in the token files of a proof.
DOCUMENTS = 60


def batch(run: Run, masked: str = "nothing", seed: int = 7) -> Batch:
    """Return a global batch of random tokens and its labels, each ``[B, s]`` int64.

    Args:
        run: gives the sizes.
        masked: which labels are -100, because their input is the token 0. ``nothing``: none; ``eod``: a random fifth;
            ``late half``: the second half of each sequence, which is all labels of some ranks at sp 2 and 4;
            ``a sample``: every second sequence; ``all but one``: all labels but one; ``ragged``: a random share, which
            grows from sequence to sequence.
        seed: seed of the tokens and of the masks.
    """
    size, length = run.train.global_batch_size, run.data.seq_length
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0 if masked == "nothing" else 1, run.model.vocab_size, (size, length + 1), generator=generator)
    hidden = torch.zeros(size, length, dtype=torch.bool)
    if masked == "eod":
        hidden = torch.rand(size, length, generator=generator) < 0.2
    elif masked == "late half":
        hidden[:, length // 2:] = True
    elif masked == "a sample":
        hidden[1::2] = True
    elif masked == "all but one":
        hidden[:] = True
        hidden[-1, length // 2 + 1] = False
    elif masked == "ragged":
        hidden = torch.rand(size, length, generator=generator) < torch.linspace(0.1, 0.9, size).unsqueeze(1)
    else:
        assert masked == "nothing", masked
    text[:, :-1][hidden] = END
    return inputs_and_labels(text, None if masked == "nothing" else END)


def inputs_and_labels(text: Tensor, end: int | None) -> Batch:
    """Split tokens ``[B, s+1]`` into inputs and labels, each ``[B, s]``; a label is -100 where the input is ``end``."""
    tokens, labels = text[:, :-1].clone(), text[:, 1:].clone()
    return tokens, labels if end is None else labels.masked_fill(tokens == end, IGNORED)


class TokenSet:
    """A dataset of samples in memory, for the framework's data reader.

    Args:
        batches: tokens and labels as ``batch`` makes them, each ``[B, s]``. Sample k of the dataset is row k of all.

    Attributes:
        masks: whether predictions whose input is the token 0 have no loss.
    """

    def __init__(self, batches: Sequence[Batch]):
        tokens, labels = (torch.cat(parts) for parts in zip(*batches))
        self.masks = bool((labels == IGNORED).any())
        last = labels[:, -1:].clamp(min=END)  # a masked label is -100, which is no token: any token will do
        self.text = torch.cat((tokens, last), dim=1).numpy()  # [samples, s + 1]
        again = inputs_and_labels(torch.from_numpy(self.text), END if self.masks else None)[1]
        assert torch.equal(again, labels), "labels that no text with masked end-of-document tokens has"
        self.seq_length = tokens.shape[1]

    def __len__(self) -> int:
        return len(self.text)

    def window(self, sample: int, start: int, stop: int) -> np.ndarray:
        """Return tokens ``[start, stop)`` of a sample, int64."""
        return self.text[sample, start:stop]

    def document_starts(self, sample: int) -> np.ndarray:
        """Return the positions at which documents start: after each end-of-document token, as in the reference."""
        starts = np.flatnonzero(self.text[sample, :self.seq_length - 1] == END) + 1
        return np.concatenate([np.zeros(1, dtype=np.int64), starts])

    def source(self, sample: int) -> str:
        """Return where a sample comes from, for messages."""
        return "the proof's tokens"

    def describe(self) -> str:
        return f"{len(self)} samples in memory"


def read_from_memory(run: Run, mesh: ParallelMesh, batches: Sequence[Batch]) -> BatchReader:
    """Return the framework's data reader for this rank, which reads the batches from memory."""
    samples = TokenSet(batches)
    layout = SequenceLayout.of(run)
    return BatchReader(samples, layout, mesh.rank("sp"), mesh.rank("dp"), mesh.size("dp"), END, samples.masks,
                       documents=Documents.of(run.data, END))


def local_microbatches(run: Run, mesh: ParallelMesh, tokens: Tensor, labels: Tensor) -> list[Microbatch]:
    """Return this rank's microbatches of a global batch (``[B, s]`` each), read by the framework's data reader."""
    return read_from_memory(run, mesh, [(tokens, labels)]).read(0, len(tokens), run.train.micro_batch_size)


def write_documents(run: Run, prefix: Path, seed: int = 0) -> None:
    """Write a token set of random documents, some shorter and some longer than a sequence.

    Each document ends with the end-of-document token. It also has such tokens at random places, from none to more than
    half of the document, so that samples and ranks differ in their number of valid labels.
    """
    random = np.random.default_rng(seed)
    end = run.model.vocab_size - 1
    with IndexedDatasetBuilder(prefix, best_dtype(run.model.vocab_size)) as builder:
        for _ in range(DOCUMENTS):
            tokens = random.integers(0, end, size=random.integers(2, 3 * run.data.seq_length))
            tokens[random.random(len(tokens)) < random.uniform(0, 0.6)] = end
            tokens[-1] = end
            builder.add_document(tokens)
        builder.finalize()


def document_numbers(run: Run, dataset: Dataset) -> Numbering:
    """Return the numbering of the documents in a data set of one token set, for the plain model.

    The numbers are made here from the lengths of whole documents, without the framework's arithmetic, which the proof
    tests.
    """
    if run.data.document_boundaries == "eod":
        return documents_after(run.model.vocab_size - 1)
    assert isinstance(dataset, GPTDataset)
    lengths = dataset.indexed.lengths[dataset.document_index]
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.from_numpy(lengths.astype(np.int64)))

    def number(tokens: Tensor, first_sample: int) -> Tensor:
        firsts = [int(dataset.shuffle_index[first_sample + place]) * tokens.shape[1] for place in range(len(tokens))]
        return torch.stack([row[first:first + tokens.shape[1]] for first in firsts])

    return number


def whole_batches(run: Run, dataset: Dataset, count: int) -> list[Batch]:
    """Return the first ``count`` global batches of a data set for the plain model.

    The labels are made here from whole sequences, without the framework's data reader, which the proof tests.
    """
    size, end = run.train.global_batch_size, run.model.vocab_size - 1
    text = [torch.from_numpy(np.stack([dataset.window(sample, 0, run.data.seq_length + 1).astype(np.int64)
                                       for sample in range(start, start + size)]))
            for start in range(0, count * size, size)]
    return [inputs_and_labels(rows, end if run.data.eod_mask_loss else None) for rows in text]
