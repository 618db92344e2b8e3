"""Exchange between ranks of one machine's CPUs through memory they share.

torch's CPU collectives (gloo) send through sockets: every byte passes the kernel twice, and reduce-scatter
and all-gather cost twice their all-to-all. Here each rank owns a piece of anonymous shared memory with a
mailbox for each peer. A sender copies tensors into its mailbox and says so with one byte over a Unix
socket; the receiver copies them out, or adds them, and gives the mailbox back with another byte. So each
element is copied twice, at the speed of memory, also from and into strided tensors, and nobody spins.

Mailboxes are small enough to stay in the processors' caches and have two slots, so that both sides work
at once; what does not fit goes in several messages. Waiting is bounded by the group's time-out, and a peer
that ends is noticed at once.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_sp.errors import PeerLostError

#: Bytes of one slot at most; each peer has two.
SLOT = 1 << 20
#: Bytes of a rank's mailboxes together, which many peers share.
MAILBOXES = 8 << 20
#: Seconds within which a peer that is about to link must have called.
HANDSHAKE = 20.0
#: Every tensor in a slot starts at a multiple of this.
ALIGNMENT = 64
FULL, FREE = b"F", b"E"

Pieces = Sequence[Sequence[torch.Tensor]]


class SharedMemoryLink:
    """The mailboxes of the ranks of a process group; made by ``open_link``.

    Args:
        group: the ranks, all on this machine.
        sockets: one for each peer, by rank in the group.
        memories: the shared memory of each rank, this one's included.
    """

    def __init__(self, group: dist.ProcessGroup, sockets: dict[int, socket.socket],
                 memories: Sequence[mmap.mmap], timeout: timedelta):
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.global_ranks = dist.get_process_group_ranks(group)
        self.timeout = timeout
        self.slot = slot_bytes(self.size)
        self._sockets = sockets
        boxes = [torch.frombuffer(memory, dtype=torch.uint8).view(self.size, 2, self.slot) for memory in memories]
        self._outgoing = {peer: boxes[self.rank][peer] for peer in sockets}  # [2, slot]
        self._incoming = {peer: boxes[peer][self.rank] for peer in sockets}
        self._free = dict.fromkeys(sockets, 2)   # slots that may be filled
        self._full = dict.fromkeys(sockets, 0)   # slots that wait to be emptied
        self._sent = dict.fromkeys(sockets, 0)
        self._received = dict.fromkeys(sockets, 0)
        for each in sockets.values():
            seconds = timeout.total_seconds()
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO,
                            struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))

    def exchange(self, send: Pieces, receive: Pieces, *, add: bool = False) -> None:
        """Copy ``send[p]`` of this rank into ``receive[this rank]`` of rank p, for all p; all ranks call it.

        Args:
            send: tensors for each rank, cut along their first dimension where they do not fit.
            receive: tensors to fill, of the same shapes and types as the sender's.
            add: add to what is there instead of overwriting it.

        Raises:
            PeerLostError: a rank ended or did not answer within the time-out.
        """
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        outgoing = {peer: _messages(send[peer], self.slot) for peer in peers}
        incoming = {peer: _messages(receive[peer], self.slot) for peer in reversed(peers)}
        own: Iterator[tuple[torch.Tensor, torch.Tensor]] = zip(receive[self.rank], send[self.rank], strict=True)
        while outgoing or incoming:
            for peer, messages in list(outgoing.items()):
                message = next(messages, None)
                if message is None:
                    del outgoing[peer]
                else:
                    self._post(peer, message)
            for target, source in own:  # once, while the peers fill their mailboxes
                target.add_(source) if add else target.copy_(source)
            for peer, messages in list(incoming.items()):
                message = next(messages, None)
                if message is None:
                    del incoming[peer]
                else:
                    self._take(peer, message, add)

    @torch.no_grad()
    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sum contiguous tensors over the ranks, in place.

        Each rank adds up one part of every tensor and hands the sum to the others, so that all have the
        same bits.
        """
        parts = [tensor.view(-1).tensor_split(self.size) for tensor in tensors]
        of_rank = [[part[rank] for part in parts] for rank in range(self.size)]
        mine, nothing = of_rank[self.rank], []  # type: list[torch.Tensor], list[torch.Tensor]
        others = [peer != self.rank for peer in range(self.size)]
        self.exchange([part if other else nothing for part, other in zip(of_rank, others)],
                      [mine if other else nothing for other in others], add=True)
        self.exchange([mine if other else nothing for other in others],
                      [part if other else nothing for part, other in zip(of_rank, others)])

    def close(self) -> None:
        """Give sockets and memory back."""
        for each in self._sockets.values():
            each.close()
        self._outgoing, self._incoming = {}, {}

    def _post(self, peer: int, message: list[torch.Tensor]) -> None:
        while not self._free[peer]:
            self._hear(peer)
        self._free[peer] -= 1
        slot = self._outgoing[peer][self._sent[peer] % 2]
        self._sent[peer] += 1
        slot[:8].view(torch.int64).fill_(_size(message))
        for tensor, place in _places(message, slot):
            place.copy_(tensor)
        try:
            self._sockets[peer].sendall(FULL)
        except OSError:
            raise self._is_gone(peer) from None

    def _take(self, peer: int, message: list[torch.Tensor], add: bool) -> None:
        while not self._full[peer]:
            self._hear(peer)
        self._full[peer] -= 1
        slot = self._incoming[peer][self._received[peer] % 2]
        self._received[peer] += 1
        found, wanted = int(slot[:8].view(torch.int64)), _size(message)
        assert found == wanted, f"rank {self.global_ranks[peer]} sent {found} bytes where {wanted} are due"
        for tensor, place in _places(message, slot):
            tensor.add_(place) if add else tensor.copy_(place)
        with contextlib.suppress(OSError):  # a peer that needs no slot any more may have left
            self._sockets[peer].sendall(FREE)

    def _hear(self, peer: int) -> None:
        """Wait for words of a peer and count them."""
        try:
            words = self._sockets[peer].recv(64)
        except BlockingIOError:
            raise PeerLostError(f"rank {self.global_ranks[self.rank]} waited {self.timeout} for rank "
                                f"{self.global_ranks[peer]} (--distributed-timeout-minutes)") from None
        except OSError:
            raise self._is_gone(peer) from None
        if not words:
            raise self._is_gone(peer)
        self._full[peer] += words.count(FULL)
        self._free[peer] += words.count(FREE)

    def _is_gone(self, peer: int) -> PeerLostError:
        return PeerLostError(f"rank {self.global_ranks[peer]} ended while rank {self.global_ranks[self.rank]} "
                             "waited for its data")


