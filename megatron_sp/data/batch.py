"""Read the microbatches of one rank: of each sample only the tokens that the rank owns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from megatron_sp.data.documents import IGNORE_DOCUMENTS, Documents, attention_work
from megatron_sp.data.gpt_dataset import Dataset, unlabelled
from megatron_sp.data.sampler import GlobalBatchSampler
from megatron_sp.errors import DataError
from megatron_sp.layout.masks.attention_mask import AttentionMask
from megatron_sp.layout.tokens import SequenceLayout

IGNORED = -100  # the label of a position that has no loss


@dataclass(frozen=True)
class Microbatch:
    """One rank's part of the sequences that go through the model in one forward.

    Attributes:
        tokens: inputs, int64 ``[b, s/sp]``.
        labels: next tokens, int64 ``[b, s/sp]``; -100 where there is no loss.
        positions: index of each input in its whole sequence, or in its document under ``--reset-position-ids``, int64
            ``[b, s/sp]``.
        sample_ids: index of each sequence in the training order, int64 ``[b]``; dropout depends on it.
        num_valid: number of labels that are not -100.
        mask: which keys each query may see, for the whole sequences.
        places: index of each input in its whole sequence, int64 ``[b, s/sp]``; dropout depends on it. None where it
            equals ``positions``.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    sample_ids: torch.Tensor
    num_valid: int
    mask: AttentionMask = field(default_factory=AttentionMask)
    places: torch.Tensor | None = None

    def pinned(self) -> Microbatch:
        """Return a copy in memory that the GPU can read while the host goes on."""
        return self._each(torch.Tensor.pin_memory)

    def to(self, device: torch.device | str) -> Microbatch:
        """Return a copy on ``device``. The host does not wait for the copy of a pinned microbatch."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by their names, each with the batch dimension first."""
        named = {name: getattr(self, name) for name in ("tokens", "labels", "positions", "sample_ids", "places")}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Microbatch:
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self.tensors().items()}
        return replace(self, **changed)


