"""Plan the memory and step time of each phase of ``--seq-length-schedule``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megatron_sp.config.schema import Run
from megatron_sp.layout.length_schedule import parse_length_schedule, phases, run_of_length
from megatron_sp.plan.devices import GIB, Device
from megatron_sp.plan.memory import predict
from megatron_sp.plan.step_time import predict_step_time


@dataclass(frozen=True)
class PhasePlan:
    """The predicted memory and step time of one phase, in the layout that the flags give.

    Attributes:
        first_token: number of tokens that the training has read when the phase begins.
        sequences: number of sequences in a step.
        memory: predicted peak of a device in bytes.
        seconds: predicted time of a step.
    """

    phase: int
    length: int
    first_token: int
    sequences: int
    memory: int
    seconds: float

    def text(self) -> str:
        """Return the plan as a line for a terminal."""
        return (f"phase {self.phase}: sequences of {self.length:,} tokens from {self.first_token:,} tokens on, "
                f"{self.sequences:,} in a step: {self.memory / GIB:.2f} GiB, step time (estimate) {self.seconds:.3g} s")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def planned_run(run: Run) -> Run:
    """Return the run to plan: that of ``--seq-length-phase``, else of the longest phase, which needs most memory."""
    if not run.data.seq_length_schedule:
        return run
    schedule = parse_length_schedule(run.data.seq_length_schedule)
    return run_of_length(run, schedule[(run.data.seq_length_phase or len(schedule)) - 1][1])


def plan_phases(run: Run, device: Device, devices_per_node: int) -> list[PhasePlan]:
    """Return the plans of all phases, in order; none without a schedule, or where the layout is for one phase alone."""
    if run.data.seq_length_phase:
        return []
    found = []
    for phase in phases(run):
        short = run_of_length(run, phase.length)
        found.append(PhasePlan(
            phase.number, phase.length, phase.first * run.data.seq_length, short.train.global_batch_size,
            predict(short, device=device.kind).total, predict_step_time(short, device, devices_per_node).total))
    return found
