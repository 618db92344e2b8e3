"""Let one run at a time write into a --save directory. Imports no torch.

``run.lock`` names its owner: host, process id, number of ranks, time of start. The owner updates the file's time every
half minute. This is called a renewal. A second run refuses to start while the owner is alive. When both processes are
on the same machine (and in the same container), the second run asks the operating system whether the owner is alive.
When they are not, it watches the file for the time of three renewals.

A killed run leaves its lock behind. The next run finds that the owner is dead and takes the lock over. Before each save
the owner checks that the lock is still its own, because a run that was suspended for minutes may have lost it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path

from megatron_sp.errors import CheckpointError

LOCK = "run.lock"

#: Seconds between two renewals, and the number of missed renewals after which the owner counts as dead.
RENEWAL = 30.0
MISSED_RENEWALS = 3


@dataclass(frozen=True)
class Owner:
    """The owner of a lock: the process of rank 0 of a run.

    Attributes:
        machine: identifies the boot of the machine and the process namespace, within which ``pid`` is unique.
        process_start: start of the process in clock ticks since boot. A later process with the same pid has another.
        started: local time at which the lock was taken, for people.
        key: a random text that no other run has.
    """

    host: str
    pid: int
    num_ranks: int
    started: str
    machine: str
    process_start: int
    key: str

    @classmethod
    def this_process(cls, num_ranks: int) -> Owner:
        pid = os.getpid()
        return cls(socket.gethostname(), pid, num_ranks, datetime.now().isoformat(" ", "seconds"), _machine(),
                   _process_start(pid), uuid.uuid4().hex)

    def __str__(self) -> str:
        ranks = f"{self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}"
        return f"process {self.pid} on {self.host} ({ranks}, started {self.started})"

    def is_of_this_machine(self) -> bool:
        return bool(self.machine) and self.machine == _machine()

    def is_alive(self) -> bool:
        """Return whether the process still runs. Call it only on the owner's machine."""
        return _process_start(self.pid) == self.process_start != 0


class RunLock:
    """The lock that this run holds on a directory. A thread renews it until ``release``.

    Attributes:
        note: a sentence for the log when the lock of a dead run was taken over, or "".
    """

    def __init__(self, path: Path, owner: Owner, note: str):
        self.path, self.owner, self.note = path, owner, note
        self._ended = threading.Event()
        self._renewals = threading.Thread(target=self._renew, name="run.lock", daemon=True)
        self._renewals.start()

    @classmethod
    def take(cls, directory: Path, num_ranks: int, *, renewal: float = RENEWAL,
             say: Callable[[str], object] = print) -> RunLock:
        """Take the lock of a directory, and create the directory if it is missing.

        Args:
            renewal: seconds between two renewals by a run of another machine.
            say: prints for the user why this call takes time.

        Raises:
            CheckpointError: another run, which is alive, holds the lock.
            OSError: the directory cannot be written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        path, owner, note = directory / LOCK, Owner.this_process(num_ranks), ""
        while not _create(path, owner):
            seen = _read_lock(path)
            if seen is None:      # the other run ended and removed the lock since ``_create``
                continue
            text, previous = seen
            if previous and previous.is_of_this_machine():
                lives = previous.is_alive()
            else:
                lives = _is_renewed(path, text, renewal, say)
            if lives:
                raise CheckpointError(f"--save {directory} is in use by {previous or 'another run'}. Two runs would "
                                      "destroy each other's checkpoints: wait for that run or end it, or give another "
                                      f"--save. If you are sure that it ended, delete {path}")
            if _remove_stale(path, text):
                note = f"took over {path} of a run that ended without removing it: {previous or 'unknown'}"
        return cls(path, owner, note)

    def release(self) -> None:
        """Remove the lock, if it is still this run's. Raise nothing: the next run takes over a lock that is left."""
        self._ended.set()
        seen = _read_lock(self.path)
        if seen and seen[1] == self.owner:
            try:
                self.path.unlink()
            except OSError:
                return

    def _renew(self) -> None:
        while not self._ended.wait(RENEWAL):
            seen = _read_lock(self.path)
            if seen is None or seen[1] != self.owner:
                return
            try:
                os.utime(self.path)
            except OSError:      # when the directory is lost, the next save reports it
                continue


