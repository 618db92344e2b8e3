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
