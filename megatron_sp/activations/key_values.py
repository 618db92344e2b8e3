"""Keys and values of earlier chunks of a sequence, and the gradients that later chunks send to them.

With ``--sequence-chunk-size`` a sequence goes through the whole model one chunk after another. Of an earlier chunk, a
causal model needs nothing but the keys and values of each layer, so these are all that is kept::

    first pass    chunk 0 -> keep k, v     chunk 1 -> keep k, v    (without autograd)
    second pass                                                     chunk 2: forward, backward -> dk, dv of 0 and 1
                                           chunk 1: forward, backward -> dk, dv of 0
                  chunk 0: forward, backward

The second pass computes a chunk again, now with autograd, from the last chunk to the first. In backward, the chunk adds
its contributions to the gradients that are kept for earlier keys and values. For its own keys and values, it takes the
gradients that later chunks have accumulated. Then everything that was kept of the chunk is freed. The last chunk needs
no first pass.

Sources: OOMB (arXiv 2602.02108) trains by recurrence over chunks; Seq1F1B (arXiv 2406.03488) schedules chunks in
pipelines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from megatron_sp.activations.storage import DeviceStorage, Storage, Stored


class Earlier(Protocol):
    """Keys and values of earlier tokens: of chunks in training, or of a text that is being decoded."""

    @property
    def needs_output(self) -> bool:
        """Return whether the caller of the model needs losses or logits of the current tokens."""
        ...

    def attend(self, core: Callable[..., torch.Tensor], layer: int, first_head: int, q: torch.Tensor, k: torch.Tensor,
               v: torch.Tensor, **how: Any) -> torch.Tensor:
        """Attend with an attention core to earlier keys and the current ones, and keep the current ones if asked to.

        Args:
            layer: number of the layer in the model.
            first_head: number of the first query head in the model.
            q: [b, t, n, d], the current tokens.
            k, v: [b, t, g, d]
            how: further arguments of the core.
        Returns:
            [b, t, n, d]
        """
        ...


#: The result of attention for a chunk: output [b, C, n, d] and log-sum-exp [b, n, C].
Output = tuple[torch.Tensor, torch.Tensor]


@dataclass
class _Kept:
    """The tensors that are kept for one layer and group of heads; each dictionary's key is the number of a chunk.

    Attributes:
        values: keys and values, [2, b, C, g, d].
        gradients: the sums of their gradients so far, [2, b, C, g, d] in at least fp32.
        outputs: results of attention.
    """

    values: dict[int, Stored] = field(default_factory=dict)
    gradients: dict[int, Stored] = field(default_factory=dict)
    outputs: dict[int, tuple[Stored, Stored]] = field(default_factory=dict)

    def stored(self) -> Iterator[Stored]:
        yield from self.values.values()
        yield from self.gradients.values()
        for output in self.outputs.values():
            yield from output


class KeyValueStore:
    """Keeps keys, values and their gradients of the chunks of one microbatch, for all layers of this rank.

    Args:
        storage: holds the tensors, on the device or in host memory.
        keep_outputs: also keep the results of attention, so that the second pass does not compute them again.
    """

    def __init__(self, storage: Storage | None = None, *, keep_outputs: bool = False):
        self.storage: Storage = storage or DeviceStorage()
        self.keep_outputs = keep_outputs
        self._kept: dict[tuple[int, int], _Kept] = {}

    @property
    def nbytes(self) -> int:
        """Return the bytes of everything that is kept now."""
        return sum(stored.nbytes for kept in self._kept.values() for stored in kept.stored())

    def take_all(self) -> Iterator[tuple[tuple[int, int], torch.Tensor, torch.Tensor]]:
        """Yield layer and first head, and the keys and values of all chunks, [b, s, g, d]; the store forgets them."""
        for where in sorted(self._kept):
            values = self._kept.pop(where).values
            k, v = torch.cat([self.storage.get(values[number]) for number in sorted(values)], dim=2)
            yield where, k, v

    def of_heads(self, layer: int, first_head: int) -> _Kept:
        """Return what is kept of a layer and of the group of heads that starts with a head."""
        return self._kept.setdefault((layer, first_head), _Kept())


@dataclass(frozen=True)
class Chunk:
    """A chunk that the model computes, and what it may see of earlier ones.

    Attributes:
        store: keeps the keys and values of earlier chunks.
        number: number of the chunk in its sequence.
        size: tokens of every earlier chunk, of all ranks together.
        keeps: keep this chunk's keys and values for later chunks.
        needs_output: the caller needs losses or logits. In the first pass of training it does not.
        last_layer: number of the model's last layer. Where no output is needed, nobody reads the output of this layer,
            so that it need not attend.
        frees: earlier chunks whose keys and values no later chunk sees. They are freed, layer by layer.
        keeps_output: keep the result of attention, if the store keeps any.
    """

    store: KeyValueStore
    number: int
    size: int
    keeps: bool = False
    needs_output: bool = True
    last_layer: int = -1
    frees: tuple[int, ...] = ()
    keeps_output: bool = True

    @property
    def first_token(self) -> int:
        """Return the position of the chunk's first token in the sequence."""
        return self.number * self.size

    def past(self, layer: int) -> LayerPast:
        """Return the earlier chunks as one layer may see them."""
        return LayerPast(self, layer)

    def attend(self, core: Callable[..., torch.Tensor], layer: int, first_head: int, q: torch.Tensor, k: torch.Tensor,
               v: torch.Tensor, **how: Any) -> torch.Tensor:
        """See ``Earlier``. The core tells groups of heads apart itself, after their exchange."""
        return core(q, k, v, past=self.past(layer), **how)