def owner_of(directory: Path) -> Owner | None:
    """Return the owner that the lock file of a directory names; None without a readable lock file."""
    seen = _read_lock(directory / LOCK)
    return seen[1] if seen else None


def refuse_foreign_lock(directory: Path) -> None:
    """Raise CheckpointError when another process holds the lock of a directory, for example after taking it over."""
    owner = owner_of(directory)
    if owner and not (owner.is_of_this_machine() and owner.pid == os.getpid()):
        raise CheckpointError(f"--save {directory} is in use by {owner}, so this run cannot save into it. If that run "
                              f"took it over while this one was suspended, only one of them can go on; if it ended, "
                              f"delete {directory / LOCK}")


def _create(path: Path, owner: Owner) -> bool:
    """Create the lock file; return False when there is one already.

    A hard link makes name and content appear together, so that no other process reads an empty lock.
    """
    aside = path.with_name(f"{LOCK}.{owner.key[:8]}")
    aside.write_text(json.dumps(asdict(owner)), encoding="utf-8")
    try:
        os.link(aside, path)
        return True
    except FileExistsError:
        return False
    except OSError:      # a file system without hard links; here the file is empty for a moment
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(aside.read_text(encoding="utf-8"))
        return True
    finally:
        aside.unlink(missing_ok=True)


def _read_lock(path: Path) -> tuple[str, Owner | None] | None:
    """Return the text of a lock file and the owner it names (None if damaged); None when there is no file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    try:
        values = json.loads(text)
        return text, Owner(**{field.name: values[field.name] for field in fields(Owner)})
    except (ValueError, TypeError, KeyError):
        return text, None


def _is_renewed(path: Path, text: str, renewal: float, say: Callable[[str], object]) -> bool:
    """Watch a lock of another machine until its owner renews it (True) or misses several renewals (False)."""
    try:
        first = path.stat().st_mtime_ns
        if _file_server_time(path.parent) - first > 10 * MISSED_RENEWALS * renewal * 1e9:
            return False      # the last renewal is so old that waiting for another one is pointless
        say(f"{path} is the lock of a run on another machine; waiting up to {MISSED_RENEWALS * renewal:g} s for a sign "
            "that the run lives")
        deadline = time.monotonic() + MISSED_RENEWALS * renewal
        while time.monotonic() < deadline:
            time.sleep(min(1.0, renewal / 4))
            if path.read_text(encoding="utf-8", errors="replace") != text:
                return False      # another run replaced the lock; ``RunLock.take`` then reads the new one
            if path.stat().st_mtime_ns != first:
                return True
    except FileNotFoundError:
        pass
    return False


def _file_server_time(directory: Path) -> int:
    """Return the file server's time in nanoseconds, which may differ from this machine's time."""
    probe = directory / f"{LOCK}.{uuid.uuid4().hex[:8]}"
    probe.touch()
    try:
        return probe.stat().st_mtime_ns
    finally:
        probe.unlink()


def _remove_stale(path: Path, text: str) -> bool:
    """Remove the lock of a dead run; return False when another process removed it first.

    The processes of a machine do this one after another, each holding the directory's advisory lock. Otherwise a
    process could compare the content, and then remove the lock that another one has made since.

    Args:
        text: the content of the dead run's lock.
    """
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):      # some network file systems have no advisory locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        seen = _read_lock(path)
        if seen is None or seen[0] != text:
            return False
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(descriptor)


def _machine() -> str:
    """Return a text that identifies this boot of the machine and the process namespace; "" where /proc lacks them."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " " + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _process_start(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 when it does not exist or has ended (a zombie)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0
    values = re.sub(r".*\)", "", text, flags=re.DOTALL).split()      # drop the process name, which may hold spaces
    return 0 if values[0] in ("Z", "X") else int(values[19])