class BatchReader:
    """Read the microbatches of one rank, for training and for evaluation.

    Args:
        dataset: where samples come from.
        layout: which tokens of a sequence a rank owns.
        sp_rank: index of this rank among the ranks that share a sequence.
        dp_rank, dp_size: index of this rank among the ranks that read different samples, and how many they are.
        eod_token: end-of-document token; needed by ``eod_mask_loss``.
        eod_mask_loss: whether positions whose input is ``eod_token`` have no loss.
        read_ahead: whether a thread reads the next global batch while the model computes this one.
        vocab_size: larger or equal token ids are refused; 0: any id is accepted.
        documents: what documents inside samples change; default: nothing.
        pin: whether to put the batches into memory that a GPU can read while the host goes on.

    Use as a context manager, or call ``close``.
    """

    def __init__(self, dataset: Dataset, layout: SequenceLayout, sp_rank: int, dp_rank: int, dp_size: int,
                 eod_token: int | None = None, eod_mask_loss: bool = False, read_ahead: bool = False,
                 vocab_size: int = 0, documents: Documents = IGNORE_DOCUMENTS, pin: bool = False):
        if eod_mask_loss and eod_token is None:
            raise DataError("--eod-mask-loss needs a tokenizer with an end-of-document token, and this one has none.")
        self.dataset, self.dp_rank, self.dp_size, self.vocab_size = dataset, dp_rank, dp_size, vocab_size
        self.documents, self.pin = documents, pin
        self.causal = AttentionMask()  # of all microbatches where documents do not change it, so that it remembers
        self.ranges = layout.ranges(sp_rank)
        self.places = np.ascontiguousarray(layout.positions(sp_rank), dtype=np.int64)
        self.masked_input = eod_token if eod_mask_loss else None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="read-ahead") if read_ahead else None
        self._next: tuple[tuple[int, int, int], Future[list[Microbatch]]] | None = None

    def read(self, consumed_samples: int, global_batch_size: int, micro_batch_size: int) -> list[Microbatch]:
        """Read this rank's microbatches of the global batch that starts at ``consumed_samples``.

        Raises:
            DataError: the dataset has too few samples, or a token id is not below ``vocab_size``.
        """
        request = (consumed_samples, global_batch_size, micro_batch_size)
        batches = self._take(request)
        if self._pool is not None:
            following = (consumed_samples + global_batch_size, global_batch_size, micro_batch_size)
            self._next = (following, self._pool.submit(self._read, *following))
        return batches

    def _take(self, request: tuple[int, int, int]) -> list[Microbatch]:
        """Return the batch that the thread has read ahead if it is the requested one, else read the requested one."""
        ahead, self._next = self._next, None
        if ahead is None:
            return self._read(*request)
        if ahead[0] == request:
            return ahead[1].result()
        ahead[1].cancel()
        return self._read(*request)

    def _read(self, consumed_samples: int, global_batch_size: int, micro_batch_size: int) -> list[Microbatch]:
        available, wanted = len(self.dataset), consumed_samples + global_batch_size
        if wanted > available:
            raise DataError(f"Samples up to {wanted} are needed, but the dataset was built for {available}; "
                            "its data is used up.")
        where = micro_batch_size, self.dp_rank, self.dp_size
        ids = GlobalBatchSampler.microbatches(consumed_samples, global_batch_size, *where)
        if self.documents.balances_work and self.dp_size > 1:
            work = [attention_work(self.dataset.document_starts(sample), self.dataset.seq_length)
                    for sample in range(consumed_samples, consumed_samples + global_batch_size)]
            ids = GlobalBatchSampler.balanced(consumed_samples, work, *where)
        batches = (self._microbatch(samples) for samples in ids)
        return [batch.pinned() for batch in batches] if self.pin else list(batches)

    def _microbatch(self, samples: Sequence[int]) -> Microbatch:
        shape = (len(samples), len(self.places))
        tokens, labels = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
        for row, sample in enumerate(samples):
            column = 0
            for start, stop in self.ranges:
                # t inputs need t + 1 tokens: the label of the last input is the next token, which another rank may own.
                window = self.dataset.window(sample, start, stop + 1)
                self._check_tokens(window, sample)
                here = slice(column, column + stop - start)
                tokens[row, here], labels[row, here] = window[:-1], window[1:]
                column = here.stop
            labels[row, np.isin(self.places, unlabelled(self.dataset, sample))] = IGNORED
        if self.masked_input is not None:
            labels[tokens == self.masked_input] = IGNORED
        places = np.tile(self.places, (len(samples), 1))
        positions, mask = self._place_documents(samples)
        return Microbatch(tokens=torch.from_numpy(tokens), labels=torch.from_numpy(labels),
                          positions=torch.from_numpy(places if positions is None else positions),
                          sample_ids=torch.tensor(samples, dtype=torch.int64),
                          num_valid=int(np.count_nonzero(labels != IGNORED)), mask=mask,
                          places=None if positions is None else torch.from_numpy(places))

    def _place_documents(self, samples: Sequence[int]) -> tuple[np.ndarray | None, AttentionMask]:
        """Return the position ids of this rank's tokens, int64 ``[b, s/sp]``, and the mask of whole sequences.

        The position ids are None where documents do not change them.
        """
        if not self.documents.matter:
            return None, self.causal
        starts = [self.documents.starts(self.dataset, sample) for sample in samples]
        mask = self.documents.mask(starts) if self.documents.reset_attention else self.causal
        if not self.documents.reset_positions:
            return None, mask
        return np.stack([self.documents.positions(row, self.places) for row in starts]), mask

    def _check_tokens(self, window: np.ndarray, sample: int) -> None:
        if self.vocab_size and (int(window.max()) >= self.vocab_size or int(window.min()) < 0):
            worst = int(window.max()) if int(window.max()) >= self.vocab_size else int(window.min())
            raise DataError(f"{self.dataset.source(sample)} has the token id {worst}, but the vocabulary has "
                            f"{self.vocab_size} ids. The file was preprocessed with another tokenizer than the one "
                            "that --tokenizer-type and its files describe: preprocess it again, or give its tokenizer.")

    def close(self) -> None:
        """Stop the thread that reads ahead and discard what it has read."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = self._next = None

    def __enter__(self) -> BatchReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Readers:
    """Readers of the training, validation and test sets; None for a set that the run does not have."""

    train: BatchReader | None
    valid: BatchReader | None = None
    test: BatchReader | None = None
    #: Validation sets by name, instead of ``valid``.
    named_valid: dict[str, BatchReader] = field(default_factory=dict)

    def all(self) -> list[BatchReader]:
        """Return the readers of all sets that the run has."""
        readers = (self.train, self.valid, self.test, *self.named_valid.values())
        return [reader for reader in readers if reader is not None]
