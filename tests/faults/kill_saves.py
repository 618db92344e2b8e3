"""Kill trainings at random moments of their saves, restart them, and compare the loss curve with a run without kills.

    python -m tests.faults.kill_saves --kills 30                       # saves for which training waits
    python -m tests.faults.kill_saves --kills 30 --async-save          # saves in the background

A run saves after every step. One attempt waits until the files of some save appear, then a random part of a save's
time, and sends SIGKILL to all ranks, or to one of them. Afterwards these must hold: every checkpoint under its final
name is whole; the save before the killed one is complete; a restart resumes from the newest complete checkpoint. When a
run reaches its end after some kills, its loss curve must be bitwise that of a run without kills.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from megatron_sp.checkpoint import files
from megatron_sp.checkpoint.inspection import damages_of
from megatron_sp.progress import progress_bar
from tests.helpers.configs import STYLES
from tests.helpers.spawn import kill_ranks, run_ranks
from tests.helpers.training import steps, train

#: Steps of a run.
LENGTH = 12
FLAGS = f"{STYLES['llama']} --tensor-model-parallel-size 2 --hidden-dropout 0.1 --lr 1e-2 --lr-decay-style constant " \
        f"--save-interval 1 --train-iters {LENGTH}"
#: Seconds after the start of a save within which the kill comes: longer than a save of the tiny model takes.
SPREAD = 0.25


@dataclass
class Report:
    """What the kills met.

    Attributes:
        kills: kills before a run's end.
        runs: runs that reached their end, whose loss curves were compared.
        found: how often each kind of directory was there after a kill.
    """

    kills: int = 0
    runs: int = 0
    found: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind}: {count}" for kind, count in sorted(self.found.items()))
        return f"{self.kills} kills, {self.runs} runs finished with equal loss curves; after the kills: {kinds}"


def torment(directory: Path, kills: int, flags: str, seed: int, minutes: float = math.inf) -> Report:
    """Kill runs until there were ``kills`` kills, and let the last run reach its end.

    Args:
        directory: for the runs' files.
        flags: further flags of the runs, for example --async-save.
        minutes: kill no more after this time.

    Raises:
        AssertionError: a checkpoint, a resume or a loss curve is not as it must be.
    """
    chance, report, deadline = random.Random(seed), Report(), time.monotonic() + 60 * minutes
    plain = directory / "plain"
    assert run_ranks(train, 2, f"{FLAGS} --save {plain}") == ["", ""]
    expected = steps(plain, "iteration", "lm_loss", "grad_norm", "first_sample")
    save = directory / "save"
    with progress_bar(total=kills, desc=f"kills {flags}", disable=None) as bar:
        while report.kills < kills:
            newest = max(files.complete_iterations(save), default=0)
            target = chance.randint(newest + 1, min(newest + 3, LENGTH))
            pause, victims = chance.uniform(0, SPREAD), chance.choice([(), (), (), (0,), (1,)])
            run_flags = f"{FLAGS} {flags} --save {save} --load {save}"
            finished = kill_ranks(train, 2, run_flags, victims=victims,
                                  wait_until=lambda: wait_for_save(save, target, pause))  # noqa: B023
            report.kills += not finished
            bar.update(not finished)
            check_after_kill(save, newest, report)
            is_over = report.kills == kills or time.monotonic() > deadline
            if finished or is_over or max(files.complete_iterations(save), default=0) >= LENGTH - 1:
                finish(save, run_flags, expected)
                report.runs += 1
                shutil.rmtree(save)
            if is_over:
                break
    return report


def wait_for_save(save: Path, iteration: int, pause: float) -> None:
    """Return ``pause`` seconds after the save of an iteration has begun, or when it is complete already."""
    final, deadline = save / files.directory_name(iteration), time.monotonic() + 60
    building = save / (final.name + files.BUILDING)
    left = changed(building)      # an earlier kill may have left such a directory
    while changed(building) in (0, left) and not final.exists():
        assert time.monotonic() < deadline, f"no save of iteration {iteration} in {save}"
        time.sleep(0.002)
    time.sleep(pause)


def changed(path: Path) -> int:
    """Return when a directory was last changed, in nanoseconds; 0 when it does not exist."""
    try:
        return path.stat().st_ctime_ns
    except FileNotFoundError:
        return 0


def check_after_kill(save: Path, newest: int, report: Report) -> None:
    """Check what a kill has left: whole checkpoints, and none lost that was complete before.

    Args:
        newest: the newest complete iteration before the killed run.
    """
    complete = files.complete_checkpoints(save)
    for path in complete.values():
        assert damages_of(path) == []
    under_way = list(files.iteration_directories(save, files.BUILDING))
    report.found.update(path.name.split(".")[1] for path in save.glob("iter_*.*"))
    report.found["nothing unfinished"] += not list(save.glob("iter_*.*"))
    floor = max([newest, *(number - 1 for number in under_way)])
    assert max(complete, default=0) >= floor, (list(complete), under_way, newest)
    if complete:
        tracked = files.read_tracker(save)
        report.found["tracker behind"] += tracked != max(complete)
        found = files.find_checkpoint(save)
        assert found and found.iteration >= max(complete) - 1


def finish(save: Path, flags: str, expected: list[tuple[object, ...]]) -> None:
    """Let a run reach its end, and compare its loss curve."""
    assert run_ranks(train, 2, flags) == ["", ""]
    found = steps(save, "iteration", "lm_loss", "grad_norm", "first_sample")
    assert found == expected, "the loss curve differs from that of a run without kills"
    assert max(files.complete_iterations(save)) == LENGTH and not list(save.glob("iter_*.*"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, metavar="N", help="kills in all (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="N", help="kill no more after N minutes")
    parser.add_argument("--async-save", action="store_true", help="save in the background")
    parser.add_argument("--keep-last", type=int, default=0, metavar="N", help="let the runs delete old checkpoints")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the moments (default: %(default)s)")
    arguments = parser.parse_args()
    flags = "--async-save " * arguments.async_save + f"--keep-last {arguments.keep_last} " * bool(arguments.keep_last)
    with tempfile.TemporaryDirectory(prefix="kill_saves_") as directory:
        print(torment(Path(directory), arguments.kills, flags, arguments.seed, arguments.minutes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
