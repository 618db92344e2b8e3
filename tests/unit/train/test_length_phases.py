"""Which phase a training continues with, and what does not continue a schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_sp.config.schema import Run
from megatron_sp.config.serialize import to_dict
from megatron_sp.errors import CheckpointError
from megatron_sp.layout.length_schedule import Phase
from megatron_sp.train.checkpoints.state import TrainState
from megatron_sp.train.length_phases import farewell, note_in_state, starting_phase
from tests.helpers.configs import STYLES, tiny_run

#: Steps of 4 samples of 64 tokens: phases begin with the samples 0, 12 and 20.
GROWS = "0:16 600:32 1.2K:64"


def run_of(schedule: str = GROWS, more: str = "") -> Run:
    words = f"--seq-length-schedule {schedule}" if schedule else ""
    return tiny_run(f"{STYLES['llama']} {words} --load there {more}".split())


def begun(samples: int, run: Run | None = None) -> tuple[TrainState, dict[str, Any]]:
    """Return counters and configuration of a checkpoint after so many samples."""
    run, state = run or run_of(), TrainState()
    phase: Phase | None = starting_phase(run, state, None)
    note_in_state(state, phase)
    for _ in range(0, samples, 4):
        if phase is not None and state.consumed_samples == phase.stop:
            phase = starting_phase(run, state, to_dict(run))
            note_in_state(state, phase)
        state.advance(4, 256, updated=True, failed=False)
    return TrainState.from_dict(state.to_dict()), to_dict(run)


@pytest.mark.parametrize("samples, number", [(0, 1), (4, 1), (8, 1), (12, 2), (16, 2), (20, 3), (24, 3), (32, 3)])
def test_a_checkpoint_continues_in_its_phase_or_the_next(samples: int, number: int) -> None:
    state, saved = begun(samples)
    phase = starting_phase(run_of(), state, saved if samples else None)
    assert phase is not None and phase.number == number and phase.first == (0, 12, 20)[number - 1]
    for chosen in (1, 2, 3):
        if chosen == number:
            assert starting_phase(run_of(more=f"--seq-length-phase {chosen}"), state, saved) == phase
        else:
            with pytest.raises(CheckpointError, match=f"say --seq-length-phase {number}"):
                starting_phase(run_of(more=f"--seq-length-phase {chosen}"), state, saved)


@pytest.mark.parametrize("samples, schedule, more, problem", [
    (8, "", "", "is in a phase of --seq-length-schedule 0:16 600:32 1.2K:64 with sequences of 16 tokens"),
    (8, "0:16 900:32 1.2K:64", "", "was to end after 12 samples, and with these flags would end after 16"),
    (8, GROWS, "--global-batch-size 8", "was to end after 12 samples, and with these flags would end after 16"),
    (8, GROWS, "--global-batch-size 6", "was to end after 12 samples, and with these flags would end after 14"),
    (8, "0:8 600:32 1.2K:64", "", "sequences of 16 tokens, which --seq-length-schedule 0:8"),
    (8, "0:16 600:32 1.2K:128", "--seq-length 128", "was trained with samples of 64 tokens, so it does not say"),
    (8, GROWS, "--seq-length-phase 2", "is in phase 1; say --seq-length-phase 1, or give --load with a checkpoint of"),
    (12, GROWS, "--seq-length-phase 1", "phase 1 is finished in --load there; say --seq-length-phase 2"),
])
def test_what_does_not_continue_a_schedule_is_refused(samples: int, schedule: str, more: str, problem: str) -> None:
    with pytest.raises(CheckpointError) as error:
        starting_phase(run_of(schedule, more), *begun(samples))
    assert problem in str(error.value)


def test_a_checkpoint_without_a_schedule_is_refused() -> None:
    state, saved = begun(8, run_of(""))
    assert state.phase_length == 0
    with pytest.raises(CheckpointError, match="without --seq-length-schedule, so it does not say which text"):
        starting_phase(run_of(), state, saved)


def test_what_may_change() -> None:
    """Phases that have not begun, batch sizes after a phase has ended, and the schedule once its last phase runs."""
    later = starting_phase(run_of("0:16 600:32 4K:64"), *begun(8))
    assert later is not None and later.stop == 12
    larger = starting_phase(run_of(more="--global-batch-size 8"), *begun(12))
    assert larger is not None and (larger.first, larger.stop) == (12, 20)
    assert starting_phase(run_of(""), *begun(24)) is None
    evaluated = starting_phase(run_of(more="--seq-length-phase 1 --skip-train --eval-iters 1"), *begun(24))
    assert evaluated is not None and evaluated.number == 3


def test_the_farewell_says_how_to_go_on() -> None:
    run = run_of(more="--seq-length-phase 1")
    phase = Phase.of(run, 1, 0)
    assert "--save and --load and --seq-length-phase 2" in farewell(run, phase)
    saving = replace(run, checkpoint=replace(run.checkpoint, save="here"))
    assert "continue with the same flags, --load here and --seq-length-phase 2" in farewell(saving, phase)
