"""The order, the memory traffic and the pieces of a ring's work, on a stand-in for its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from megatron_sp.layout.masks.attention_mask import CAUSAL, AttentionMask
from megatron_sp.parallel.ring import Ring, RingAttention, Work, merge
from megatron_sp.proof.traffic import Traffic


class EmptyKernel:
    """Stands in for a kernel: returns tensors without values, so that only the work around it is counted."""

    description = "empty"

    def __init__(self, events: list[str]):
        self.events = events

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        self.events.append("compute")
        return torch.empty_like(q), torch.empty(q.shape[0], q.shape[2], q.shape[1], device=q.device)

    def backward(self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
                 lse: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.events.append("compute")
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class Transfer:
    """Stands in for a transfer between ranks."""

    def __init__(self, number: int, events: list[str]):
        self.number, self.events = number, events

    def wait(self) -> None:
        self.events.append(f"wait {self.number}")


@dataclass(frozen=True)
class LoneRing(Ring):
    """A rank of a ring whose neighbours send tensors without values."""

    ranks: int = 4
    place: int = 3
    events: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.ranks

    @property
    def rank(self) -> int:
        return self.place

    def start_shift(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        number = sum(event.startswith("send") for event in self.events)
        self.events.append(f"send {number}")
        return torch.empty_like(x), [Transfer(number, self.events)]


def lone_ring(**how: Any) -> LoneRing:
    events: list[str] = []
    return LoneRing(None, EmptyKernel(events), events=events, **how)  # type: ignore[arg-type]


def inputs(tokens: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(1, tokens, heads, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
                 for heads in (32, 8, 8))


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("documents", [False, True])
def test_every_transfer_has_work_beside_it(ranks: int, documents: bool) -> None:
    mask = AttentionMask(((0, 40 * ranks - 1),)) if documents else CAUSAL  # the last document has one token
    ring = lone_ring(ranks=ranks, place=ranks - 1)
    o = RingAttention(ring)(*inputs(40), mask=mask)
    forward = len(ring.events)
    o.backward(torch.empty_like(o))
    for events, transfers in ((ring.events[:forward], ranks - 1), (ring.events[forward:], 2 * (ranks - 1))):
        sent = [event.split()[1] for event in events if event.startswith("send")]
        assert len(sent) == transfers
        for number in sent:
            beside = events[events.index(f"send {number}"):events.index(f"wait {number}")]
            assert "compute" in beside, f"nothing is computed while transfer {number} runs: {events}"


def test_partial_results_are_merged_in_place() -> None:
    """In a ring of 4, per rank 4096 tokens of 32 heads of 128: a MiB moved is time on a GPU."""
    ring = lone_ring()
    with Traffic() as forward:
        o = RingAttention(ring)(*inputs(4096))
    with Traffic() as backward:
        o.backward(torch.empty_like(o))
    assert forward.moved <= 1105 * 2**20 and forward.operators <= 19
    assert backward.moved <= 1362 * 2**20 and backward.operators <= 26
    assert not {"copy_", "mul", "add"} & {*forward.launched, *backward.launched}, "a temporary or a copy onto itself"


def test_merged_results_are_those_of_all_keys() -> None:
    generator = torch.Generator().manual_seed(0)
    scores, values = (torch.randn(shape, dtype=torch.float64, generator=generator)
                      for shape in ((2, 3, 5, 12), (2, 12, 3, 4)))
    whole = torch.einsum("bnqk,bknd->bqnd", scores.softmax(-1), values)
    o, lse = torch.zeros_like(whole), torch.full((2, 3, 5), -torch.inf, dtype=torch.float64)
    for keys in (slice(0, 1), slice(1, 8), slice(8, 12)):
        part = torch.einsum("bnqk,bknd->bqnd", scores[..., keys].softmax(-1), values[:, keys])
        merge(o, lse, part, scores[..., keys].logsumexp(-1))
    torch.testing.assert_close(o, whole, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-13, atol=1e-13)


def seen(work: list[Work], batch: int, tokens: int) -> torch.Tensor:
    """Return how often each pair of query and key is computed, [b, t, t]."""
    counts = torch.zeros(batch, tokens, tokens, dtype=torch.int64)
    for rows, queries, keys, causal, mirrored in work:
        part = torch.ones(queries.stop - queries.start, keys.stop - keys.start, dtype=torch.int64)
        counts[rows, queries, keys] += part.tril() if causal else part.triu() if mirrored else part
    return counts


@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("mask", [CAUSAL, CAUSAL.within(7), AttentionMask(((0, 3, 9, 20), (0,))),
                                  AttentionMask(((0, 3), (0, 31)), 5)], ids=["causal", "window", "documents", "both"])
def test_the_halves_of_the_own_work_are_all_of_it(zigzag: bool, mask: AttentionMask) -> None:
    ring, shape = lone_ring(ranks=2, place=1, zigzag=zigzag), torch.Size((2, 20, 4, 8))
    first, last = ring.halves_of_own_work(shape, mask)
    whole = seen(ring.work(1, shape, mask), 2, 20)
    assert torch.equal(seen(first, 2, 20) + seen(last, 2, 20), whole)
    assert last and 0.4 < seen(first, 2, 20).sum() / whole.sum() < 0.75


def test_one_token_cannot_be_halved() -> None:
    first, last = lone_ring(ranks=2, zigzag=False).halves_of_own_work(torch.Size((1, 1, 4, 8)), CAUSAL)
    assert len(first) == 1 and not last
