"""Dropout masks without random state: whether an element is dropped is a hash of what the element is.

The hash depends on the run's seed, the place in the model, the sample, the token's place in its sequence and the
channel; for attention probabilities on the query's place, the head and the key's place. It depends on nothing else. So
every layout of ranks, chunks and tiles drops the same elements, each rank draws its part without drawing the rest,
recomputation draws the same mask again, and a checkpoint stores no random state.

A mask is a table of rows (tokens, or queries of heads) and columns (channels, or keys). The costly part of the hash
makes two words of each row and one of each column. An element then takes two multiplications::

    row       = mix(mix(mix(START, sample), place), head)      two words; without the last step for hidden states
    column    = mix(START, number of the column)               one word
    kept      = scramble((row.first ^ site.first ^ column)) ^ row.second ^ site.second,
                multiplied, modulo 2^32, is at least probability x 2^32

All words have 31 bits and are stored in int64. The multipliers have 31 bits too, so that no product exceeds 62 bits and
the result is the same on every device.
"""

from __future__ import annotations

import hashlib

import torch

#: The words have so many bits; a mask of ones of this length.
BITS = 31
WORD = (1 << BITS) - 1
#: Odd multipliers, and the two words that every hash starts with (digits of pi).
MULTIPLIERS = (0x6C8E9CF5, 0x5851F42D)
START = (0x243F6A88, 0x05A308D3)
#: Rounds of ``mix``. After four, each bit of both words depends on each bit that was mixed in.
ROUNDS = 4
#: Elements drawn at a time. A CPU piece stays in a core's cache; a GPU piece is large enough to keep the GPU busy.
CPU_PIECE, GPU_PIECE = 1 << 16, 1 << 21


def stable_key(*parts: int | str) -> int:
    """Return a 63-bit hash of the parts, the same on every machine and in every run (Python's ``hash`` is not)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _scramble(word: torch.Tensor) -> torch.Tensor:
    """Return the middle bits of a product of each word, which are another word."""
    return (word * MULTIPLIERS[0] >> 16) & WORD


def mix(keys: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Mix a number into a key of two words; different numbers give different keys.

    Args:
        keys: int64 [2, ...], two words of 31 bits.
        number: int64 from 0 to 2^62 - 1; its shape is that of a word, or broadcasts with it.
    Returns:
        int64 [2, ...]
    """
    first, second = keys[0] ^ (number & WORD), keys[1] ^ (number >> BITS)
    for _ in range(ROUNDS):  # a Feistel network, which is a permutation of the pairs of words
        first, second = second ^ _scramble(first), first
    return torch.stack((first, second))


def numbered_keys(numbers: torch.Tensor) -> torch.Tensor:
    """Return a key for each number: int64 [...] -> [2, ...]."""
    start = torch.stack([torch.full_like(numbers, word) for word in START])
    return mix(start, numbers)


def token_keys(sample_ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return a key for each token of each sample: [b], [b, t] -> [2, b, t].

    Args:
        sample_ids: number of each sample in the order of the training.
        places: number of each token in its sequence.
    """
    return mix(numbered_keys(sample_ids).unsqueeze(-1), places)


class Dropout:
    """Dropout at one place in the model.

    Args:
        probability: fraction of the elements that are set to zero.
        seed: the run's seed.
        site: name of the place, for example ``"3/mlp"`` for the feed-forward output of layer 3.
    """

    def __init__(self, probability: float, seed: int, site: str):
        self.probability = probability
        self.threshold = round(probability * (1 << 32))
        key = stable_key(seed, site)
        # Tensors and not numbers, so that torch.compile compiles one kernel for all layers. In host memory, because a
        # model is built on the meta device; as they have no dimension, any device computes with them.
        self.words = [torch.tensor(word, dtype=torch.int64, device="cpu") for word in (key & WORD, key >> BITS & WORD)]

    def keep(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Return which elements to keep: [2, ...] and [c] -> bool [..., c].

        Args:
            rows: a key for each row of the mask, such as ``token_keys``.
            columns: number of each column, int64 [c].
        """
        first, second = rows[0] ^ self.words[0], rows[1] ^ self.words[1]
        names = numbered_keys(columns)[0]
        if torch.compiler.is_compiling():  # one kernel, without a temporary tensor
            mixed = _scramble(first.unsqueeze(-1) ^ names) ^ second.unsqueeze(-1)
            return (mixed * MULTIPLIERS[1] & 0xFFFFFFFF) >= self.threshold
        keep = torch.empty((*first.shape, len(columns)), dtype=torch.bool, device=rows.device)
        size = max(1, (CPU_PIECE if rows.device.type == "cpu" else GPU_PIECE) // len(columns))
        pieces = (part.reshape(-1, 1).split(size) for part in (first, second))
        for one, other, out in zip(*pieces, keep.view(-1, len(columns)).split(size)):
            x = one ^ names  # [rows, c], the only temporary tensor of the size of a piece
            x.mul_(MULTIPLIERS[0]).bitwise_right_shift_(16).bitwise_and_(WORD).bitwise_xor_(other)
            torch.ge(x.mul_(MULTIPLIERS[1]).bitwise_and_(0xFFFFFFFF), self.threshold, out=out)
        return keep

    def hidden(self, x: torch.Tensor, keys: torch.Tensor | None) -> torch.Tensor:
        """Return hidden states with dropout applied: some elements zero, the others scaled up.

        Args:
            x: [b, t, h], the tokens between tensor-parallel regions.
            keys: ``token_keys`` of these tokens, [2, b, t]; None in evaluation, where nothing is dropped.
        """
        if self.probability == 0.0 or keys is None:
            return x
        keep = self.keep(keys, torch.arange(x.shape[-1], device=x.device))
        return (x * keep).mul(1.0 / (1.0 - self.probability))
