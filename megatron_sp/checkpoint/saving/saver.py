"""Save checkpoints of a run, while training waits or in the background.

A background save in time, on each rank. The thread uses a process group that training does not use::

    main thread:  | plan, copy to host memory | step 9 | step 10 | step 11 | ...
    thread:                                   | write own file | gather on rank 0 | wait for rank 0 |
    rank 0's:                                 | write own file | .metadata, state.json, manifest, rename, tracker |

All ranks' threads end with the same result, because rank 0 tells it to them. Only one save is under way at a time: the
next one waits for it.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.storage import WriteResult

from megatron_sp.checkpoint import files, writing
from megatron_sp.checkpoint.agreement import gather_on_rank_zero, on_every_rank, on_rank_zero
from megatron_sp.checkpoint.lock import refuse_foreign_lock
from megatron_sp.checkpoint.saving.plan import Planner, Staging, WritePlan
from megatron_sp.checkpoint.saving.retention import Retention
from megatron_sp.checkpoint.saving.tensor_file import TensorWriter
from megatron_sp.checkpoint.state import Piece, model_pieces, optimizer_pieces
from megatron_sp.checkpoint.tokenizer_files import copy_tokenizer
from megatron_sp.config.schema import Run
from megatron_sp.config.serialize import to_dict
from megatron_sp.errors import CheckpointError


class SaveError(CheckpointError):
    """A checkpoint that could not be written. Earlier checkpoints are untouched."""


@dataclass(frozen=True)
class Saved:
    """A finished save.

    Attributes:
        seconds: time from the start of the save until the checkpoint was complete.
        blocked: the part of this time during which training waited, in seconds.
        notes: sentences for the log.
    """

    path: Path
    iteration: int
    seconds: float
    blocked: float
    notes: tuple[str, ...] = ()


class Saver:
    """Saves the checkpoints of one run. All ranks call its methods together.

    Args:
        directory: ``--save``.
        background: a group of all ranks that nothing else uses; None: training waits for each save.
    """

    def __init__(self, directory: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, run: Run,
                 background: dist.ProcessGroup | None = None):
        self.directory, self.model, self.optimizer, self.run = Path(directory), model, optimizer, run
        self._background, self._planner, self._staging = background, Planner(), Staging()
        self._pending: _Job | None = None
        self._warnings: set[str] = set()

    @property
    def pending(self) -> int | None:
        """Return the iteration whose save is under way on this rank; None when there is none."""
        return self._pending.iteration if self._pending else None

    def save(self, iteration: int, state: dict[str, Any], *, wait: bool = True) -> Saved | None:
        """Save a checkpoint. Call ``finish`` before.

        Args:
            state: ``train``, ``schedule``, ``loss_scaler`` and other values that JSON can hold; ``load_checkpoint``
                returns them.
            wait: whether to return only when the checkpoint is complete. Otherwise the call returns as soon as training
                may continue.

        Raises:
            SaveError: on all ranks, when the checkpoint could not be written; its files are removed.
            CheckpointError: on all ranks, when another run has taken the directory over.
        """
        assert self._pending is None and (wait or self._background is not None)
        started = time.perf_counter()
        on_rank_zero(f"cannot use {self.directory}", lambda: refuse_foreign_lock(self.directory))
        try:
            job = self._prepare(iteration, state, copy=not wait)
        except CheckpointError as error:
            raise SaveError(str(error)) from None
        job.started, job.blocked = started, time.perf_counter() - started
        if wait:
            job.run()
            return self._told_once(job.result())
        job.start_thread()
        self._pending = job
        return None

    def poll(self) -> bool:
        """Return whether a save was under way on this rank and has ended, so that ``finish`` will not wait."""
        return self._pending is not None and self._pending.has_ended()

    def finish(self, timeout: float | None = None) -> Saved | None:
        """Wait for the save that is under way; None when there is none.

        Args:
            timeout: seconds after which to give up.

        Raises:
            SaveError: it failed, on all ranks with the same message; or it did not end within ``timeout``.
        """
        if self._pending is None:
            return None
        job, waited = self._pending, time.perf_counter()
        job.join(timeout)
        if not job.has_ended():
            raise SaveError(f"the save of iteration {job.iteration} did not end within {timeout:g} s")
        job.blocked += time.perf_counter() - waited
        self._pending = None
        return self._told_once(job.result())

    def _told_once(self, saved: Saved) -> Saved:
        """Leave out the warnings that an earlier save of this run gave."""
        notes = tuple(note for note in saved.notes if note not in self._warnings)
        self._warnings.update(note for note in notes if note.startswith("WARNING"))
        return replace(saved, notes=notes)

    def _prepare(self, iteration: int, state: dict[str, Any], *, copy: bool) -> _Job:
        run = self.run
        optimizer_state = optimizer_pieces(self.model, self.optimizer, run.model) if (
            run.checkpoint.save_optimizer) else {}
        pieces = model_pieces(self.model, run.model) | optimizer_state
        plain = {"format": files.FORMAT, "iteration": iteration, "vocab_size": run.model.vocab_size,
                 "optimizer": type(self.optimizer).__name__ if optimizer_state else None, **state,
                 "config": to_dict(run)}
        plan = self._planner.plan(pieces)
        if copy:
            copies: dict[str, Piece] = {}
            on_every_rank("cannot copy the state to host memory; leave --async-save out, or use more ranks",
                          lambda: copies.update(self._staging.copy(pieces, plan)))
            pieces = copies
        warnings: list[str] = []
        building = on_rank_zero(f"cannot write to {self.directory}",
                                lambda: writing.start_building(self.directory, iteration, warnings.append))
        return _Job(building, iteration, pieces, plan, json.dumps(plain, indent=1), run,
                    self._background if copy else None, warnings)


@dataclass
class _Job:
    """The part of one save that writes files, on this rank. It touches nothing that training changes."""

    building: Path
    iteration: int
    pieces: dict[str, Piece]
    plan: WritePlan
    state: str
    config: Run
    group: dist.ProcessGroup | None
    warnings: list[str]
    started: float = 0.0
    blocked: float = 0.0
    ended: float = 0.0
    outcome: tuple[Path, tuple[str, ...]] | None = None
    error: Exception | None = None
    thread: threading.Thread | None = field(default=None)

    def start_thread(self) -> None:
        self.thread = threading.Thread(target=self.run, name=f"save {self.iteration}", daemon=True)
        self.thread.start()

    def has_ended(self) -> bool:
        return self.thread is None or not self.thread.is_alive()

    def join(self, timeout: float | None) -> None:
        if self.thread is not None:
            self.thread.join(timeout)

    def result(self) -> Saved:
        """Return what was saved.

        Raises:
            SaveError: it could not be written.
            RuntimeError: another rank ended meanwhile.
        """
        if self.error is not None:
            raise self.error
        assert self.outcome is not None
        path, notes = self.outcome
        total = self.ended - self.started
        return Saved(path, self.iteration, total, total if self.thread is None else self.blocked, notes)

    def run(self) -> None:
        """Write and complete the checkpoint. Errors are kept for ``result``."""
        writer = TensorWriter(self.building)
        try:
            self.outcome = gather_on_rank_zero(
                f"cannot write {self.building}", lambda: writer.write(self.plan.own, self.pieces),
                lambda written: self._complete(writer, written), self.group)
        except CheckpointError as error:
            with contextlib.suppress(OSError, CheckpointError):
                _discard(self.building)
            self.error = SaveError(str(error))
        except Exception as error:      # another rank has ended; the next collective of training says which one
            self.error = error
        self.ended = time.perf_counter()

    def _complete(self, writer: TensorWriter, written: list[tuple[list[WriteResult], dict[str, dict[str, Any]]]]
                  ) -> tuple[Path, tuple[str, ...]]:
        """Complete the checkpoint on rank 0: write the rest of its files, the manifest last, and give it its name.

        Args:
            written: one entry for each rank: where its tensors lie, and the manifest's entries of its files.

        Returns:
            the checkpoint's path, and sentences for the log
        """
        building = self.building
        for rank, (_, own_entries) in enumerate(written):
            for name in own_entries:
                if not (building / name).is_file():
                    raise CheckpointError(f"rank {rank} wrote {building / name}, but rank 0 does not find it there: "
                                          "the directory must be the same one on all ranks, on a file system they "
                                          "share")
        assert self.plan.metadata is not None
        writer.write_metadata(self.plan.metadata, [results for results, _ in written])
        entries = {name: entry for _, own_entries in written for name, entry in own_entries.items()}
        writing.write_durably(building / files.STATE, self.state)
        copy_tokenizer(self.config.data, building)
        for name in files.file_names(building):
            if name not in entries:
                entries[name] = files.manifest_entry(building / name)
        path = writing.finish_building(building, self.iteration, entries, self.warnings.append)
        return path, (*self.warnings, *Retention.of(self.config.checkpoint).apply(building.parent, self.iteration))


def _discard(building: Path) -> None:
    """Remove the files of a failed save.

    Each rank removes its own file, because rank 0 does not see it when the ranks do not share a file system.
    """
    for path in building.glob(f"__{dist.get_rank()}_*"):
        path.unlink()
    if dist.get_rank() == 0:
        writing.remove_unfinished(building)
    else:
        # The caller ignores an error here. It is expected, because the directory still holds rank 0's files, or is gone
        # already.
        building.rmdir()
