"""Connect the CPU ranks of one machine: decide whether they may share memory, and hand it to each other.

Each rank makes one piece of anonymous memory (``memfd_create``) and passes its file descriptor to every peer
through a Unix socket. The socket stays open and later carries the signals of ``mailboxes``. Neither leaves a
file behind when a process is killed. Where anything is missing, for example on another system than Linux or in
a Python built without these calls, all ranks agree to use torch's collectives.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import struct
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_sp.transport.mailboxes import Mailboxes, slot_bytes

#: Time limit, in seconds, for a peer that is expected to connect.
HANDSHAKE_SECONDS = 20.0
#: System calls that ``connect`` needs, as (module, name). Portable builds of Python lack some of them.
NEEDED = ((os, "memfd_create"), (os, "getuid"), (socket, "AF_UNIX"), (socket, "SO_PEERCRED"), (socket, "send_fds"),
          (socket, "recv_fds"), (socket, "SO_RCVTIMEO"))

Connections = tuple[dict[int, socket.socket], list[mmap.mmap]]


def open_mailboxes(group: dist.ProcessGroup, timeout: timedelta, axis: str = "", *,
                   slot: int = 0) -> Mailboxes | None:
    """Connect the ranks of a group if all of them run on this machine and may share memory; all ranks call it.

    Args:
        timeout: the longest time that an exchange waits for a peer.
        axis: name of the group's axis, for messages.
        slot: bytes of a mailbox's slot; default: what suits the number of ranks.
    Returns:
        the mailboxes on all ranks, or None on all ranks
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    slot = slot or slot_bytes(size)
    with contextlib.ExitStack() as stack:
        listener = listen(size, stack) if size > 1 else None
        found: list[Any] = [None] * size
        dist.all_gather_object(found, (machine_name(), listener.getsockname() if listener else None), group=group)
        addresses = [address for _, address in found]
        if None in addresses or len({machine for machine, _ in found}) > 1:
            return None
        assert listener is not None
        try:
            connections = connect(listener, addresses, rank, num_bytes=size * 2 * slot)
        except OSError:  # for example another namespace, or a limit of this process
            connections = None
        agreed: list[Any] = [None] * size
        dist.all_gather_object(agreed, connections is not None, group=group)
        if connections is None or not all(agreed):
            return None
        return Mailboxes(rank, dist.get_process_group_ranks(group), *connections, timeout, slot, axis)


def can_share_memory() -> bool:
    """Return whether this system and this build of Python have all calls that ``connect`` needs."""
    return sys.platform == "linux" and all(hasattr(module, name) for module, name in NEEDED)


def machine_name() -> str:
    """Return a name that is equal for two processes of one user on one machine that see each other's sockets."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            # Containers of one machine have the same boot id; their network namespaces tell them apart.
            return f"{file.read().strip()} {os.getuid()} {os.stat('/proc/self/ns/net').st_ino}"
    except (OSError, AttributeError):
        return secrets.token_hex()


def listen(size: int, stack: contextlib.ExitStack) -> socket.socket | None:
    """Return a listening socket with a name in Linux's abstract namespace; None where the system has none.

    Such a name is no file and disappears with the process.
    """
    if not can_share_memory():
        return None
    try:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.settimeout(HANDSHAKE_SECONDS)
        listener.bind(f"\0megatron_sp-{os.getpid()}-{secrets.token_hex(8)}")
        listener.listen(size)
    except OSError:
        return None
    return listener


def connect(listener: socket.socket, addresses: Sequence[bytes], rank: int, *, num_bytes: int) -> Connections:
    """Make this rank's memory, exchange descriptors with all peers, and map everybody's memory.

    Each rank connects to the ranks before it and accepts connections from those after it.

    Args:
        addresses: address of each rank's listening socket.
        num_bytes: size of one rank's memory. Pages that are never written take no memory.
    Returns:
        a socket for each peer, and the memory of every rank
    Raises:
        OSError: a peer cannot be reached, or the system refuses the memory.
    """
    size = len(addresses)
    descriptor = os.memfd_create("megatron_sp")
    sockets: dict[int, socket.socket] = {}
    descriptors = {rank: descriptor}
    try:
        os.ftruncate(descriptor, num_bytes)
        for peer in range(rank):
            sockets[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sockets[peer].settimeout(HANDSHAKE_SECONDS)
            sockets[peer].connect(addresses[peer])
            check_user(sockets[peer])
            socket.send_fds(sockets[peer], [struct.pack("I", rank)], [descriptor])
        for _ in range(rank + 1, size):
            accepted, _ = listener.accept()
            check_user(accepted)
            accepted.settimeout(HANDSHAKE_SECONDS)
            number, received, _, _ = socket.recv_fds(accepted, 4, 1)
            peer = struct.unpack("I", number)[0]
            sockets[peer], descriptors[peer] = accepted, received[0]
            socket.send_fds(accepted, [b"."], [descriptor])
        for peer in range(rank):
            _, received, _, _ = socket.recv_fds(sockets[peer], 1, 1)
            descriptors[peer] = received[0]
        memories = [mmap.mmap(descriptors[each], num_bytes) for each in range(size)]
    except (OSError, struct.error, IndexError, ValueError) as error:
        for each in sockets.values():
            each.close()
        raise OSError(str(error)) from None
    finally:
        for each_descriptor in descriptors.values():
            os.close(each_descriptor)
    for each in sockets.values():
        each.settimeout(None)
    return sockets, memories


def check_user(peer: socket.socket) -> None:
    """Refuse a connection from another user: names in the abstract space are open to every user of the machine.

    Raises:
        PermissionError: the other end belongs to another user.
    """
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    if user != os.getuid():
        raise PermissionError(f"user {user} is not the user of this run")
