"""Delete old checkpoints after a save, as ``--keep-last`` and ``--save-retain-interval`` say. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_sp.checkpoint import files
from megatron_sp.checkpoint.saving.removal import remove_checkpoint
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
        """Delete the surplus checkpoints. A damaged one does not count, and stays.

        Returns:
            sentences for the log
        """
        if not self.keep_last:
            return ()
        complete = files.complete_checkpoints(directory)
        damaged = [number for number, path in complete.items() if number <= newest and not is_whole(path)]
        surplus = self.surplus([number for number in complete if number not in damaged], newest)
        problems = {number: remove_checkpoint(complete[number]) for number in surplus}
        notes = [f"WARNING: {complete[number]} is damaged. It does not count among the checkpoints that are kept; "
                 "delete it when you do not need it" for number in damaged]
        if deleted := [str(number) for number, problem in problems.items() if not problem]:
            notes.append(f"deleted the checkpoint{'s' if len(deleted) > 1 else ''} of iteration {', '.join(deleted)}")
        return (*notes, *filter(None, problems.values()))


def is_whole(path: Path) -> bool:
    """Return whether no run refused a checkpoint, and all its files exist with their sizes.

    Checksums would take a read of all files.
    """
    if (path / files.DAMAGED).exists():
        return False
    try:
        return not any(files.describe_damage(path / name, entry, with_checksum=False)
                       for name, entry in files.read_manifest(path).items())
    except CheckpointError:
        return False
