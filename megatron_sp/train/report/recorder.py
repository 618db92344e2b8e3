"""What a run tells about itself: log lines, metrics.jsonl, TensorBoard, Weights & Biases.

Only rank 0 writes. Values arrive as plain numbers, agreed by all ranks, once per step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_sp.config.schema import Run
from megatron_sp.plan.flops import repeats_of, sequence_flops
from megatron_sp.train.report.metrics_file import MetricsFile
from megatron_sp.train.report.peak_flops import peak_tflops
from megatron_sp.train.report.peak_memory import largest_of_ranks, peak_memory
from megatron_sp.train.report.timers import Timers, gather_times, times_in_words
from megatron_sp.train.report.trackers import open_tensorboard, open_wandb


@dataclass(frozen=True)
class StepReport:
    """One training step, as all ranks agreed on it.

    Attributes:
        iteration, consumed_samples, consumed_tokens: after the step.
        first_sample: global id of the first sample of the batch.
        lm_loss: mean loss per valid token, nats.
        grad_norm: global norm before clipping, without loss scale.
        learning_rate: the rate this step used.
        step_time: seconds, data reading included.
        num_tokens: tokens of the batch (valid or not).
        skipped: no update, because fp16 overflowed.
        nan: no update, because loss or gradient norm was not finite.
        extra: further values for the metrics (params_norm, num_zeros).
    """

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    first_sample: int
    global_batch_size: int
    lm_loss: float
    grad_norm: float
    learning_rate: float
    step_time: float
    num_tokens: int
    loss_scale: float
    skipped: bool = False
    nan: bool = False
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def has_failed(self) -> bool:
        """Whether it changed no weight."""
        return self.skipped or self.nan


@dataclass
class Interval:
    """Sums over the steps since the last log line."""

    steps: int = 0
    updates: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    samples: int = 0
    skipped: int = 0
    nans: int = 0

    def add(self, step: StepReport) -> None:
        self.steps += 1
        self.seconds += step.step_time
        self.samples += step.global_batch_size
        self.skipped += step.skipped
        self.nans += step.nan
        if not step.has_failed:
            self.updates += 1
            self.loss += step.lm_loss


def log_line(step: StepReport, interval: Interval, last_iteration: int, *,
             speed: Mapping[str, float] | None = None) -> str:
    """Megatron's log line. Loss and time are means over the interval, the rest is the last step's.

    Args:
        speed: ``Recorder.speed`` of the interval, for ``--log-throughput``.
    """
    loss = interval.loss / interval.updates if interval.updates else math.nan
    parts = [f" iteration {step.iteration:8d}/{last_iteration:8d}",
             f"consumed samples: {step.consumed_samples:12d}",
             f"elapsed time per iteration (ms): {1000 * interval.seconds / interval.steps:.1f}"]
    if speed:
        parts += [f"throughput per GPU (TFLOP/s/GPU): {speed['tflops_per_device']:.1f}",
                  f"tokens per second: {speed['tokens_per_s']:.0f}"]
        parts += [f"{name.upper()}: {100 * speed[name]:.1f}%" for name in ("mfu", "hfu") if name in speed]
    parts += [f"learning rate: {step.learning_rate:.6E}", f"global batch size: {step.global_batch_size:5d}",
              f"lm loss: {loss:.6E}", f"loss scale: {step.loss_scale:.1f}", f"grad norm: {step.grad_norm:.3f}"]
    parts += [f"{name.replace('_', ' ')}: {value:.3f}" for name, value in step.extra.items()]
    parts += [f"number of skipped iterations: {interval.skipped:3d}", f"number of nan iterations: {interval.nans:3d}"]
    return " | ".join(parts) + " |"


class Recorder:
    """Writes what the trainer reports.

    Args:
        timers: what the trainer and its engine measure; their times are reported with the steps.
        start_iteration: 0 for a fresh run, else where it resumed.
        is_writer: whether this rank writes (rank 0); the others only keep time.
    """

    def __init__(self, run: Run, device: torch.device, timers: Timers, *, start_iteration: int, is_writer: bool):
        self.run, self.device, self.timers, self.is_writer = run, device, timers, is_writer
        self.interval = Interval()
        flops = sequence_flops(run.model, run.data.seq_length)
        self.flops, self.hardware_flops = flops.train(), flops.train(repeats=repeats_of(run))
        self.peak = peak_tflops(run, device)
        self.metrics: MetricsFile | None = None
        self.tensorboard: Any = None
        self.wandb: Any = None
        if is_writer:
            self.metrics = MetricsFile(run.checkpoint.save or ".", start_iteration)
            self.tensorboard = open_tensorboard(run.logging, start_iteration)
            self.wandb = open_wandb(run)

    def say(self, text: str) -> None:
        """Print a line, on rank 0."""
        if self.is_writer:
            print(time.strftime("[%Y-%m-%d %H:%M:%S]") + " " + text, flush=True)

    def step(self, step: StepReport, last_iteration: int, *, at_once: bool = False) -> None:
        """Account for a step; log it when the interval is over, or at once."""
        self.interval.add(step)
        parts = self.timers.end_step()
        is_logged = at_once or step.iteration % self.run.logging.log_interval == 0
        peak = self._peak_memory_when_wanted(step, is_logged)
        self._to_tensorboard_when_due(step, parts, peak)
        if not is_logged:
            return
        interval, self.interval = self.interval, Interval()
        times = gather_times(self.timers.take(interval.steps)) if self.timers.level else {}
        if not self.is_writer:
            return
        shown = self.speed(interval.samples, interval.seconds) if self.run.logging.log_throughput else None
        self.say(log_line(step, interval, last_iteration, speed=shown).lstrip())
        self._write(self._row(step, peak) | self._tell_times(times))

    def flush(self, iteration: int, consumed_samples: int) -> None:
        """At the end of the run: tell the times since the last log line, the last save's among them.

        All ranks call it.
        """
        times = gather_times(self.timers.take(max(self.interval.steps, 1))) if self.timers.level else {}
        if times and self.is_writer:
            told = self._tell_times(times, "times_at_end_ms")      # the last step's row has times of its own
            self._write({"iteration": iteration, "consumed_samples": consumed_samples} | told)
        if self.tensorboard is not None and self.run.logging.log_timers_to_tensorboard:
            self._to_tensorboard(_timer_points(self.timers.latest_occasions()), iteration, consumed_samples)

    def _tell_times(self, times: dict[str, list[float]], key: str = "times_ms") -> dict[str, Any]:
        """Print the times, if there are any; what the row says of them, under this key."""
        if not times:
            return {}
        self.say(times_in_words(times, self.run.logging.timing_log_option))
        return {key: {name: max(values) for name, values in times.items()}}

    def _write(self, row: dict[str, Any]) -> None:
        """One row, to the file and to Weights & Biases."""
        if self.metrics is not None:
            self.metrics.write(row)
        if self.wandb is not None:
            self.wandb.log({key: value for key, value in row.items() if key != "iteration"}, step=row["iteration"])

    def _row(self, step: StepReport, peak: int) -> dict[str, Any]:
        """A step in full precision."""
        return {
            "iteration": step.iteration, "consumed_samples": step.consumed_samples,
            "consumed_tokens": step.consumed_tokens, "lm_loss": step.lm_loss, "grad_norm": step.grad_norm,
            "learning_rate": step.learning_rate, "global_batch_size": step.global_batch_size,
            "step_time_ms": 1000 * step.step_time, **self.speed(step.global_batch_size, step.step_time),
            "loss_scale": step.loss_scale, "skipped": step.skipped, "nan": step.nan,
            "peak_memory_bytes": peak, "first_sample": step.first_sample,
            "last_sample": step.first_sample + step.global_batch_size - 1, **step.extra}

    def _to_tensorboard_when_due(self, step: StepReport, parts: dict[str, float], peak: int) -> None:
        flags = self.run.logging
        if self.tensorboard is None or step.iteration % flags.tensorboard_log_interval:
            return
        points = {"lm loss": step.lm_loss, "learning-rate": step.learning_rate, "grad-norm": step.grad_norm,
                  "batch-size": step.global_batch_size, "iteration-time": step.step_time,
                  "skipped": float(step.skipped), "nan": float(step.nan), "consumed-tokens": step.consumed_tokens}
        points |= {name if "/" in name else name.replace("_", "-"): value for name, value in step.extra.items()}
        if flags.log_loss_scale_to_tensorboard:
            points["loss-scale"] = step.loss_scale
        if flags.log_memory_to_tensorboard:
            points["peak-memory-bytes"] = peak
        if flags.log_world_size_to_tensorboard:
            points["world-size"] = self.run.parallel.world_size
        if flags.log_throughput:
            points |= {("throughput" if name == "tflops_per_device" else name.replace("_", "-")): value for name, value
                       in self.speed(step.global_batch_size, step.step_time).items()}
        if flags.log_timers_to_tensorboard:
            points |= _timer_points(parts | self.timers.latest_occasions())
        self._to_tensorboard(points, step.iteration, step.consumed_samples)

    def _to_tensorboard(self, points: dict[str, float], iteration: int, consumed_samples: int) -> None:
        for name, value in points.items():
            self.tensorboard.add_scalar(name, value, iteration)
            self.tensorboard.add_scalar(f"{name} vs samples", value, consumed_samples)

    def evaluation(self, losses: dict[str, float], iteration: int, consumed_samples: int,
                   consumed_tokens: int) -> None:
        """Record mean losses of evaluations, by data set name (``valid``, ``test``, ``valid/NAME``)."""
        row: dict[str, Any] = {"iteration": iteration, "consumed_samples": consumed_samples,
                               "consumed_tokens": consumed_tokens}
        for name, loss in losses.items():
            perplexity = perplexity_of(loss)
            kind, slash, own_name = name.partition("/")
            long_name = {"valid": "validation"}.get(kind, kind) + (f" {own_name}" if slash else "")
            self.say(f"{long_name} loss at iteration {iteration} | lm loss value: {loss:.6E} | "
                     f"lm loss PPL: {perplexity:.6E} |")
            row |= {f"{kind}_loss{slash}{own_name}": loss, f"{kind}_ppl{slash}{own_name}": perplexity}
            if self.tensorboard is not None:
                points = {f"lm loss {long_name}": loss}
                if self.run.logging.log_validation_ppl_to_tensorboard:
                    points[f"lm loss {long_name} ppl"] = perplexity
                self._to_tensorboard(points, iteration, consumed_samples)
        self._write(row)

    def progress(self, text: str) -> None:
        """Append a line to SAVE/progress.txt (``--log-progress``)."""
        if self.is_writer and self.run.logging.log_progress and self.run.checkpoint.save:
            with (Path(self.run.checkpoint.save) / "progress.txt").open("a") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\t{self.run.parallel.world_size} ranks\t{text}\n")

    def speed(self, samples: int, seconds: float) -> dict[str, float]:
        """Tokens/s of the whole run, model TFLOP/s of each device, and shares of the device's peak where it is known.

        ``tflops_per_device`` and ``mfu``: forward and backward, causal half, no recomputation counted;
        ``hfu``: with recomputation.
        """
        per_device = samples / seconds / self.run.parallel.world_size / 1e12
        speed = {"tokens_per_s": samples * self.run.data.seq_length / seconds,
                 "tflops_per_device": self.flops * per_device}
        if self.peak:
            speed |= {"mfu": self.flops * per_device / self.peak, "hfu": self.hardware_flops * per_device / self.peak}
        return speed

    def _peak_memory_when_wanted(self, step: StepReport, is_logged: bool) -> int:
        """The largest rank's peak where this step is to tell it, else 0; a collective then, which all ranks make."""
        flags = self.run.logging
        is_drawn = (bool(flags.tensorboard_dir) and flags.log_memory_to_tensorboard
                    and step.iteration % flags.tensorboard_log_interval == 0)
        return largest_of_ranks(peak_memory(self.device), self.device) if is_logged or is_drawn else 0

    def close(self, *, failed: bool = False) -> None:
        for sink in (self.metrics, self.tensorboard):
            if sink is not None:
                sink.close()
        if self.wandb is not None:
            self.wandb.finish(exit_code=int(failed))


def _timer_points(seconds: dict[str, float]) -> dict[str, float]:
    return {f"{name}-time": value for name, value in seconds.items()}


def perplexity_of(loss: float) -> float:
    """exp(loss), at most exp(20): an untrained model's would overflow a plot."""
    return math.exp(min(loss, 20.0))
