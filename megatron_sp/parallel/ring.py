"""Ring attention: keys and values travel, queries stay, partial results are merged by log-sum-exp.

Liu et al. (arXiv 2310.01889), with the zigzag ownership of ``layout.SequenceLayout`` so that every
ring member does the same work under the causal mask: in each step a member either attends with
all its queries to the early half of the visiting keys, or with its late queries to all of them,
and no step needs a mask but the first. The next block is sent while the current one is computed.

Forward sends ``(r-1) * t * 2 * g * d`` elements per member, backward as much again for the keys
and values and as much for their gradients plus one hop home.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_sp.parallel.ulysses import BytesSent

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class BlockKernel(Protocol):
    """Attention of some queries to some keys, with what is needed to merge and to go back."""

    description: str

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """q [b, t, n, d], k, v [b, t', g, d] -> o [b, t, n, d], log-sum-exp [b, n, t] (at least fp32)"""

    def backward(self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
                 lse: torch.Tensor, causal: bool) -> Triple:
        """dq, dk, dv of this block alone, given the *merged* o and log-sum-exp of the queries."""


@dataclass(frozen=True)
class Ring:
    """The members of a ring and this rank's place in it."""

    group: dist.ProcessGroup
    kernel: BlockKernel
    zigzag: bool = True
    sent: BytesSent = field(default_factory=BytesSent)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def pass_on(self, x: torch.Tensor) -> tuple[torch.Tensor, list[dist.Work]]:
        """Start sending x to the next member and receiving from the previous one."""
        received = torch.empty_like(x)
        ranks = dist.get_process_group_ranks(self.group)
        after, before = ranks[(self.rank + 1) % self.size], ranks[(self.rank - 1) % self.size]
        swap = [dist.P2POp(dist.isend, x, after, self.group), dist.P2POp(dist.irecv, received, before, self.group)]
        return received, dist.batch_isend_irecv(swap)

    def overlap(self, source: int, tokens: int, causal: bool) -> tuple[slice, slice, bool] | None:
        """Which queries attend to which of the keys of member ``source``, and whether under a mask.

        None when they do not attend at all (contiguous ownership of later tokens).
        """
        every = slice(0, tokens)
        if not causal:
            return every, every, False
        if source == self.rank:
            return every, every, True
        if not self.zigzag:
            return (every, every, False) if source < self.rank else None
        half = tokens // 2
        return (every, slice(0, half), False) if source < self.rank else (slice(half, tokens), every, False)


def merge(o: torch.Tensor, lse: torch.Tensor, o_block: torch.Tensor,
          lse_block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine two softmax results over different keys.

    Args:
        o, o_block: [b, t, n, d]
        lse, lse_block: [b, n, t]
    """
    total = torch.logaddexp(lse, lse_block)
    old, new = ((part - total).exp().transpose(1, 2).unsqueeze(-1) for part in (lse, lse_block))
    return o * old + o_block * new, total


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: Ring, causal: bool) -> torch.Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        visiting = torch.stack((k, v))  # [2, b, t, g, d]
        o = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=wide, device=q.device)
        for step in range(ring.size):
            is_last = step == ring.size - 1
            arriving, pending = (visiting, []) if is_last else ring.pass_on(visiting)
            if not is_last:
                ring.sent.add([visiting])
            found = ring.overlap((ring.rank - step) % ring.size, q.shape[1], causal)
            if found is not None:
                queries, keys, masked = found
                o_block, lse_block = ring.kernel.forward(q[:, queries], visiting[0][:, keys], visiting[1][:, keys],
                                                         masked)
                o[:, queries], lse[..., queries] = merge(o[:, queries], lse[..., queries], o_block.to(wide),
                                                         lse_block.to(wide))
            for work in pending:
                work.wait()
            visiting = arriving
        result = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.ring, ctx.causal = ring, causal
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, k, v, o, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        wide = torch.promote_types(q.dtype, torch.float32)
        visiting = torch.stack((k, v))
        dq = torch.zeros(q.shape, dtype=wide, device=q.device)
        travelling = torch.zeros(visiting.shape, dtype=wide, device=q.device)  # gradient of the visiting block
        coming_home: list[dist.Work] = []
        for step in range(ring.size):
            is_last = step == ring.size - 1
            arriving, pending = (visiting, []) if is_last else ring.pass_on(visiting)
            found = ring.overlap((ring.rank - step) % ring.size, q.shape[1], ctx.causal)
            block = None
            if found is not None:
                queries, keys, masked = found
                dq_block, *block = ring.kernel.backward(
                    grad[:, queries], q[:, queries], visiting[0][:, keys], visiting[1][:, keys], o[:, queries],
                    lse[..., queries], masked)
                dq[:, queries] += dq_block
            for work in coming_home:  # the gradient so far of the block that visits now
                work.wait()
            if found is not None and block is not None:
                travelling[0][:, keys] += block[0]
                travelling[1][:, keys] += block[1]
            travelling, coming_home = ring.pass_on(travelling)  # after the last step this is the hop home
            for work in pending:
                work.wait()
            visiting = arriving
        for work in coming_home:
            work.wait()
        dk, dv = travelling.to(k.dtype)
        return dq.to(q.dtype), dk, dv, None, None


class RingAttention:
    """An attention core over a ring; same signature as a core."""

    def __init__(self, ring: Ring):
        self.ring = ring

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True,
                 dropout: Any = None) -> torch.Tensor:
        """q [b, s/r, n, d], k, v [b, s/r, g, d] -> [b, s/r, n, d]"""
        assert dropout is None, "refused at start: no attention dropout in a ring"
        return _RingAttention.apply(q, k, v, self.ring, causal)
