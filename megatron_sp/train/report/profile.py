"""``--profile``: a trace of some steps for Perfetto (https://ui.perfetto.dev), on a GPU with a memory snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_sp.config.schema import Run

#: Number of allocations that a memory snapshot records.
SNAPSHOT_ENTRIES = 200_000


class StepProfiler:
    """Profiles the steps after ``--profile-step-start`` up to ``--profile-step-end`` on ``--profile-ranks``.

    Files: ``SAVE/profile/rank0_steps_11-12.json.gz`` and, on a GPU, ``rank0_steps_11-12_memory.pickle`` (open it at
    https://pytorch.org/memory_viz); in the working directory's ``profile`` without ``--save``.
    """

    def __init__(self, run: Run, rank: int, device: torch.device):
        flags = run.logging
        self.first, self.last = flags.profile_step_start + 1, flags.profile_step_end
        self.is_wanted = flags.profile and rank in flags.profile_ranks
        self.directory, self.rank, self.device = Path(run.checkpoint.save or ".") / "profile", rank, device
        self._profiler: Any = None
        self._started_at = 0

    def before_step(self, iteration: int) -> None:
        """Start when step ``iteration`` (counted from 1) is one to profile."""
        if not self.is_wanted or self._profiler is not None or not self.first <= iteration <= self.last:
            return
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES)
        self._profiler, self._started_at = profile(activities=activities), iteration
        self._profiler.start()

    def after_step(self, iteration: int) -> str:
        """Stop and write the profile when ``iteration`` is the last step to profile.

        Returns:
            a sentence for the log, or ""
        """
        return self._write(iteration) if iteration >= self.last else ""

    def finish(self, iteration: int) -> str:
        """Write what was recorded when the run ends before the last step to profile.

        Returns:
            a sentence for the log, or ""
        """
        if self.is_wanted and not self._started_at:
            return f"--profile recorded nothing: none of the steps {self.first} to {self.last} was made"
        return self._write(iteration)

    def _write(self, iteration: int) -> str:
        if self._profiler is None:
            return ""
        profiler, self._profiler = self._profiler, None
        stem = self.directory / f"rank{self.rank}_steps_{self._started_at}-{iteration}"
        steps = f"profile of steps {self._started_at} to {iteration}"
        try:
            profiler.stop()
            self.directory.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(f"{stem}.json.gz")
            if self.device.type == "cuda":
                torch.cuda.memory._dump_snapshot(f"{stem}_memory.pickle")
                torch.cuda.memory._record_memory_history(enabled=None)
        except (OSError, RuntimeError) as error:
            return f"WARNING: rank {self.rank}: the {steps} cannot be written to {stem}.json.gz ({error})"
        return f"{steps}: {stem}.json.gz (open it at https://ui.perfetto.dev)"
