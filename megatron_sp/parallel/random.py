"""Dropout masks without random state: each mask is drawn from a generator seeded by a key of what the mask is for.

The key is a hash of the run's seed, the global sample id, the layer and the place in it, the token shard and the head.
So recomputation draws the same mask again, no two microbatches share a mask, and a checkpoint stores no random state.
Ranks that hold copies of a tensor use equal keys; ranks that hold different parts of it use different keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch


def stable_key(*parts: int | str) -> int:
    """Return a 63-bit hash of the parts, the same on every machine and in every run (Python's ``hash`` is not)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def keyed_generator(device: torch.device, *parts: int | str) -> torch.Generator:
    """Return a generator on this device whose seed is the hash of the parts."""
    return torch.Generator(device).manual_seed(stable_key(*parts))


@dataclass(frozen=True)
class Dropout:
    """Dropout at one place in one layer.

    Args:
        probability: fraction of the elements that are set to zero.
        seed: the run's seed.
        site: name of the place, for example ``"3/mlp"`` for the feed-forward output of layer 3.
    """

    probability: float
    seed: int
    site: str

    def keep(self, shape: tuple[int, ...], device: torch.device, *where: int) -> torch.Tensor:
        """Return the boolean mask of the elements to keep, for one part of one sample.

        Args:
            where: global sample id, then numbers that tell this part from the sample's other parts.
        """
        generator = keyed_generator(device, self.seed, self.site, *where)
        uniform = torch.rand(shape, device=device, generator=generator)
        return uniform >= self.probability

    def hidden(self, x: torch.Tensor, sample_ids: Sequence[int], first_token: int) -> torch.Tensor:
        """Return a hidden state with dropout applied: some elements zero, the others scaled up.

        Args:
            x: [b, t, h]
            sample_ids: global sample number of each sequence
            first_token: number of x's first token in the whole sequence, counted in rank order
        """
        if self.probability == 0.0:
            return x
        keep = torch.stack([self.keep(tuple(x.shape[1:]), x.device, sample, first_token)
                            for sample in sample_ids])
        return (x * keep).mul(1.0 / (1.0 - self.probability))
