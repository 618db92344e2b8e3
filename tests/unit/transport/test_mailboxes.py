"""The arithmetic of messages and slots, for every number of ranks."""

from __future__ import annotations

import os
import socket

import pytest
import torch

from megatron_sp.transport import connect
from megatron_sp.transport.mailboxes import ALIGNMENT, MAX_MAILBOXES, MAX_SLOT, MIN_SLOT, messages_of, slot_bytes


@pytest.mark.parametrize("size", [*range(1, 13), 24, 100])
def test_slots_can_be_seen_as_numbers_and_stay_small(size: int) -> None:
    slot = slot_bytes(size)
    assert slot % ALIGNMENT == 0 and MIN_SLOT <= slot <= MAX_SLOT
    assert slot in (MIN_SLOT, MAX_SLOT) or 2 * size * slot <= MAX_MAILBOXES
    memory = torch.zeros(2 * size * slot, dtype=torch.uint8)
    for box in range(2 * size):
        memory[box * slot:][:32].view(torch.int64)


@pytest.mark.parametrize("size", [*range(1, 11), 12])
@pytest.mark.parametrize("shapes, dtype", [
    ([(4_000_001,), (3,), (0,), (700_000,)], torch.bfloat16), ([(33, 1001), (2, 5, 7)], torch.float64),
    ([], torch.int8)])
def test_messages_fit_and_hold_everything_in_order(size: int, shapes: list[tuple[int, ...]],
                                                   dtype: torch.dtype) -> None:
    slot = slot_bytes(size)
    tensors = [torch.arange(torch.Size(shape).numel()).to(dtype).view(shape) for shape in shapes]
    messages = list(messages_of(tensors, slot))
    assert messages, "an exchange of nothing sends one empty message"
    for message in messages:
        used = ALIGNMENT + sum(-(-piece.nbytes // ALIGNMENT) * ALIGNMENT for piece in message)
        assert used <= slot
    pieces = [piece.flatten() for message in messages for piece in message]
    wanted = [tensor.flatten() for tensor in tensors]
    assert torch.equal(torch.cat([torch.empty(0, dtype=dtype), *pieces]),
                       torch.cat([torch.empty(0, dtype=dtype), *wanted]))


@pytest.mark.parametrize("module, name", [(os, "memfd_create"), (socket, "send_fds"), (socket, "SO_PEERCRED")])
def test_a_python_without_a_call_does_not_share_memory(monkeypatch: pytest.MonkeyPatch, module: object,
                                                       name: str) -> None:
    assert connect.can_share_memory()
    monkeypatch.delattr(module, name)
    assert not connect.can_share_memory()
