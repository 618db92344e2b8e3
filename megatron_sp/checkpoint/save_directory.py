"""Prepare the --save directory of a run: lock it, protect what it holds, and check that all ranks see the same one."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from megatron_sp.checkpoint import files
from megatron_sp.checkpoint.agreement import gather, on_rank_zero
from megatron_sp.checkpoint.lock import LOCK, RunLock, owner_of
from megatron_sp.checkpoint.writing import write_durably
from megatron_sp.config.schema import Run
from megatron_sp.config.serialize import to_dict
from megatron_sp.errors import CheckpointError

#: Seconds that a network file system may take to show one node's new file to another.
PATIENCE = 20.0


@contextmanager
def reserve_save_directory(run: Run, *, patience: float = PATIENCE) -> Iterator[list[str]]:
    """Hold the lock of ``--save`` while a run trains. All ranks call it; without ``--save`` it does nothing.

    Yields:
        sentences for the log

    Raises:
        CheckpointError: on all ranks. Another run uses the directory, or it holds checkpoints that this run could
            overwrite, or it cannot be written, or some rank sees another directory under this name.
    """
    if not run.checkpoint.save:
        yield []
        return
    directory, held = Path(run.checkpoint.save), list[RunLock]()

    def take() -> tuple[str, str]:
        try:
            lock = RunLock.take(directory, run.parallel.world_size)
        except OSError as error:
            raise CheckpointError(f"--save {directory} cannot be written ({error.strerror}); give a directory with "
                                  "write permission and free space") from None
        held.append(lock)
        refuse_to_overwrite(run)
        return lock.owner.key, lock.note

    try:
        key, note = on_rank_zero(f"cannot use --save {directory}", take)
        _check_all_see_it(directory, key, patience)
        yield [note] if note else []
    finally:
        for lock in held:
            lock.release()


def store_configuration(run: Run) -> None:
    """Write ``config.json`` into ``--save``, if given. All ranks call it, after all checks of the run have passed.

    A run that only evaluates does not write the file, because the file describes the training.
    """
    if run.checkpoint.save and not run.train.skip_train:
        path = Path(run.checkpoint.save) / files.CONFIG
        text = json.dumps(to_dict(run), indent=1)
        on_rank_zero(f"cannot write {path}", lambda: write_durably(path, text))


def refuse_to_overwrite(run: Run) -> None:
    """Refuse a run that would overwrite checkpoints in its ``--save`` directory.

    Raises:
        CheckpointError: the directory holds checkpoints that this run does not load, or directories of another program.
    """
    flags = run.checkpoint
    if run.train.skip_train:      # a run that only evaluates saves nothing
        return
    save = Path(flags.save)
    load, iteration = files.split_directory(flags.load, flags.ckpt_step or None) if flags.load else (None, None)
    continues = load is not None and os.path.realpath(load) == os.path.realpath(save)
    found = files.complete_iterations(save)
    if found and not continues:
        raise CheckpointError(f"--save {save} holds checkpoints of an earlier run (iterations "
                              f"{', '.join(map(str, found))}), which this run would mix with or replace by its own. "
                              f"Give --load {save} to continue that run, or another --save to start anew")
    start = files.find_checkpoint(save, iteration) if continues else None
    if unknown := files.directories_without_manifest(save, after=start.iteration if start else -1):
        raise CheckpointError(f"--save {save} holds {', '.join(unknown)} without {files.MANIFEST}: not a complete "
                              "checkpoint of this program, which does not replace it. Move it away, or give another "
                              "--save")


def _check_all_see_it(directory: Path, key: str, patience: float) -> None:
    """Raise CheckpointError on all ranks when some rank does not find rank 0's lock in its own ``--save`` directory.

    Args:
        key: the key of the lock's owner.
        patience: seconds to wait for the file.
    """
    seen = gather(_sees_key(directory, key, patience))
    blind = [str(rank) for rank, sees in enumerate(seen) if not sees]
    if blind:
        ranks = f"rank{'s' if len(blind) > 1 else ''} {', '.join(blind[:8])}{' ...' if len(blind) > 8 else ''}"
        raise CheckpointError(f"--save {directory} is not the same directory on all ranks: {ranks} of "
                              f"{dist.get_world_size()} cannot see the file {LOCK} that rank 0 wrote. Every rank "
                              "writes its part of a checkpoint there: give a directory on a file system that all nodes "
                              "share")


def _sees_key(directory: Path, key: str, patience: float) -> bool:
    deadline = time.monotonic() + patience
    while not ((owner := owner_of(directory)) and owner.key == key):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
        if directory.is_dir():
            os.listdir(directory)      # makes a network file system look for new names
    return True
