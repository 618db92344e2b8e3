#!/usr/bin/env python3
"""Draw a pipeline schedule: which rank computes which microbatch when, and how large the bubble is.

Example:

    python tools/plot_schedule.py --pp 4 --microbatches 8 --schedule interleaved --output schedule.png
    python tools/plot_schedule.py --pp 2 --microbatches 1 --chunks 4

The schedule is printed as text, and with --output drawn as a picture. The order of actions on each rank is that of the
training. The times are a model: an action starts as soon as its rank is free and its inputs have been computed, and
communication takes no time. A rank's forward of one microbatch takes 1 unit. Its backward takes 2 units, 1 for the
gradient of the input and 1 for the gradient of the weights. The bubble is the share of time in which ranks wait.

With --chunks N each sequence is computed in N chunks, as with --sequence-chunk-size, and the numbers are those of
chunks: microbatch x N + chunk. A unit of time is then the forward of one chunk, and all chunks count alike, although
attention of a late chunk takes longer.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
if (CHECKOUT / "megatron_sp").is_dir():  # false once pip has installed this file, which then finds the package anyway
    sys.path.insert(0, str(CHECKOUT))

from megatron_sp.config.cli.tool_parser import ToolParser  # noqa: E402
from megatron_sp.errors import ConfigError  # noqa: E402
from megatron_sp.layout.schedules import SCHEDULES, takes_microbatches  # noqa: E402
from megatron_sp.layout.transfers import training_order  # noqa: E402
from megatron_sp.pictures import load_pyplot, picture_problems, save_picture  # noqa: E402
from megatron_sp.runtime import run_program  # noqa: E402

#: For each kind of action: how long it takes with one stage per rank, in units of a forward, and its colour.
KINDS = {"K": (1.0, "#b9d3ea"), "F": (1.0, "#7aa6d6"), "B": (2.0, "#e6a267"), "I": (1.0, "#c59fd6"),
         "W": (1.0, "#8cc084")}
NAMES = {"K": "forward that keeps keys and values", "F": "forward", "B": "backward (both gradients)",
         "I": "gradient of the input", "W": "gradient of the weights"}
#: Numbers of stages per rank that each schedule allows.
STAGES = {"1f1b": (1,), "interleaved": tuple(range(2, 33)), "zero-bubble": tuple(range(1, 33)), "zbv": (2,),
          "dualpipev": (2,)}


@dataclass(frozen=True)
class Action:
    """One computation of a stage for a microbatch, with its start and end in units of a rank's forward."""

    rank: int
    kind: str
    stage: int
    microbatch: int
    start: float
    end: float


Step = tuple[str, int, int]  # kind of action, stage, microbatch


def order_of(schedule: str, pp: int, stages_per_rank: int, microbatches: int, chunks: int = 1) -> list[list[Step]]:
    """Return the steps of each rank in the order in which the training computes them.

    Args:
        chunks: chunks of each sequence; above 1, the numbers in the steps are those of chunks.
    """
    if chunks > 1:
        return [[(kind, rank, unit) for kind, unit in training_order(pp, rank, microbatches, chunks)]
                for rank in range(pp)]
    from megatron_sp.parallel.pipeline import schedule_order

    return schedule_order(schedule, pp, stages_per_rank, microbatches)


def needs(step: Step, last_stage: int) -> list[Step]:
    """Return the steps that must be finished before a step can start."""
    kind, stage, microbatch = step
    if kind in "KF":
        return [(kind, stage - 1, microbatch)] if stage else []
    if kind == "W":
        return [("I", stage, microbatch)]
    before: list[Step] = [("F", stage, microbatch)]
    return before + ([("B", stage + 1, microbatch)] if stage < last_stage else [])


def simulate(orders: list[list[Step]], stages_per_rank: int) -> list[Action]:
    """Return an action for every step, with the earliest start and end that the orders of the ranks allow."""
    last_stage = max(stage for order in orders for _, stage, _ in order)
    ends: dict[Step, float] = {}
    free, position = [0.0] * len(orders), [0] * len(orders)
    actions = []
    while any(position[rank] < len(order) for rank, order in enumerate(orders)):
        moved = False
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                step = order[position[rank]]
                # A step waits for the input gradient of the next stage. That stage computes it in its whole backward
                # (B), or, where the schedule splits the backward, in the first half of it (I).
                ready = [ends.get(need, ends.get(("I", *need[1:]))) if need[0] == "B" else ends.get(need)
                         for need in needs(step, last_stage)]
                if any(end is None for end in ready):
                    break
                start = max([free[rank], *(end for end in ready if end is not None)])
                ends[step] = free[rank] = start + KINDS[step[0]][0] / stages_per_rank
                actions.append(Action(rank, *step, start, ends[step]))
                position[rank] += 1
                moved = True
        if not moved:
            raise RuntimeError("the schedule waits for itself")
    return actions


def bubble(actions: list[Action]) -> float:
    """Return the bubble: the share of the ranks' time in which they wait, from 0 to 1."""
    busy = sum(action.end - action.start for action in actions)
    ranks = max(action.rank for action in actions) + 1
    return 1 - busy / (ranks * max(action.end for action in actions))


