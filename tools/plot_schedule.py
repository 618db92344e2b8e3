#!/usr/bin/env python3
"""Draw a pipeline schedule and its bubble: which rank does what when, as text and as a PNG.

  plot_schedule.py --pp 4 --microbatches 8 --schedule interleaved --stages-per-rank 2 --output schedule.png

The order of the actions is the one that training runs; times follow from it: each action starts as soon as its
rank is free and what it needs has been computed (communication takes no time). A layer's forward takes 1
unit, its backward 2 (1 for the gradient of the input, 1 for that of the weights), whatever stage it is in.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_sp.errors import ConfigError  # noqa: E402
from megatron_sp.layout.schedules import SCHEDULES, takes_microbatches  # noqa: E402
from megatron_sp.runtime import run_program  # noqa: E402

#: Kind -> duration in units of a rank's whole forward, for one stage per rank; colour.
KINDS = {"F": (1.0, "#7aa6d6"), "B": (2.0, "#e6a267"), "I": (1.0, "#e6a267"), "W": (1.0, "#8cc084")}
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
#: Stages per rank that a schedule takes.
STAGES = {"1f1b": (1,), "interleaved": tuple(range(2, 33)), "zero-bubble": tuple(range(1, 33)), "zbv": (2,),
          "dualpipev": (2,)}


@dataclass(frozen=True)
class Action:
    """One computation of one stage for one microbatch, with its time."""

    rank: int
    kind: str
    stage: int
    microbatch: int
    start: float
    end: float


Step = tuple[str, int, int]  # kind, stage, microbatch


def order_of(schedule: str, pp: int, stages_per_rank: int, microbatches: int) -> list[list[Step]]:
    """What each rank computes, in the order of training."""
    from megatron_sp.parallel.pipeline import schedule_order

    return schedule_order(schedule, pp, stages_per_rank, microbatches)


def needs(step: Step, last_stage: int) -> list[Step]:
    """What must be finished before a step can start."""
    kind, stage, microbatch = step
    if kind == "F":
        return [("F", stage - 1, microbatch)] if stage else []
    if kind == "W":
        return [("I", stage, microbatch)]
    before: list[Step] = [("F", stage, microbatch)]
    return before + ([("B", stage + 1, microbatch)] if stage < last_stage else [])


def simulate(orders: list[list[Step]], stages_per_rank: int) -> list[Action]:
    """Give every step its time."""
    last_stage = max(stage for order in orders for _, stage, _ in order)
    ends: dict[Step, float] = {}
    free, position = [0.0] * len(orders), [0] * len(orders)
    actions = []
    while any(position[rank] < len(order) for rank, order in enumerate(orders)):
        moved = False
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                step = order[position[rank]]
                # the gradient of a stage's input is there after its whole backward, or after the first half of it
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
    """Share of the ranks' time in which they wait."""
    busy = sum(action.end - action.start for action in actions)
    ranks = max(action.rank for action in actions) + 1
    return 1 - busy / (ranks * max(action.end for action in actions))


def as_text(actions: list[Action], stages_per_rank: int) -> str:
    """One line a rank, one column a unit (of a stage's forward); capital letters are a rank's later stages."""
    unit = 1 / stages_per_rank
    width = max(len(str(action.microbatch)) for action in actions) + 2
    columns = round(max(action.end for action in actions) / unit)
    turns = {rank: sorted({action.stage for action in actions if action.rank == rank})
             for rank in {action.rank for action in actions}}
    lines = []
    for rank in sorted(turns):
        cells = ["." + " " * (width - 1)] * columns
        for action in (action for action in actions if action.rank == rank):
            letter = action.kind.upper() if turns[rank].index(action.stage) else action.kind.lower()
            first, last = round(action.start / unit), round(action.end / unit)
            cells[first:last] = [f"{letter}{action.microbatch}".ljust(width)] * (last - first)
        lines.append(f"rank {rank} | {''.join(cells).rstrip()}")
    return "\n".join(lines)


def plot(actions: list[Action], title: str, path: Path) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    ranks = max(action.rank for action in actions) + 1
    turns = [sorted({action.stage for action in actions if action.rank == rank}) for rank in range(ranks)]
    end = max(action.end for action in actions)
    figure, axes = pyplot.subplots(figsize=(min(24, max(8, end * 0.45)), 1.2 + 0.55 * ranks))
    for action in actions:
        turn, length = turns[action.rank].index(action.stage), action.end - action.start
        shade = 1.0 - 0.45 * turn / max(1, len(turns[action.rank]) - 1)
        axes.barh(action.rank, length, left=action.start, height=0.9, color=KINDS[action.kind][1], alpha=shade,
                  edgecolor="white", linewidth=0.8)
        axes.text(action.start + length / 2, action.rank, str(action.microbatch), ha="center", va="center",
                  fontsize=8 if length >= 1 else 6)
    axes.set(yticks=range(ranks), yticklabels=[f"rank {rank}\nstage {', '.join(map(str, turns[rank]))}"
                                              for rank in range(ranks)], xlim=(0, end),
             xlabel="time in units of a rank's forward", title=title)
    axes.invert_yaxis()
    axes.set_facecolor("#eeeeee")
    used = {action.kind for action in actions}
    axes.legend(handles=[Patch(color=KINDS[kind][1], label=NAMES[kind]) for kind in "FBIW" if kind in used] +
                [Patch(color="#eeeeee", label="waiting")], loc="center left", bbox_to_anchor=(1.005, 0.5),
                frameon=False, fontsize=8)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--pp", type=int, required=True, help="pipeline ranks")
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--schedule", default="1f1b", choices=tuple(STAGES))
    parser.add_argument("--stages-per-rank", type=int, default=0, help="default: what the schedule needs")
    parser.add_argument("--output", type=Path, help="PNG to write (default: text only)")
    return parser


def main(argv: list[str]) -> None:
    flags = build_parser().parse_args(argv)
    if flags.pp < 1:
        raise ConfigError(f"--pp {flags.pp} must be at least 1")
    per_rank = flags.stages_per_rank or SCHEDULES[flags.schedule].default_stages_per_rank
    if per_rank not in STAGES[flags.schedule]:
        raise ConfigError(f"--stages-per-rank {per_rank}: --schedule {flags.schedule} takes "
                          f"{' or '.join(map(str, STAGES[flags.schedule][:3]))}")
    if flags.microbatches < 1 or not takes_microbatches(flags.schedule, flags.microbatches, flags.pp):
        raise ConfigError(f"--microbatches {flags.microbatches} does not go with --schedule {flags.schedule} on --pp "
                          f"{flags.pp} ranks; a multiple of {2 * flags.pp} always does")
    actions = simulate(order_of(flags.schedule, flags.pp, per_rank, flags.microbatches), per_rank)
    share = bubble(actions)
    title = f"{flags.schedule}: {flags.pp} ranks, {per_rank} stages each, {flags.microbatches} microbatches, " \
            f"bubble {share:.1%}"
    print(title)
    print(as_text(actions, per_rank))
    if flags.output:
        plot(actions, title, flags.output)
        print(f"wrote {flags.output}")


if __name__ == "__main__":
    run_program(main)
