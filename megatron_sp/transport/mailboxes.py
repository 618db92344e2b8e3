"""Copy tensors between CPU processes of one machine through memory that they share.

torch's CPU collectives (gloo) send through sockets: the kernel copies every byte twice, and a reduce-scatter
or an all-gather costs twice what its all-to-all costs. Here each rank owns a piece of shared memory with one
mailbox for each peer. Each mailbox has two slots, so that the sender fills one while the receiver empties the
other. A tensor that does not fit a slot travels in several messages. ::

    memory of rank 0:   [ box for rank 1: slot 0 | slot 1 ][ box for rank 2: slot 0 | slot 1 ] ...
    memory of rank 1:   [ box for rank 0: slot 0 | slot 1 ][ box for rank 2: slot 0 | slot 1 ] ...

    rank 0:  fill slot 0, send FULL | fill slot 1, send FULL | wait for EMPTY | fill slot 0 again ...
    rank 1:  wait for FULL          | empty slot 0, send EMPTY | empty slot 1, send EMPTY ...

FULL and EMPTY are single bytes on a Unix socket between the two ranks. A rank that waits blocks in the kernel
and uses no processor time. The group's time-out bounds each wait, and the kernel reports at once when the
peer's process ends.

Each slot begins with a header of four 64-bit numbers::

    [ bytes in this message | bytes of the whole exchange to this peer | number of the exchange | answer ]

The receiver compares the first three with what it expects. When they differ, the two ranks called with
different shapes or in a different order. The receiver then writes the number of bytes it expected, plus one,
as the answer, sends REFUSED to that peer, and both raise ``MismatchError``.
"""

from __future__ import annotations

import contextlib
import mmap
import socket
import struct
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch

from megatron_sp.errors import PeerLostError

#: Largest size of a slot in bytes.
MAX_SLOT = 1 << 20
#: Smallest size of a slot in bytes.
MIN_SLOT = 128 << 10
#: Bytes that all mailboxes of one rank should stay below, so that they fit the processor's caches.
MAX_MAILBOXES = 8 << 20
#: Every tensor in a slot starts at a multiple of this many bytes. The slot's header takes the first ALIGNMENT bytes.
ALIGNMENT = 64
FULL, EMPTY, REFUSED = b"F", b"E", b"R"

#: For each rank, the tensors that are sent to it or received from it.
TensorsByRank = Sequence[Sequence[torch.Tensor]]


class Slot(NamedTuple):
    """One of the two parts of a mailbox; it holds one message."""

    header: memoryview  # four int64
    data: torch.Tensor  # uint8 [slot], the header included


class MismatchError(RuntimeError):
    """Two ranks called an exchange with different shapes; a mistake in the program."""


