"""Which phase of ``--seq-length-schedule`` a training is in: at its start, after a resume, and from step to step."""

from __future__ import annotations

from typing import Any

from megatron_sp.config.schema import Run
from megatron_sp.errors import CheckpointError
from megatron_sp.layout.length_schedule import Phase, parse_length_schedule, run_of_length
from megatron_sp.train.checkpoints.state import TrainState


def starting_phase(run: Run, state: TrainState, saved: dict[str, Any] | None) -> Phase | None:
    """Return the phase that the next step belongs to; None without a schedule.

    Args:
        state: the counters; fresh ones, or those of the checkpoint that the training continues.
        saved: the configuration in that checkpoint; None where the training starts afresh.

    Raises:
        CheckpointError: the checkpoint was trained with other lengths, so that the order of its samples is another
            one; or ``--seq-length-phase`` names another phase than the checkpoint's.
    """
    words, load = run.data.seq_length_schedule, run.checkpoint.load
    if saved is None or not state.iteration:
        return _chosen(run, Phase.of(run, 1, 0), "the training starts with phase 1") if words else None
    if not words:
        if state.phase_length not in (0, run.data.seq_length):
            raise CheckpointError(
                f"--load {load} is in a phase of --seq-length-schedule "
                f"{' '.join(saved['data'].get('seq_length_schedule', []))} with sequences of {state.phase_length} "
                "tokens; give this schedule, or --finetune to start a new training from its weights")
        return None
    if not state.phase_length or saved["data"]["seq_length"] != run.data.seq_length:
        raise CheckpointError(
            f"--load {load} was trained with samples of {saved['data']['seq_length']} tokens"
            f"{'' if state.phase_length else ' and without --seq-length-schedule'}, so it does not say which text the "
            f"phases of --seq-length-schedule {' '.join(words)} have read; give --finetune to start a new training "
            "from its weights, or the checkpoint's flags")
    return _continued(run, state)


def _continued(run: Run, state: TrainState) -> Phase:
    words, load = run.data.seq_length_schedule, run.checkpoint.load
    lengths = [length for _, length in parse_length_schedule(words)]
    if state.phase_length not in lengths:
        raise CheckpointError(f"--load {load} is in a phase with sequences of {state.phase_length} tokens, which "
                              f"--seq-length-schedule {' '.join(words)} does not have; give the checkpoint's schedule")
    number = lengths.index(state.phase_length) + 1
    if 0 < state.phase_stop <= state.consumed_samples:
        phase = Phase.of(run, number + 1, state.consumed_samples)
        return _chosen(run, phase, f"phase {number} is finished in --load {load}")
    phase = Phase.of(run, number, state.phase_first, state.consumed_samples)
    if (phase.stop or 0) != state.phase_stop:
        raise CheckpointError(
            f"--load {load} is in phase {number}, which was to end after {state.phase_stop} samples, and with these "
            f"flags would end after {phase.stop}: the order of the samples that are still to come would change. Keep "
            "the checkpoint's batch sizes and the start of the next phase until this one ends")
    return _chosen(run, phase, f"--load {load} is in phase {number}")


def _chosen(run: Run, phase: Phase, why: str) -> Phase:
    chosen = run.data.seq_length_phase
    if chosen not in (0, phase.number) and not run.train.skip_train:
        before = "" if chosen < phase.number else (
            f", or give --load with a checkpoint of the end of phase {chosen - 1}")
        raise CheckpointError(f"--seq-length-phase {chosen}: {why}; say --seq-length-phase {phase.number}{before}")
    return phase


def run_of_phase(run: Run, phase: Phase | None) -> Run:
    """Return the run as it is in a phase, see ``run_of_length``."""
    return run if phase is None else run_of_length(run, phase.length)


def note_in_state(state: TrainState, phase: Phase | None) -> None:
    """Put a phase into the counters, which checkpoints store."""
    if phase is not None:
        state.phase_length, state.phase_first, state.phase_stop = phase.length, phase.first, phase.stop or 0


def phase_in_words(run: Run, phase: Phase) -> str:
    """Return a line for the log: which phase begins, and the size of its batches."""
    count, size = len(run.data.seq_length_schedule), run_of_phase(run, phase).train.global_batch_size
    until = f" until sample {phase.stop:,}" if phase.stop else ""
    return (f"phase {phase.number} of {count}: sequences of {phase.length:,} tokens, {size} in a step, from sample "
            f"{phase.first:,}{until} (samples of {run.data.seq_length:,} tokens)")


def farewell(run: Run, phase: Phase) -> str:
    """Return why a run of one phase stops, and how the training goes on."""
    save = run.checkpoint.save
    where = f"--load {save}" if save else "--save and --load"
    return (f"phase {phase.number} of --seq-length-schedule is finished; continue with the same flags, {where} and "
            f"--seq-length-phase {phase.number + 1}; the number of ranks, the layout, --micro-batch-size and memory "
            "flags may change")