def as_text(actions: list[Action], stages_per_rank: int) -> str:
    """Return the schedule as text: a line for each rank, a column for the time that a stage's forward takes.

    Actions of a rank's first stage are lower-case letters, those of its later stages capital letters.
    """
    unit = 1 / stages_per_rank
    width = max(len(str(action.microbatch)) for action in actions) + 2
    columns = round(max(action.end for action in actions) / unit)
    stages = {rank: sorted({action.stage for action in actions if action.rank == rank})
              for rank in {action.rank for action in actions}}
    lines = []
    for rank in sorted(stages):
        cells = ["." + " " * (width - 1)] * columns
        for action in (action for action in actions if action.rank == rank):
            letter = action.kind.upper() if stages[rank].index(action.stage) else action.kind.lower()
            first, last = round(action.start / unit), round(action.end / unit)
            cells[first:last] = [f"{letter}{action.microbatch}".ljust(width)] * (last - first)
        lines.append(f"rank {rank} | {''.join(cells).rstrip()}")
    return "\n".join(lines)


def plot(actions: list[Action], title: str, path: Path) -> None:
    """Write the schedule as a PNG with a row for each rank and a bar for each action."""
    pyplot = load_pyplot()
    from matplotlib.patches import Patch

    ranks = max(action.rank for action in actions) + 1
    stages = [sorted({action.stage for action in actions if action.rank == rank}) for rank in range(ranks)]
    end = max(action.end for action in actions)
    width = min(24, max(8, end * 0.45))  # inches
    figure, axes = pyplot.subplots(figsize=(width, 1.2 + 0.55 * ranks))
    drawn_width = width * (axes.get_position().x1 - axes.get_position().x0)
    digits = len(str(max(action.microbatch for action in actions)))
    numbered = True
    for action in actions:
        place, length = stages[action.rank].index(action.stage), action.end - action.start
        shade = 1.0 - 0.45 * place / max(1, len(stages[action.rank]) - 1)  # the later stages of a rank are paler
        axes.barh(action.rank, length, left=action.start, height=0.9, color=KINDS[action.kind][1], alpha=shade,
                  edgecolor="white", linewidth=0.8)
        size = min(8.0, 72 * length / end * drawn_width / (0.75 * digits))  # points, so that numbers do not overlap
        if size >= 4:
            axes.text(action.start + length / 2, action.rank, str(action.microbatch), ha="center", va="center",
                      fontsize=size)
        numbered = numbered and size >= 4
    axes.set(yticks=range(ranks), yticklabels=[f"rank {rank}\nstage {', '.join(map(str, stages[rank]))}"
                                              for rank in range(ranks)], xlim=(0, end),
             xlabel="time in units of a rank's forward; " + (
                 "numbers: microbatches" if numbered else "numbers: microbatches, left out where there is no room"),
             title=title)
    axes.invert_yaxis()
    axes.set_facecolor("#eeeeee")
    used = {action.kind for action in actions}
    axes.legend(handles=[Patch(color=KINDS[kind][1], label=NAMES[kind]) for kind in "KFBIW" if kind in used] +
                [Patch(color="#eeeeee", label="waiting")], loc="center left", bbox_to_anchor=(1.005, 0.5),
                frameon=False, fontsize=8)
    save_picture(figure, path)


def build_parser() -> argparse.ArgumentParser:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    group = parser.add_argument_group("pipeline")
    group.add_argument("--pp", type=int, required=True, metavar="N",
                       help="pipeline ranks (--pipeline-model-parallel-size of the training)")
    group.add_argument("--microbatches", type=int, required=True, metavar="N", help="microbatches of one step")
    group.add_argument("--schedule", default="1f1b", choices=tuple(STAGES),
                       help="as --pipeline-schedule of the training (default: %(default)s)")
    group.add_argument("--stages-per-rank", type=int, default=0, metavar="N",
                       help="stages of each rank (default: what the schedule needs)")
    group.add_argument("--chunks", type=int, default=1, metavar="N",
                       help="chunks of each sequence (--seq-length / --sequence-chunk-size of the training)")
    group = parser.add_argument_group("output")
    group.add_argument("--output", type=Path, metavar="FILE.png", help="picture to write (default: text only)")
    return parser


def main(argv: list[str]) -> None:
    flags = build_parser().parse_args(argv)
    problems = picture_problems(flags.output)
    if flags.pp < 1:
        problems.append(f"--pp {flags.pp} must be at least 1")
    if problems:
        raise ConfigError(problems)
    per_rank = flags.stages_per_rank or SCHEDULES[flags.schedule].default_stages_per_rank
    if per_rank not in STAGES[flags.schedule]:
        raise ConfigError(f"--stages-per-rank {per_rank}: --schedule {flags.schedule} takes "
                          f"{' or '.join(map(str, STAGES[flags.schedule][:3]))}")
    if flags.microbatches < 1 or not takes_microbatches(flags.schedule, flags.microbatches, flags.pp):
        raise ConfigError(f"--microbatches {flags.microbatches} does not go with --schedule {flags.schedule} on --pp "
                          f"{flags.pp} ranks; a multiple of {2 * flags.pp} always does")
    if flags.chunks < 1 or (flags.chunks > 1 and flags.schedule != "1f1b"):
        raise ConfigError(f"--chunks {flags.chunks} must be at least 1, and above 1 needs --schedule 1f1b: chunks have "
                          "a schedule of their own, with one stage per rank")
    actions = simulate(order_of(flags.schedule, flags.pp, per_rank, flags.microbatches, flags.chunks), per_rank)
    share = bubble(actions)
    name = flags.schedule if flags.chunks == 1 else f"{flags.chunks} chunks"
    title = f"{name}: {flags.pp} rank{'s' * (flags.pp > 1)}, {per_rank} stage{'s' * (per_rank > 1)} each, " \
            f"{flags.microbatches} microbatch{'es' * (flags.microbatches > 1)}, bubble {share:.1%}"
    print(title)
    print(as_text(actions, per_rank))
    if flags.output:
        plot(actions, title, flags.output)
        print(f"wrote {flags.output}")


if __name__ == "__main__":
    run_program(main)