def slot_bytes(size: int) -> int:
    """Bytes of a slot among ``size`` ranks; large enough for a token's heads in any case."""
    return min(SLOT, max(128 << 10, MAILBOXES // (2 * size)))


def _messages(pieces: Sequence[torch.Tensor], slot: int) -> Iterator[list[torch.Tensor]]:
    """Cut tensors along their first dimension and pack them into messages that fit a slot."""
    message: list[torch.Tensor] = []
    room = whole = slot - ALIGNMENT
    for piece in pieces:
        start, length = 0, len(piece)
        row = piece[0].numel() * piece.element_size() if length else 0
        assert row <= whole, "a row of this tensor does not fit a mailbox"
        while row and start < length:
            stop = min(length, start + room // row)
            if stop == start:
                yield message
                message, room = [], whole
                continue
            message.append(piece[start:stop])
            room -= _aligned((stop - start) * row)
            start = stop
    if message:
        yield message


def _places(message: list[torch.Tensor], slot: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor of a message beside its place in a slot."""
    offset = ALIGNMENT  # the message's size is before them
    for tensor in message:
        size = tensor.numel() * tensor.element_size()
        yield tensor, slot[offset:offset + size].view(tensor.dtype).view(tensor.shape)
        offset += _aligned(size)


def _size(message: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in message)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def open_link(group: dist.ProcessGroup, timeout: timedelta) -> SharedMemoryLink | None:
    """Link the ranks of a group if all run on this machine's Linux and may share memory; all ranks call it.

    Returns:
        the link on all ranks, or None on all.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    with contextlib.ExitStack() as stack:
        listener = _listen(size, stack) if size > 1 else None
        hosts: list[Any] = [None] * size
        dist.all_gather_object(hosts, (_machine(), listener.getsockname() if listener else None), group=group)
        if None in (address for _, address in hosts) or len({machine for machine, _ in hosts}) > 1:
            return None
        assert listener is not None
        try:
            made = _connect(listener, [address for _, address in hosts], rank)
        except OSError:  # another namespace, a limit: say so to the others
            made = None
        agreed: list[Any] = [None] * size
        dist.all_gather_object(agreed, made is not None, group=group)
        if made is None or not all(agreed):
            return None
        sockets, memories = made
        return SharedMemoryLink(group, sockets, memories, timeout)


def _machine() -> str:
    """Tells machines apart, and users of one machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            # containers of one machine share its boot id, not the space of its sockets' names
            return f"{file.read().strip()} {os.getuid()} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return secrets.token_hex()


def _listen(size: int, stack: contextlib.ExitStack) -> socket.socket | None:
    """A socket under a name of Linux's abstract space, which leaves nothing behind."""
    if sys.platform != "linux":
        return None
    try:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.settimeout(HANDSHAKE)
        listener.bind(f"\0megatron_sp-{os.getpid()}-{secrets.token_hex(8)}")
        listener.listen(size)
    except OSError:
        return None
    return listener


def _check_user(peer: socket.socket) -> None:
    """Names in the abstract space are seen by all users, so a stranger could call.

    Raises:
        PermissionError: this is one.
    """
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    if user != os.getuid():
        raise PermissionError(f"user {user} is not the user of this run")


def _connect(listener: socket.socket, addresses: Sequence[bytes],
             rank: int) -> tuple[dict[int, socket.socket], list[mmap.mmap]]:
    """A socket to each peer and everybody's memory, whose descriptors go through the sockets.

    Raises:
        OSError: a peer cannot be reached, or there is no memory to share.
    """
    size = len(addresses)
    total = size * 2 * slot_bytes(size)  # bytes; pages that are never used take no memory
    descriptor = os.memfd_create("megatron_sp")
    sockets: dict[int, socket.socket] = {}
    descriptors = {rank: descriptor}
    try:
        os.ftruncate(descriptor, total)
        for peer in range(rank):
            sockets[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sockets[peer].settimeout(HANDSHAKE)
            sockets[peer].connect(addresses[peer])
            _check_user(sockets[peer])
            socket.send_fds(sockets[peer], [struct.pack("I", rank)], [descriptor])
        for _ in range(rank + 1, size):
            accepted, _ = listener.accept()
            _check_user(accepted)
            accepted.settimeout(HANDSHAKE)
            word, found, _, _ = socket.recv_fds(accepted, 4, 1)
            peer = struct.unpack("I", word)[0]
            sockets[peer], descriptors[peer] = accepted, found[0]
            socket.send_fds(accepted, [b"."], [descriptor])
        for peer in range(rank):
            _, found, _, _ = socket.recv_fds(sockets[peer], 1, 1)
            descriptors[peer] = found[0]
        memories = [mmap.mmap(descriptors[each], total) for each in range(size)]
    except (OSError, struct.error, IndexError) as error:
        for each in sockets.values():
            each.close()
        raise OSError(str(error)) from None
    finally:
        for number in descriptors.values():
            os.close(number)
    for each in sockets.values():
        each.settimeout(None)
    return sockets, memories
