"""One run at a time in a --save directory: who is refused, and when a dead run's lock is taken over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatron_sp.checkpoint import lock
from megatron_sp.checkpoint.lock import LOCK, Owner, RunLock
from megatron_sp.errors import CheckpointError


@pytest.fixture
def other_run() -> Iterator[tuple[subprocess.Popen[bytes], Owner]]:
    """Yield a process that runs, and the ``Owner`` that it would write into a lock."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = replace(Owner.this_process(4), pid=process.pid, process_start=lock._process_start(process.pid))
    yield process, owner
    process.kill()
    process.wait()


def write_lock(directory: Path, owner: Owner) -> Path:
    (directory / LOCK).write_text(json.dumps(asdict(owner)))
    return directory / LOCK


def test_a_living_run_of_this_machine_is_respected(
        tmp_path: Path, other_run: tuple[subprocess.Popen[bytes], Owner]) -> None:
    process, owner = other_run
    path = write_lock(tmp_path, owner)
    with pytest.raises(CheckpointError) as raised:
        RunLock.take(tmp_path, 1)
    for words in (f"process {process.pid} on", "4 ranks", f"started {owner.started}", f"delete {path}"):
        assert words in str(raised.value)
    with pytest.raises(CheckpointError, match="so this run cannot save into it"):
        lock.refuse_foreign_lock(tmp_path)
    assert lock.owner_of(tmp_path) == owner and [file.name for file in tmp_path.iterdir()] == [LOCK]


def test_a_dead_run_s_lock_is_taken_over_at_once(
        tmp_path: Path, other_run: tuple[subprocess.Popen[bytes], Owner]) -> None:
    process, owner = other_run
    write_lock(tmp_path, owner)
    process.kill()      # also while it is a zombie that its parent has not waited for
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    held = RunLock.take(tmp_path, 2)
    assert "took over" in held.note and f"process {owner.pid}" in held.note
    assert lock.owner_of(tmp_path) == held.owner
    lock.refuse_foreign_lock(tmp_path)
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_a_later_process_with_the_same_number_is_not_the_owner(
        tmp_path: Path, other_run: tuple[subprocess.Popen[bytes], Owner]) -> None:
    write_lock(tmp_path, replace(other_run[1], process_start=other_run[1].process_start - 1))
    held = RunLock.take(tmp_path, 1)
    assert lock.owner_of(tmp_path) == held.owner
    held.release()


def test_a_run_of_another_machine_lives_while_it_renews_its_lock(tmp_path: Path) -> None:
    path = write_lock(tmp_path, replace(Owner.this_process(2), machine="another", host="node7"))
    ended, said = threading.Event(), list[str]()

    def renew() -> None:
        while not ended.wait(0.05):
            os.utime(path)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(CheckpointError, match="in use by process .* on node7"):
            RunLock.take(tmp_path, 1, renewal=0.2, say=said.append)
    finally:
        ended.set()
        thread.join()
    assert len(said) == 1 and "waiting up to 0.6 s" in said[0]
    held = RunLock.take(tmp_path, 1, renewal=0.05, say=said.append)
    assert "node7" in held.note and len(said) == 2
    held.release()


def test_a_lock_renewed_long_ago_costs_no_wait(tmp_path: Path) -> None:
    path = write_lock(tmp_path, replace(Owner.this_process(2), machine="another"))
    os.utime(path, (1e9, 1e9))
    said: list[str] = []
    held = RunLock.take(tmp_path, 1, say=said.append)
    assert said == [], "it waited for an owner that has not renewed its lock for years"
    assert lock.owner_of(tmp_path) == held.owner
    held.release()


def test_a_damaged_lock_is_watched_and_taken_over(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("{")
    held = RunLock.take(tmp_path, 1, renewal=0.02, say=lambda text: None)
    assert "unknown" in held.note
    held.release()


def test_only_one_of_many_takes_a_free_or_dead_lock(tmp_path: Path) -> None:
    for state in ("free", "dead"):
        directory = tmp_path / state
        directory.mkdir()
        if state == "dead":
            write_lock(directory, replace(Owner.this_process(1), process_start=1))
        taken, refused = list[RunLock](), list[str]()

        def take(directory: Path = directory, taken: list[RunLock] = taken, refused: list[str] = refused) -> None:
            try:
                taken.append(RunLock.take(directory, 1))
            except CheckpointError as error:
                refused.append(str(error))

        threads = [threading.Thread(target=take) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(taken) == 1 and len(refused) == 7, (state, len(taken))
        taken[0].release()
        assert list(directory.iterdir()) == []


def test_release_leaves_a_lock_that_another_run_took(tmp_path: Path) -> None:
    held = RunLock.take(tmp_path, 1)
    path = write_lock(tmp_path, replace(held.owner, key="another", machine="another"))
    held.release()
    assert path.is_file()