class Mailboxes:
    """The mailboxes of this rank and of its peers; made by ``connect.open_mailboxes``.

    Args:
        rank: number of this process within the group.
        global_ranks: global rank of each rank of the group, for messages.
        sockets: a socket to each peer, by the peer's rank in the group.
        memories: the shared memory of each rank, this rank's included.
        timeout: the longest time to wait for a peer.
        slot: bytes of a slot; a multiple of ``ALIGNMENT``.
        axis: name of the group's axis, for messages, for example ``ulysses``.
    """

    def __init__(self, rank: int, global_ranks: Sequence[int], sockets: dict[int, socket.socket],
                 memories: Sequence[mmap.mmap], timeout: timedelta, slot: int, axis: str = ""):
        self.rank, self.size, self.global_ranks = rank, len(global_ranks), list(global_ranks)
        self.timeout, self.slot, self.axis = timeout, slot, axis
        self._sockets = sockets
        self._outgoing = {peer: _two_slots(memories[rank], peer, slot) for peer in sockets}
        self._incoming = {peer: _two_slots(memories[peer], rank, slot) for peer in sockets}
        self._num_empty = dict.fromkeys(sockets, 2)  # slots in this rank's memory that it may fill
        self._num_full = dict.fromkeys(sockets, 0)   # slots in the peer's memory that this rank may empty
        self._num_sent = dict.fromkeys(sockets, 0)
        self._num_received = dict.fromkeys(sockets, 0)
        self._num_exchanges = 0
        seconds = timeout.total_seconds()
        for each in sockets.values():
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO,
                            struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))

    def exchange(self, send: TensorsByRank, receive: TensorsByRank, *, add: bool = False) -> None:
        """Copy ``send[p]`` of this rank into ``receive[this rank]`` of rank p, for all p; all ranks call it.

        Args:
            send: tensors for each rank; a row (index of the first dimension) must fit a slot.
            receive: tensors to fill, of the same shapes and types as the sender's.
            add: add to what ``receive`` holds instead of overwriting it.

        Raises:
            PeerLostError: a rank ended or did not answer within the time-out.
            MismatchError: a peer sent or wanted another number of bytes.
        """
        self._num_exchanges += 1
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        outgoing = {peer: messages_of(send[peer], self.slot) for peer in peers}
        incoming = {peer: messages_of(receive[peer], self.slot) for peer in reversed(peers)}
        own: Iterator[tuple[torch.Tensor, torch.Tensor]] = zip(receive[self.rank], send[self.rank], strict=True)
        while outgoing or incoming:
            for peer, messages in list(outgoing.items()):
                message = next(messages, None)
                if message is None:
                    del outgoing[peer]
                else:
                    self._send_message(peer, message, _num_bytes(send[peer]))
            for target, source in own:  # all in the first round, while the peers fill slots
                target.add_(source) if add else target.copy_(source)
            for peer, messages in list(incoming.items()):
                message = next(messages, None)
                if message is None:
                    del incoming[peer]
                else:
                    self._receive_message(peer, message, _num_bytes(receive[peer]), add)

    @torch.no_grad()
    def sum_in_place(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace contiguous tensors by their sums over the ranks.

        Each rank adds up one part of every tensor and sends the sum to the others. So all ranks hold the same
        bits afterwards.
        """
        parts = [tensor.view(-1).tensor_split(self.size) for tensor in tensors]
        of_rank = [[part[rank] for part in parts] for rank in range(self.size)]
        mine, nothing = of_rank[self.rank], []  # type: list[torch.Tensor], list[torch.Tensor]
        is_peer = [rank != self.rank for rank in range(self.size)]
        self.exchange([part if peer else nothing for part, peer in zip(of_rank, is_peer)],
                      [mine if peer else nothing for peer in is_peer], add=True)
        self.exchange([mine if peer else nothing for peer in is_peer],
                      [part if peer else nothing for part, peer in zip(of_rank, is_peer)])

    def close(self) -> None:
        """Release sockets and memory."""
        for each in self._sockets.values():
            each.close()
        self._outgoing, self._incoming = {}, {}

    def _send_message(self, peer: int, message: list[torch.Tensor], total: int) -> None:
        """Copy a message into the next slot for a peer, and tell the peer that the slot is full."""
        while not self._num_empty[peer]:
            self._wait_for(peer)
        self._num_empty[peer] -= 1
        slot = self._outgoing[peer][self._num_sent[peer] % 2]
        self._num_sent[peer] += 1
        slot.header[0], slot.header[1], slot.header[2], slot.header[3] = (
            _num_bytes(message), total, self._num_exchanges, 0)
        for tensor, place in _places(message, slot.data):
            place.copy_(tensor)
        try:
            self._sockets[peer].sendall(FULL)
        except OSError:
            # The peer closed its socket. It may have sent REFUSED before; _wait_for reads that and raises the error.
            while True:
                self._wait_for(peer)

    def _receive_message(self, peer: int, message: list[torch.Tensor], total: int, add: bool) -> None:
        """Copy the peer's next slot into the tensors of a message, or add it to them, and send EMPTY."""
        while not self._num_full[peer]:
            self._wait_for(peer)
        self._num_full[peer] -= 1
        slot = self._incoming[peer][self._num_received[peer] % 2]
        self._num_received[peer] += 1
        found, total_sent, number, _ = slot.header
        if (found, total_sent, number) != (_num_bytes(message), total, self._num_exchanges):
            slot.header[3] = total + 1
            with contextlib.suppress(OSError):
                self._sockets[peer].sendall(REFUSED)
            raise self._mismatch(peer, self.rank, total_sent, total)
        for tensor, place in _places(message, slot.data):
            tensor.add_(place) if add else tensor.copy_(place)
        with contextlib.suppress(OSError):  # a peer that has sent everything may have ended
            self._sockets[peer].sendall(EMPTY)

    def _wait_for(self, peer: int) -> None:
        """Block until a peer has sent at least one byte; each byte says that one slot is full, empty or refused."""
        try:
            received = self._sockets[peer].recv(64)
        except BlockingIOError:
            raise PeerLostError(f"rank {self.global_ranks[self.rank]} waited {self.timeout} for rank "
                                f"{self._name(peer)} (--distributed-timeout-minutes)") from None
        except OSError:
            received = b""
        if not received:
            raise PeerLostError(f"rank {self._name(peer)} ended while rank {self.global_ranks[self.rank]} waited for "
                                "its data")
        if REFUSED in received:
            sent, answer = next((slot.header[1], slot.header[3]) for slot in self._outgoing[peer] if slot.header[3])
            raise self._mismatch(self.rank, peer, sent, answer - 1)
        self._num_full[peer] += received.count(FULL)
        self._num_empty[peer] += received.count(EMPTY)

    def _name(self, peer: int) -> str:
        return f"{self.global_ranks[peer]}{f' of its {self.axis} group' if self.axis else ''}"

    def _mismatch(self, sender: int, receiver: int, sent: int, wanted: int) -> MismatchError:
        return MismatchError(
            f"rank {self.global_ranks[sender]} sends {sent} bytes where rank {self.global_ranks[receiver]} expects "
            f"{wanted}{f' ({self.axis} group)' if self.axis else ''}: the ranks passed tensors of different shapes, or "
            "called their exchanges in different orders")


def slot_bytes(size: int) -> int:
    """Return the bytes of a slot among ``size`` ranks: a multiple of ``ALIGNMENT`` that any row of an exchange fits."""
    return min(MAX_SLOT, max(MIN_SLOT, MAX_MAILBOXES // (2 * size))) // ALIGNMENT * ALIGNMENT


def messages_of(tensors: Sequence[torch.Tensor], slot: int) -> Iterator[list[torch.Tensor]]:
    """Cut tensors along their first dimension and group the pieces into messages that fit a slot.

    Yields:
        the messages; one empty message when there is nothing to send, so that a peer that expects something finds
        the mistake at once
    """
    message: list[torch.Tensor] = []
    room = capacity = slot - ALIGNMENT  # both stay multiples of ALIGNMENT
    num_messages = 0
    for tensor in tensors:
        start, length = 0, len(tensor)
        row = tensor[0].numel() * tensor.element_size() if length else 0
        assert row <= capacity, f"a row of {row} bytes does not fit a slot of {slot} bytes"
        while row and start < length:
            stop = min(length, start + room // row)
            if stop == start:
                yield message
                num_messages += 1
                message, room = [], capacity
                continue
            message.append(tensor[start:stop])
            room -= _aligned((stop - start) * row)
            start = stop
    if message or not num_messages:
        yield message


def _two_slots(memory: mmap.mmap, box: int, slot: int) -> list[Slot]:
    """Return the two slots of mailbox number ``box`` in a rank's memory, as views of it."""
    starts = [(2 * box + index) * slot for index in range(2)]
    return [Slot(memoryview(memory)[start:start + 32].cast("q"),
                 torch.frombuffer(memory, dtype=torch.uint8, count=slot, offset=start)) for start in starts]


def _places(message: list[torch.Tensor], slot: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each tensor of a message with the view of the slot that holds its data."""
    offset = ALIGNMENT  # after the header
    for tensor in message:
        size = tensor.numel() * tensor.element_size()
        yield tensor, slot[offset:offset + size].view(tensor.dtype).view(tensor.shape)
        offset += _aligned(size)


def _num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
