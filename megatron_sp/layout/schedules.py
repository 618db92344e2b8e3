"""Pipeline schedules: which stages a rank holds under each, and how many microbatches each takes.

A schedule is one row of ``SCHEDULES``. The checks of the command line, the memory plan and the pipeline itself all
read it, so that a new schedule is declared once.
"""

from __future__ import annotations

from typing import NamedTuple


class PipelineSchedule(NamedTuple):
    """What the rest of the code must know about a schedule.

    Attributes:
        torch_name: its name in ``torch.distributed.pipelining``.
        default_stages_per_rank: stages per rank where the user names no number.
        only_stages_per_rank: the only number of stages per rank that it takes; 0 where it takes several.
        is_v_shaped: rank r holds stages r and last - r, so that the first and the last stage are on rank 0.
        splits_backward: the gradient of a stage's input and those of its weights are computed at different times.
    """

    torch_name: str
    default_stages_per_rank: int = 1
    only_stages_per_rank: int = 0
    is_v_shaped: bool = False
    splits_backward: bool = False


SCHEDULES = {
    "1f1b": PipelineSchedule("1F1B", only_stages_per_rank=1),
    "interleaved": PipelineSchedule("Interleaved1F1B", default_stages_per_rank=2),
    "zero-bubble": PipelineSchedule("InterleavedZeroBubble", splits_backward=True),
    "zbv": PipelineSchedule("ZBVZeroBubble", 2, 2, is_v_shaped=True, splits_backward=True),
    "dualpipev": PipelineSchedule("DualPipeV", 2, 2, is_v_shaped=True, splits_backward=True),
}


def stages_of_rank(schedule: str, pp: int, stages_per_rank: int, rank: int) -> list[int]:
    """Return the numbers of the stages that a pipeline rank holds, in order.

    ::

        pp 4, 2 stages per rank    interleaved: rank r holds r, r+4      V-shaped: rank r holds r, 7-r
                                   rank 0: 0 4                           rank 0: 0 7
                                   rank 1: 1 5                           rank 1: 1 6
                                   rank 2: 2 6                           rank 2: 2 5
                                   rank 3: 3 7                           rank 3: 3 4
    """
    if SCHEDULES[schedule].is_v_shaped and pp > 1:
        return [rank, 2 * pp - 1 - rank]
    return [rank + pp * round_number for round_number in range(max(1, stages_per_rank))]


def takes_microbatches(schedule: str, number: int, pp: int) -> bool:
    """Return whether a schedule can run a step of this number of microbatches on ``pp`` ranks."""
    if schedule in ("interleaved", "zero-bubble"):
        return number % max(1, number // pp) == 0
    return number >= 2 * pp if schedule == "dualpipev" else number >= 1


def chunk_order(pp: int, rank: int, microbatches: int, chunks: int) -> list[tuple[str, int]]:
    """Return what a pipeline rank computes with ``--sequence-chunk-size``, in order: (kind, unit).

    A unit is a chunk of a microbatch, numbered ``microbatch * chunks + chunk``. The kinds are K (first pass: forward
    that keeps keys and values), F (forward of the second pass) and B (its backward). K goes through all chunks of a
    sequence but the last, in order; F and B go through all of them in reverse. F and B alternate as in 1F1B, so that
    rank r holds the activations of at most ``pp - r`` chunks. One microbatch of 4 chunks on 2 ranks::

        rank 0   K0 K1 K2 F3 F2 .. .. B3 -- F1 B2 -- F0 B1 -- .. B0 --
        rank 1   .. K0 K1 K2 F3 B3 -- F2 B2 -- F1 B1 -- F0 B0 -- .. ..
    """
    forward = [step for first in range(0, microbatches * chunks, chunks) for step in (
        *(("K", first + chunk) for chunk in range(chunks - 1)),
        *(("F", first + chunk) for chunk in reversed(range(chunks))))]
    backward = [("B", unit) for kind, unit in forward if kind == "F"]
    order: list[tuple[str, int]] = []
    position = 0

    def add_forwards(number: int) -> None:
        """Add the next steps of the forward direction, up to so many forwards of the second pass."""
        nonlocal position
        while number and position < len(forward):
            order.append(forward[position])
            number -= forward[position][0] == "F"
            position += 1

    add_forwards(pp - rank)
    for step in backward:
        order.append(step)
        add_forwards(1)
    return order
