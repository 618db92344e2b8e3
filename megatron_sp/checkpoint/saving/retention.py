"""Delete old checkpoints after a save, as ``--keep-last`` and ``--save-retain-interval`` say. Imports no torch."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_sp.checkpoint import files
from megatron_sp.checkpoint.writing import sync_directory
from megatron_sp.config.schema import Checkpoint
from megatron_sp.errors import CheckpointError


@dataclass(frozen=True)
class Retention:
    """Which checkpoints of a directory stay.

    Attributes:
        keep_last: number of newest checkpoints that stay; 0: all stay.
        interval: checkpoints at multiples of this iteration stay, too; 0: there is no such interval.
    """

    keep_last: int
    interval: int

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Retention:
        """Return the rule of a run. ``--save-retain-interval`` alone keeps the newest one, as in Megatron."""
        return cls(checkpoint.keep_last or (1 if checkpoint.save_retain_interval else 0),
                   checkpoint.save_retain_interval)

    def surplus(self, iterations: Iterable[int], newest: int) -> list[int]:
        """Return the iterations to delete, ascending.

        Args:
            iterations: those of the complete checkpoints.
            newest: the iteration saved last. Checkpoints of later iterations stay: a run that went back with
                ``--ckpt-step`` does not own them.
        """
        if not self.keep_last:
            return []
        own = sorted(number for number in iterations if number <= newest)
        return [number for number in own[:-self.keep_last] if not (self.interval and number % self.interval == 0)]

    def apply(self, directory: Path, newest: int) -> tuple[str, ...]:
        """Delete the surplus checkpoints, unless one that stays is not whole.

        Returns:
            sentences for the log
        """
        complete = files.complete_checkpoints(directory)
        surplus = self.surplus(complete, newest)
        if not surplus:
            return ()
        own = [number for number in complete if number <= newest]
        stay = [number for number in own if number not in surplus]
        damaged = [number for number in stay if not _is_whole(complete[number])]
        if damaged:
            return (f"WARNING: no checkpoint is deleted, because the files of iteration "
                    f"{', '.join(map(str, damaged))} are damaged",)
        try:
            for number in surplus:
                remove_checkpoint(complete[number])
        except OSError as error:
            return (f"WARNING: old checkpoints cannot be deleted: {error.filename}: {error.strerror}",)
        return (f"deleted the checkpoint{'s' if len(surplus) > 1 else ''} of iteration "
                f"{', '.join(map(str, surplus))}",)


def _is_whole(path: Path) -> bool:
    """Return whether all files of a checkpoint exist with their sizes. Checksums would take a read of all files."""
    try:
        return not any(files.describe_damage(path / name, entry, with_checksum=False)
                       for name, entry in files.read_manifest(path).items())
    except CheckpointError:
        return False


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint directory. After a kill at any instant it is whole, or has a name that nobody loads.

    Raises:
        OSError: it cannot be removed.
    """
    aside = path.with_name(path.name + files.REMOVING)
    if aside.exists():
        shutil.rmtree(aside)
    path.rename(aside)
    sync_directory(path.parent)
    shutil.rmtree(aside)
