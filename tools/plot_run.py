#!/usr/bin/env python3
"""Draw the loss, learning rate, gradient norm and speed of one or several runs, and print a summary of each.

Example:

    python tools/plot_run.py runs/a "long context=runs/b" --output ab.png

    python tools/plot_run.py --compare runs/one_process runs/ulysses --output difference.png

--compare shows whether several runs have the same losses. One panel shows the losses, another how far each run's losses
are from those of the first run.

Give for each run its file metrics.jsonl, or the directory that holds this file. NAME=PATH labels the run as NAME in the
picture.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

CHECKOUT = Path(__file__).resolve().parent.parent
if (CHECKOUT / "megatron_sp").is_dir():  # false once pip has installed this file, which then finds the package anyway
    sys.path.insert(0, str(CHECKOUT))

from megatron_sp.config.cli.tool_parser import ToolParser  # noqa: E402
from megatron_sp.errors import ConfigError, DataError  # noqa: E402
from megatron_sp.pictures import load_pyplot, picture_problems, save_picture  # noqa: E402
from megatron_sp.runtime import run_program  # noqa: E402
from megatron_sp.train.report.metrics_file import NAME, read_metrics  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[float, float]


@dataclass(frozen=True)
class RunMetrics:
    """The metrics of one run: a name for the legend, and one record for each iteration, in order."""

    name: str
    records: list[dict[str, Any]]

    def series(self, key: str, x: str = "consumed_tokens") -> list[Point]:
        """Return a point (record[x], record[key]) for each record in which both are finite numbers."""
        return [(record[x], record[key]) for record in self.records
                if _is_finite(record.get(key)) and _is_finite(record.get(x))]

    def validation_sets(self) -> list[str]:
        """Return the keys of the validation losses: ``valid_loss`` first, then ``valid_loss/NAME`` of named sets."""
        found = {key for record in self.records for key, value in record.items()
                 if key.partition("/")[0] == "valid_loss" and _is_finite(value)}
        return sorted(found)


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def read_run(argument: str) -> RunMetrics:
    """Read the metrics of a run.

    Args:
        argument: ``[NAME=]PATH``; the path is a metrics file or its directory.

    Raises:
        DataError: there is no such file, or it holds no metrics.
    """
    name, separator, rest = argument.partition("=")
    path = Path(rest if separator else argument)
    path = path / NAME if path.is_dir() else path
    try:
        rows = read_metrics(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise DataError(f"{path} cannot be read ({reason}); give a run's {NAME} or its directory") from None
    if not rows:
        raise DataError(f"{path} holds no metrics: no line is a JSON object with an iteration; give the {NAME} of a "
                        "run that has logged something")
    by_iteration: dict[int, dict[str, Any]] = {}
    for row in rows:  # a training step and an evaluation of the same iteration are two rows: merge them
        by_iteration.setdefault(row["iteration"], {}).update(row)
    records = [by_iteration[iteration] for iteration in sorted(by_iteration)]
    per_sample = max((row["consumed_tokens"] / row["consumed_samples"] for row in records
                      if row.get("consumed_tokens") and row.get("consumed_samples")), default=0)
    for row in records:  # rows of evaluations have no token count: compute it from the number of samples
        row.setdefault("consumed_tokens", (row.get("consumed_samples") or 0) * per_sample)
    return RunMetrics(name if separator else path.parent.name or path.stem, records)


def smooth(points: list[Point], window: int) -> list[Point]:
    """Return the mean of each point and up to ``window - 1`` points before it, fewer where the loss falls fast."""
    smoothed: list[Point] = []
    for index, (x, _) in enumerate(points):
        near = [value for _, value in points[index + 1 - min(window, 1 + index // 4):index + 1]]
        smoothed.append((x, sum(near) / len(near)))
    return smoothed


def summary(run: RunMetrics, references: list[tuple[str, float]]) -> list[str]:
    """Return lines with the iterations and tokens of a run, its first and last losses, and its median speed."""
    loss = run.series("mean_lm_loss") or run.series("lm_loss")  # the means are what the log lines show
    speed = sorted(value for _, value in run.series("tokens_per_s"))
    last = run.records[-1]
    lines = [f"{run.name}: {last['iteration']} iterations, {last['consumed_tokens']:,.0f} tokens"]
    if loss:
        lines.append(f"  training loss    first {loss[0][1]:.3f}   last {loss[-1][1]:.3f}")
    for key in run.validation_sets():
        valid = run.series(key)
        own_name = key.partition("/")[2]
        lines.append(f"  validation loss  first {valid[0][1]:.3f}   last {valid[-1][1]:.3f}   {own_name}".rstrip())
    lines += [f"  {name}  {value:.3f}" for name, value in references]
    if speed:
        lines.append(f"  tokens/s         median {speed[len(speed) // 2]:,.0f}")
    return lines


def draw(runs: list[RunMetrics], output: Path, *, x: str = "consumed_tokens", log_x: bool = False, window: int = 0,
         references: list[tuple[str, float]] | None = None, title: str = "") -> None:
    """Draw loss, learning rate, gradient norm and speed of ``runs`` to the PNG ``output``.

    Args:
        runs: their order decides the colours.
        output: the PNG.
        x: key of the records that the horizontal axis shows.
        log_x: whether the axis below the loss is logarithmic; the loss axis then also shows the steep first fall.
        window: number of points to average the training loss over; 0 means a 25th of the run.
        references: named losses to draw as horizontal lines.

    Raises:
        DataError: matplotlib is missing, or the output cannot be written.
    """
    pyplot = load_pyplot()
    from matplotlib.ticker import EngFormatter

    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8), constrained_layout=True)
    (loss, rate), (norm, speed) = axes
    for index, run in enumerate(runs):
        # Each run has a thinner line than the one below it, so that curves which coincide can all be seen.
        width = 1.5 + 2.5 * (len(runs) - 1 - index) / max(1, len(runs) - 1) * (len(runs) > 1)
        _draw_loss(loss, run, f"C{index}", x, window, width, each_step=len(runs) == 1)
        for axis, key in ((rate, "learning_rate"), (norm, "grad_norm"), (speed, "tokens_per_s")):
            _line(axis, run.series(key, x), color=f"C{index}", label=run.name, linewidth=width)
    for index, (name, value) in enumerate(references or []):
        loss.axhline(value, color="black", linestyle=(0, (2, 2 + index)), linewidth=1, label=f"{name} ({value:.2f})")
    label = x.replace("_", " ")
    for axis, heading, unit in ((loss, "Loss", "nats per token"), (rate, "Learning rate", ""),
                                (norm, "Gradient norm (before clipping)", ""), (speed, "Speed", "tokens per second")):
        axis.set(title=heading, ylabel=unit, xlabel=label)
        axis.grid(alpha=0.3)
    if log_x and any(run.series("lm_loss", x) for run in runs):
        loss.set_xscale("log")  # the loss falls about as the logarithm of the tokens
    for axis in axes.flat:
        axis.xaxis.set_major_formatter(EngFormatter())
    if any(run.series("grad_norm", x) for run in runs):
        norm.set_yscale("log")
    rate.set_ylim(bottom=0)
    speed.set_ylim(bottom=0)
    if not log_x:
        _limit_loss_axis(loss, runs, x, [value for _, value in references or []])
    # Below the panels, where it hides no data however many runs there are.
    handles, names = loss.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(3, len(names)), frameon=False, fontsize=9)
    figure.suptitle(title or ", ".join(run.name for run in runs))
    save_picture(figure, output)


def differences(first: RunMetrics, other: RunMetrics) -> list[Point]:
    """Return (iteration, absolute difference of the losses) for each iteration that both runs have logged.

    Raises:
        DataError: they have no iteration in common.
    """
    mine = dict(first.series("lm_loss", "iteration"))
    found = [(step, abs(loss - mine[step])) for step, loss in other.series("lm_loss", "iteration") if step in mine]
    if not found:
        raise DataError(f"{first.name} and {other.name} have logged no loss of the same iteration; give runs of the "
                        "same length, or leave out --compare")
    return found


def compared(first: RunMetrics, others: list[RunMetrics]) -> list[str]:
    """Return a line for each other run: its largest difference from the first run, and in which iteration."""
    lines = []
    for run in others:
        points = differences(first, run)
        step, largest = max(points, key=lambda point: point[1])
        lines.append(f"{run.name}: over {len(points)} iterations the loss differs from {first.name} by at most "
                     f"{largest:.2g} (iteration {step:.0f})")
    return lines


def draw_comparison(runs: list[RunMetrics], output: Path, title: str = "") -> None:
    """Draw the losses of runs over the iterations, and below how far each is from the first run, to a PNG.

    Raises:
        DataError: matplotlib is missing, the runs have no iteration in common, or the output cannot be written.
    """
    pyplot = load_pyplot()
    figure, (loss, distance) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(2, 1),
                                               constrained_layout=True)
    for index, run in enumerate(runs):
        # Each run has a thinner line than the one below it, so that curves which coincide can all be seen.
        style = {"color": f"C{index}", "label": run.name, "linewidth": 1.5 + 2.5 * (len(runs) - 1 - index)}
        _line(loss, run.series("lm_loss", "iteration"), **style)
        if index:
            _line(distance, differences(runs[0], run), **style)
    loss.set(ylabel="loss, nats per token", title=title or ", ".join(run.name for run in runs))
    distance.set(ylabel=f"distance from\n{runs[0].name}", xlabel="iteration")
    distance.set_ylim(bottom=0)
    for axis in (loss, distance):
        axis.grid(alpha=0.3)
    loss.legend(frameon=False)
    save_picture(figure, output, dpi=100)


def _limit_loss_axis(axis: Axes, runs: list[RunMetrics], x: str, references: list[float]) -> None:
    """Fit the loss axis to the values after the first tenth of each run.

    In the first steps the loss falls from the logarithm of the vocabulary size. An axis that showed this fall would
    squeeze all later values into a thin band.
    """
    later = [value for run in runs for key in ("lm_loss", *run.validation_sets())
             for value in [value for _, value in run.series(key, x)][len(run.series(key, x)) // 10:]]
    if later:
        low, high = min([*later, *references]), max([*later, *references])
        margin = 0.05 * (high - low) or 0.1
        axis.set_ylim(low - margin, high + margin)


def _draw_loss(axis: Axes, run: RunMetrics, color: str, x: str, window: int, width: float, *,
               each_step: bool) -> None:
    points = run.series("lm_loss", x)
    window = window or max(1, len(points) // 25)
    label = f"{run.name}: training"
    if window > 1:
        if each_step:
            _line(axis, points, color=color, alpha=0.3, linewidth=0.8, label=f"{label}, each logged step")
        label += f", mean of {window}"
    _line(axis, smooth(points, window), color=color, label=label, linewidth=width)
    for key in run.validation_sets():
        own_name = key.partition("/")[2]
        style = {"linestyle": ":", "marker": "s", "markersize": 4} if own_name else {
            "linestyle": "--", "marker": "o", "markersize": 5}
        _line(axis, run.series(key, x), color=color, markerfacecolor="white",
              linewidth=width, label=f"{run.name}: validation {own_name}".rstrip(), **style)


def _line(axis: Axes, points: list[Point], **style: Any) -> None:
    if points:
        axis.plot(*zip(*points), **{"linewidth": 1.5, "marker": "." if len(points) == 1 else "", **style})


def _reference(text: str) -> tuple[str, float]:
    name, separator, value = text.rpartition("=")
    try:
        if separator and name:
            return name, float(value)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"'{text}' is not NAME=LOSS, for example 'unigram entropy=6.5'")


def build_parser() -> argparse.ArgumentParser:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    group = parser.add_argument_group("input and output")
    group.add_argument("runs", nargs="+", metavar="[NAME=]RUN", help="metrics.jsonl, or the directory that holds it")
    group.add_argument("--output", type=Path, required=True, metavar="FILE.png", help="picture to write")
    group = parser.add_argument_group("picture")
    group.add_argument("--compare", action="store_true",
                       help="draw only the loss over the iterations and its distance from the first run, and print the "
                            "largest distance of each run; only --title goes with it")
    group.add_argument("--x", default="consumed_tokens", choices=("consumed_tokens", "consumed_samples", "iteration"),
                       help="what the horizontal axes show (default: %(default)s)")
    group.add_argument("--log-x", action="store_true",
                       help="make the axis below the loss logarithmic and show the first steps too")
    group.add_argument("--smooth", type=int, default=0, metavar="N",
                       help="draw the training loss as the mean of N points (default: a 25th of the run)")
    group.add_argument("--reference", type=_reference, action="append", default=[], metavar="NAME=LOSS",
                       help="draw a horizontal line at this loss and print it; may be given several times")
    group.add_argument("--title", default="", metavar="TEXT",
                       help="title of the picture (default: the names of the runs)")
    return parser


def main(argv: list[str]) -> None:
    arguments = build_parser().parse_args(argv)
    problems = picture_problems(arguments.output)
    if arguments.smooth < 0:
        problems.append(f"--smooth {arguments.smooth} must be at least 0")
    if arguments.compare and len(arguments.runs) < 2:
        problems.append("--compare needs two runs or more: the first, and those to compare with it")
    if problems:
        raise ConfigError(problems)
    runs = [read_run(argument) for argument in arguments.runs]
    if arguments.compare:
        lines = compared(runs[0], runs[1:])
        draw_comparison(runs, arguments.output, arguments.title)
        print("\n".join([*lines, f"picture: {arguments.output}"]))
        return
    draw(runs, arguments.output, x=arguments.x, log_x=arguments.log_x, window=arguments.smooth,
         references=arguments.reference, title=arguments.title)
    for run in runs:
        print("\n".join(summary(run, arguments.reference)))
    print(f"picture: {arguments.output}")


if __name__ == "__main__":
    run_program(main)