@dataclass(frozen=True)
class LayerPast:
    """What one layer may see of earlier chunks."""

    chunk: Chunk
    layer: int

    def of_heads(self, first_head: int) -> Past:
        """Return what a group of heads may see, given the number of its first query head in the model."""
        return Past(self.chunk, self.chunk.store.of_heads(self.layer, first_head),
                    attends=self.chunk.needs_output or self.layer != self.chunk.last_layer)


class Past:
    """The earlier chunks' keys and values of one layer and group of heads, as the current chunk sees them."""

    def __init__(self, chunk: Chunk, kept: _Kept, *, attends: bool = True):
        self.attends = attends
        self.number, self.size, self.first_token, self.keeps = chunk.number, chunk.size, chunk.first_token, chunk.keeps
        self._kept, self._storage, self._frees = kept, chunk.store.storage, chunk.frees
        self._keep_outputs = chunk.store.keep_outputs and chunk.keeps_output

    def keep(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keep the current chunk's k, v [b, C, g, d] if later chunks need them; free those that no chunk needs now."""
        for number in self._frees:
            self._kept.values.pop(number, None)
            self._kept.outputs.pop(number, None)
        if self.keeps:
            self._kept.values[self.number] = self._storage.put(torch.stack((k.detach(), v.detach())))

    def queries(self, tokens: int) -> tuple[int, int]:
        """Return the positions of the current chunk's first ``tokens`` tokens in the sequence, half-open."""
        return self.first_token, self.first_token + tokens

    def keys(self, number: int) -> tuple[int, int]:
        """Return the positions of an earlier chunk's tokens in the sequence, half-open."""
        return number * self.size, (number + 1) * self.size

    def blocks(self, numbers: Iterable[int], *,
               with_gradients: bool = False) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Start to fetch the first of some earlier chunks' keys and values, and return an iterator over all of them.

        While the caller computes with one chunk's, the next chunk's are fetched.

        Args:
            with_gradients: fetch the gradients too, because the caller will add to them.

        Yields:
            number of the chunk, k, v [b, C, g, d]
        """
        wanted = list(numbers)
        for number in wanted[:1]:
            self._prefetch(number, with_gradients)
        return self._blocks(wanted, with_gradients)

    def _blocks(self, numbers: list[int],
                with_gradients: bool) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        for number, following in zip(numbers, [*numbers[1:], None]):
            if following is not None:
                self._prefetch(following, with_gradients)
            k, v = self._storage.get(self._kept.values[number])
            yield number, k, v

    def _prefetch(self, number: int, with_gradients: bool) -> None:
        self._storage.prefetch(self._kept.values[number])
        if with_gradients and number in self._kept.gradients:
            self._storage.prefetch(self._kept.gradients[number])

    def add_gradient(self, number: int, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Add to the gradients of an earlier chunk's keys and values, dk, dv [b, C, g, d]."""
        stored = self._kept.gradients.get(number)
        if stored is None:
            wide = torch.promote_types(dk.dtype, torch.float32)
            self._kept.gradients[number] = self._storage.put(torch.stack((dk, dv)).to(wide))
            return
        total = self._storage.get(stored)
        total[0] += dk
        total[1] += dv
        self._storage.replace(stored, total)

    def take_gradient(self) -> torch.Tensor | None:
        """Return what later chunks sent to this chunk's keys and values, [2, b, C, g, d], and free all of the chunk.

        None for the last chunk, which has no later ones.
        """
        self._kept.values.pop(self.number, None)
        self._kept.outputs.pop(self.number, None)
        stored = self._kept.gradients.pop(self.number, None)
        return None if stored is None else self._storage.get(stored)

    def keep_output(self, o: torch.Tensor, lse: torch.Tensor) -> None:
        """Keep the result of attention for the second pass, if the store keeps outputs."""
        if self._keep_outputs:
            self._kept.outputs[self.number] = self._storage.put(o), self._storage.put(lse)

    def kept_output(self) -> Output | None:
        """Return the kept result of attention of this chunk, or None."""
        output = self._kept.outputs.get(self.number)
        return None if output is None else (self._storage.get(output[0]), self._storage.get(output[1]))
