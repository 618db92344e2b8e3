"""Cut a microbatch into the chunks of ``--sequence-chunk-size``, and say what each pass does with each chunk.

``activations/key_values.py`` explains the two passes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_sp.activations.key_values import Chunk, KeyValueStore
from megatron_sp.activations.storage import DeviceStorage, HostStorage
from megatron_sp.config.schema import Run
from megatron_sp.data.batch import Microbatch
from megatron_sp.layout.masks.segments import Segments, window_reach
from megatron_sp.model.context import Context


@dataclass(frozen=True)
class Part:
    """A part of a microbatch's tokens that the model is given at once; by default all of them.

    Attributes:
        tokens: which of this rank's tokens.
        chunk: what the model must know of the chunk; None where the part is the whole sequence.
        before: calls that come before it, as in the first pass; they compute the keys and values of a segment again.
    """

    tokens: slice = field(default_factory=lambda: slice(None))
    chunk: Chunk | None = None
    before: tuple[Part, ...] = ()

    def of(self, batch: Microbatch) -> tuple[torch.Tensor, torch.Tensor, Context]:
        """Return this part of a microbatch: its tokens, its labels and what the model must know of them."""
        tokens, labels, positions = (x[:, self.tokens] for x in (batch.tokens, batch.labels, batch.positions))
        places = None if batch.places is None else batch.places[:, self.tokens]
        return tokens, labels, Context(positions, batch.sample_ids, batch.mask, self.chunk, places)


@dataclass(frozen=True)
class Passes:
    """The calls of the model that a microbatch takes, by the number of the chunk.

    Attributes:
        first: calls without autograd and without output, which keep keys and values.
        second: calls that compute the loss and, in training, are followed by backward.
    """

    first: list[Part]
    second: list[Part]


@dataclass(frozen=True)
class ChunkRecurrence:
    """How a run computes its sequences in chunks.

    Args:
        size: tokens of a chunk, of all ranks together; 0 computes whole sequences.
        ranks: number of ranks that share a sequence.
        offload: whether keys and values wait in host memory.
        keep_outputs: whether the results of attention are kept between the two passes of training.
        reach: how many earlier chunks a chunk sees; None: all of them.
        last_layer: number of the model's last layer.
    """

    size: int = 0
    ranks: int = 1
    offload: bool = False
    keep_outputs: bool = False
    reach: int | None = None
    last_layer: int = -1

    @classmethod
    def of(cls, run: Run) -> ChunkRecurrence:
        """Return the chunk recurrence that the flags of a run ask for."""
        memory = run.memory
        return cls(memory.sequence_chunk_size, run.parallel.sp, memory.offload_key_values,
                   memory.recompute_granularity == "selective", window_reach(run), run.model.num_layers - 1)

    def training(self, batch: Microbatch) -> Passes:
        """Return the calls for the gradients of a microbatch.

        The first pass leaves out the last chunk, whose keys and values no other chunk needs. The second pass begins
        with it and ends with the first chunk. Where windows reach few chunks, it goes by ``Segments``.
        """
        if not self.size:
            return Passes([], [Part()])
        store, count = self._store(keep_outputs=self.keep_outputs), self.chunks_of(batch)
        segments = Segments.of(count, self.reach)
        last = segments.starts[-1]
        first = [self._part(store, number, keeps=True, needs_output=False, frees=segments.freed_by(number),
                            keeps_output=number >= last) for number in range(count - 1)]
        second = []
        for start in reversed(segments.starts):
            stop = min(start + segments.size, count)
            again = [] if start == last else [self._part(store, number, keeps=True, needs_output=False)
                                              for number in range(start, stop - 1)]
            second.append(self._part(store, stop - 1, before=tuple(again)))
            second += [self._part(store, number) for number in reversed(range(start, stop - 1))]
        return Passes(first, second[::-1])

    def evaluation(self, batch: Microbatch) -> Passes:
        """Return the calls for the loss of a microbatch."""
        if not self.size:
            return Passes([], [Part()])
        store, count = self._store(), self.chunks_of(batch)
        return Passes([], [self._part(store, number, keeps=number < count - 1,
                                      frees=(number - self.reach - 1,) if self.reach is not None else ())
                           for number in range(count)])

    def _store(self, *, keep_outputs: bool = False) -> KeyValueStore:
        return KeyValueStore(HostStorage() if self.offload else DeviceStorage(), keep_outputs=keep_outputs)

    @property
    def own_tokens(self) -> int:
        """Return how many tokens of a chunk this rank owns."""
        return self.size // self.ranks

    def chunks_of(self, batch: Microbatch) -> int:
        """Return the number of chunks of a microbatch's sequences."""
        return batch.tokens.shape[1] // self.own_tokens if self.size else 1

    def _part(self, store: KeyValueStore, number: int, *, before: tuple[Part, ...] = (), **how: Any) -> Part:
        """Return the part of a microbatch that is a chunk: the equal part of this rank's tokens with its number."""
        own = self.own_tokens
        return Part(slice(number * own, (number + 1) * own),
                     Chunk(store, number, self.size, last_layer=self.last_layer, **how), before)
