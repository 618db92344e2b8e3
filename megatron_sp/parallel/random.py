"""Stateless randomness: every mask is drawn from a generator keyed by what it belongs to.

A key is a stable hash of seed, global sample id, layer, site, token shard and head. So
recomputation replays a mask, microbatches never repeat one, and a checkpoint stores no random
state. Ranks that hold copies of a tensor use equal keys, ranks that hold different parts
different ones.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch


def stable_key(*parts: int | str) -> int:
    """A 63-bit number that depends on the parts alone, equal on every machine and run."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def keyed_generator(device: torch.device, *parts: int | str) -> torch.Generator:
    """A generator on this device, seeded by the parts."""
    return torch.Generator(device).manual_seed(stable_key(*parts))


@dataclass(frozen=True)
class Dropout:
    """Dropout of one site in one layer.

    Args:
        probability: share of the elements set to zero.
        seed: the run's seed.
        site: where, for example ``"3/mlp"``.
    """

    probability: float
    seed: int
    site: str

    def keep(self, shape: tuple[int, ...], device: torch.device, *where: int) -> torch.Tensor:
        """The boolean mask of one sample's piece; ``where`` starts with the global sample id."""
        generator = keyed_generator(device, self.seed, self.site, *where)
        uniform = torch.rand(shape, device=device, generator=generator)
        return uniform >= self.probability

    def hidden(self, x: torch.Tensor, sample_ids: torch.Tensor, first_token: int) -> torch.Tensor:
        """Drop elements of a hidden state.

        Args:
            x: [b, t, h]
            sample_ids: int64 [b] on the CPU, global sample ids
            first_token: number of the first of the t tokens among all shards' tokens
        """
        if self.probability == 0.0:
            return x
        keep = torch.stack([self.keep(tuple(x.shape[1:]), x.device, sample, first_token)
                            for sample in sample_ids.tolist()])
        return (x * keep).mul(1.0 / (1.0 - self.probability))
