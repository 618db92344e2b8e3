"""Copies through shared memory: placement, sums, cut messages, and what happens when a rank ends, waits or errs."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_sp.errors import PeerLostError
from megatron_sp.layout.heads import HeadSplit
from megatron_sp.model.attention.cores import SDPACore
from megatron_sp.parallel.sequence import match_heads
from megatron_sp.parallel.ulysses import UlyssesAttention, UlyssesExchange
from megatron_sp.transport import connect
from megatron_sp.transport.channel import Channel, CollectiveChannel, SharedMemoryChannel, SplitChange
from megatron_sp.transport.connect import open_mailboxes
from megatron_sp.transport.mailboxes import Mailboxes, MismatchError
from tests.distributed.parallel.test_ulysses import HEADS, TOKENS, WIDTH
from tests.helpers.spawn import RunRanks

CPU = torch.device("cpu")


def open_world(seconds: float = 30, slot: int = 0) -> Mailboxes:
    mailboxes = open_mailboxes(dist.group.WORLD, timedelta(seconds=seconds), "ulysses",  # type: ignore[arg-type]
                               slot=slot)
    assert mailboxes is not None
    return mailboxes


def check_exchange(mailboxes: Mailboxes, rows: int) -> None:
    """Tensors of all kinds, strided ones too; rank p sends rank q p + q + 1 times ``rows`` rows."""
    size, rank = mailboxes.size, mailboxes.rank

    def pieces(source: int, target: int) -> list[torch.Tensor]:
        count = (source + target + 1) * rows
        whole = torch.arange(count * 6, dtype=torch.float64).view(6, count).t() + 1e6 * source + 1e3 * target
        return [whole[:, ::2], whole[:, 1:2].contiguous().view(-1), whole[:0]]

    for add in (False, True):
        receive = [[torch.ones_like(x) for x in pieces(source, rank)] for source in range(size)]
        mailboxes.exchange([pieces(rank, target) for target in range(size)], receive, add=add)
        for source in range(size):
            for got, sent in zip(receive[source], pieces(source, rank)):
                assert torch.equal(got, sent + add), (source, rank, add)


def check_sums(channel: Channel) -> None:
    """Tensors smaller than the number of ranks, empty ones, and some larger than all slots."""
    size, rank = channel.size, channel.rank
    shapes = [(), (1,), (0, 3), (3,), (300, 1001), (5, 7, 2)]

    def own(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))

    tensors = [own(rank, shape) for shape in shapes]
    channel.sum_in_place(tensors)
    for tensor, shape in zip(tensors, shapes):
        torch.testing.assert_close(tensor, sum(own(each, shape) for each in range(size)))
    copies = [torch.empty_like(tensors[4]) for _ in range(size)]
    dist.all_gather(copies, tensors[4])
    assert all(torch.equal(copies[0], copy) for copy in copies)  # the same bits everywhere


def check_attention(channels: tuple[Channel, Channel]) -> None:
    """The Ulysses exchange through both channels: the same bits, and the same bytes are counted."""
    size, rank = channels[0].size, channels[0].rank
    for (n, g), batch in ((heads, batch) for heads in HEADS for batch in (1, 2)):
        split = HeadSplit.of(n, g, ulysses=size)
        core = match_heads(SDPACore(), split.kv_indices(rank)) if split.kv_indices(rank) else None
        whole = [torch.randn(batch, TOKENS // 4 * size, count, WIDTH, dtype=torch.float64,
                             generator=torch.Generator().manual_seed(count)) for count in (n, g, g)]
        found = []
        for channel in channels:
            exchange = UlyssesExchange(channel, split)
            mine = [x.chunk(size, 1)[rank].clone().requires_grad_() for x in whole]
            out = UlyssesAttention(core or (lambda q, k, v, **_: q), exchange)(*mine)
            weight = torch.arange(float(out.shape[1]), dtype=torch.float64)[:, None, None]
            gradients = torch.autograd.grad((out * weight).sum(), mine, allow_unused=True)
            found.append([out, *(grad for grad in gradients if grad is not None),
                          torch.tensor([exchange.sent.forward, exchange.sent.exchanges])])
        for collective, memory in zip(*found):
            assert torch.equal(collective, memory), (n, g, batch)


def check_all(slot: int) -> None:
    mailboxes = open_world(slot=slot)
    for rows in (1, 300):
        check_exchange(mailboxes, rows)
    channels = CollectiveChannel(dist.group.WORLD, CPU), SharedMemoryChannel(mailboxes)  # type: ignore[arg-type]
    for channel in channels:
        check_sums(channel)
    check_attention(channels)
    mailboxes.close()


@pytest.mark.parametrize("size, slot", [(2, 1 << 20), (4, 1 << 12), (7, 0)])  # small slots need several messages
def test_mailboxes(ranks: RunRanks, size: int, slot: int) -> None:
    ranks(check_all, size, slot)


def message_about(action: str) -> str:
    mailboxes = open_world(seconds=1)
    if dist.get_rank() == 1:
        if action == "end":
            mailboxes.close()
        time.sleep(3)
        return ""
    with pytest.raises(PeerLostError) as error:
        mailboxes.sum_in_place([torch.ones(3)])
    assert error.value.exit_code == 1
    return str(error.value)


def test_a_rank_that_ends_or_is_late_is_named(ranks: RunRanks) -> None:
    assert ranks(message_about, 2, "end")[0] == "rank 1 of its ulysses group ended while rank 0 waited for its data"
    late = ranks(message_about, 2, "sleep")[0]
    assert late.startswith("rank 0 waited 0:00:01 for rank 1 of its ulysses") and "--distributed-timeout" in late


def mismatched(rows: tuple[int, int]) -> tuple[str, float]:
    """What a rank is told, and after how long, when rank 1 passes another number of rows than rank 0."""
    channel = SharedMemoryChannel(open_world(seconds=20))
    count = rows[dist.get_rank()]
    start = time.monotonic()
    with pytest.raises((MismatchError, PeerLostError)) as error:
        channel.start_all_to_all([torch.ones(1, count * channel.size, 3, 20_000)], SplitChange(
            1, ((count,) * channel.size,), 2, ((3,) * channel.size,)))
    channel.mailboxes.close()
    return str(error.value), time.monotonic() - start


@pytest.mark.parametrize("rows", [(1, 2), (0, 1), (3, 0)])
def test_a_wrong_shape_is_refused_at_once_on_both_sides(ranks: RunRanks, rows: tuple[int, int]) -> None:
    for message, seconds in ranks(mismatched, 2, rows):
        assert "different shapes" in message and all(f"{count * 240_000}" in message for count in rows), message
        assert seconds < 5, message


def mismatched_one_way() -> tuple[str, float]:
    """What a rank is told, and after how long, when rank 1 expects 7 of the 20 rows (5 messages) that rank 0 sends."""
    mailboxes = open_world(seconds=20)
    rows = [torch.ones(20 if mailboxes.rank == 0 else 7, 60_000)]
    start = time.monotonic()
    with pytest.raises((MismatchError, PeerLostError)) as error:
        if mailboxes.rank == 0:
            mailboxes.exchange([[], rows], [[], []])
        else:
            mailboxes.exchange([[], []], [rows, []])
    mailboxes.close()
    return str(error.value), time.monotonic() - start


def test_a_sender_learns_why_its_receiver_refuses(ranks: RunRanks) -> None:
    for message, seconds in ranks(mismatched_one_way, 2):
        assert "rank 0 sends 4800000 bytes where rank 1 expects 1680000" in message, message
        assert seconds < 5, message


def refused() -> bool:
    if dist.get_rank() == 1:
        connect.machine_name = lambda: "another"  # type: ignore[assignment]
    return open_mailboxes(dist.group.WORLD, timedelta(seconds=1)) is None  # type: ignore[arg-type]


def refused_late() -> bool:
    connect.HANDSHAKE_SECONDS = 1.0
    if dist.get_rank() == 1:
        def fail(*_: object, **__: object) -> None:
            raise OSError("no memory")
        connect.connect = fail  # type: ignore[assignment]
    return open_mailboxes(dist.group.WORLD, timedelta(seconds=1)) is None  # type: ignore[arg-type]


def without_a_call() -> bool:
    if dist.get_rank() == 1:
        del os.memfd_create
    return open_mailboxes(dist.group.WORLD, timedelta(seconds=1)) is None  # type: ignore[arg-type]


def test_all_ranks_agree_not_to_share(ranks: RunRanks) -> None:
    for function in (refused, refused_late, without_a_call):
        assert ranks(function, 2) == [True, True], function
