"""Cut a microbatch into the chunks of ``--sequence-chunk-size``, and say what each pass does with each chunk.

``activations/key_values.py`` explains the two passes.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_sp.activations.key_values import Chunk, KeyValueStore
from megatron_sp.activations.storage import DeviceStorage, HostStorage
from megatron_sp.config.schema import Run
from megatron_sp.data.batch import Microbatch


@dataclass(frozen=True)
class Part:
    """A part of a microbatch's tokens that the model is given at once.

    Attributes:
        tokens: which of this rank's tokens.
        chunk: what the model must know of the chunk; None where the part is the whole sequence.
    """

    tokens: slice
    chunk: Chunk | None


@dataclass(frozen=True)
class Passes:
    """The calls of the model that a microbatch takes, in order.

    Attributes:
        first: without autograd and without output; they keep keys and values.
        second: with loss and, in training, backward.
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
    """

    size: int = 0
    ranks: int = 1
    offload: bool = False
    keep_outputs: bool = False

    @classmethod
    def of(cls, run: Run) -> ChunkRecurrence:
        """Return what the flags of a run say."""
        memory = run.memory
        return cls(memory.sequence_chunk_size, run.parallel.sp, memory.offload_key_values,
                   memory.recompute_granularity == "selective")

    def training(self, batch: Microbatch) -> Passes:
        """Return the calls for the gradients of a microbatch.

        The first pass leaves out the last chunk, whose keys and values no other chunk needs. The second pass begins
        with it and ends with the first chunk.
        """
        if not self.size:
            return Passes([], [Part(slice(None), None)])
        store, count = self._store(keep_outputs=self.keep_outputs), self._count(batch)
        first = [self._part(store, number, keeps=True, needs_output=False) for number in range(count - 1)]
        return Passes(first, [self._part(store, number) for number in reversed(range(count))])

    def evaluation(self, batch: Microbatch) -> list[Part]:
        """Return the calls for the loss of a microbatch."""
        if not self.size:
            return [Part(slice(None), None)]
        store, count = self._store(), self._count(batch)
        return [self._part(store, number, keeps=number < count - 1) for number in range(count)]

    def _store(self, *, keep_outputs: bool = False) -> KeyValueStore:
        return KeyValueStore(HostStorage() if self.offload else DeviceStorage(), keep_outputs=keep_outputs)

    @property
    def own_tokens(self) -> int:
        """Return how many tokens of a chunk this rank owns."""
        return self.size // self.ranks

    def _count(self, batch: Microbatch) -> int:
        return batch.tokens.shape[1] // self.own_tokens

    def _part(self, store: KeyValueStore, number: int, *, keeps: bool = False, needs_output: bool = True) -> Part:
        """Return the part of a microbatch that is a chunk: the equal part of this rank's tokens with its number."""
        own = self.own_tokens
        return Part(slice(number * own, (number + 1) * own),
                     Chunk(store, number, self.size, keeps=keeps, needs_output=needs_output))
