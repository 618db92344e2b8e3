"""Write the reports of a run: log lines, metrics.jsonl, TensorBoard, Weights & Biases.

Only rank 0 writes. The trainer passes plain numbers, which are equal on all ranks, once per step.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_sp.config.schema import Run
from megatron_sp.plan.flops import repeats_of, sequence_flops
from megatron_sp.train.checkpoints.state import TrainState
from megatron_sp.train.report.metrics_file import MetricsFile
from megatron_sp.train.report.peak_flops import peak_tflops
from megatron_sp.train.report.peak_memory import largest_of_ranks, peak_memory
from megatron_sp.train.report.step_report import Interval, StepReport, log_line
from megatron_sp.train.report.timers import Timers, gather_times, times_in_words
from megatron_sp.train.report.trackers import TensorBoard, open_tensorboard, open_wandb


class Recorder:
    """Writes what the trainer reports. Ranks other than the writer only keep time.

    A file that can no longer be written (full disk) does not end the training: the log warns once, training goes on.

    Args:
        run: the resolved configuration.
        device: the rank's device, whose peak memory is reported.
        timers: the timers with which trainer and engine measure; their times are reported with the steps.
        state: the counters at the start; iteration 0 means a new run.
        is_writer: whether this rank writes (rank 0).

    Raises:
        ConfigError: a file or directory cannot be written at the start.
    """

    def __init__(self, run: Run, device: torch.device, timers: Timers, state: TrainState, *, is_writer: bool):
        self.run, self.device, self.timers, self.is_writer = run, device, timers, is_writer
        self.interval = Interval()
        self._last_step: StepReport | None = None
        self._failed_files: set[str] = set()
        self.seq_length = run.data.seq_length
        self.flops, self.repeats = sequence_flops(run.model, run.data.seq_length), repeats_of(run)
        self.peak = peak_tflops(run, device)
        self.metrics: MetricsFile | None = None
        self.tensorboard: TensorBoard | None = None
        self.wandb: Any = None
        if is_writer:
            self.metrics = _open_metrics(run, state)
            self.tensorboard = open_tensorboard(run, state)
            self.wandb = open_wandb(run, state)
            for note in self.metrics.notes if self.metrics is not None else ():
                self.say(note)

    def enter_phase(self, run: Run) -> None:
        """From now on compute FLOPs and speed for the sequences of a phase, of which ``run`` is the configuration."""
        self.seq_length = run.data.seq_length
        self.flops, self.repeats = sequence_flops(run.model, run.data.seq_length), repeats_of(run)

    def say(self, text: str, *, on_any_rank: bool = False) -> None:
        """Print a line. Output that cannot be written, such as a log on a full disk, is lost.

        Args:
            on_any_rank: print also on ranks other than the writer.
        """
        if self.is_writer or on_any_rank:
            with contextlib.suppress(OSError):
                print(time.strftime("[%Y-%m-%d %H:%M:%S]") + " " + text, flush=True)

    def step(self, step: StepReport, last_iteration: int, *, is_last: bool = False) -> None:
        """Add a step to the interval. Log the interval when it is over, and after the first and the last step."""
        self.interval.add(step)
        self._last_step = step
        parts = self.timers.end_step()
        is_logged = is_last or step.iteration == 1 or step.iteration % self.run.logging.log_interval == 0
        peak = self._peak_memory_when_wanted(step, is_logged)
        self._to_tensorboard_when_due(step, parts, peak)
        if is_logged:
            self._log(step, last_iteration, peak)

    def _log(self, step: StepReport, last_iteration: int, peak: int) -> None:
        """Write the log line and the metrics of the interval that ends with this step. All ranks call it."""
        interval, self.interval = self.interval, Interval()
        times = gather_times(self.timers.take(interval.steps)) if self.timers.level else {}
        if not self.is_writer:
            return
        speed = self.speed(interval.samples, interval.seconds, interval.attention_share)
        self.say(log_line(step, interval, last_iteration,
                          speed=speed if self.run.logging.log_throughput else None).lstrip())
        means = {"mean_over_steps": interval.steps, "mean_lm_loss": interval.mean_loss,
                 "mean_step_time_ms": 1000 * interval.mean_seconds,
                 **{f"mean_{name}": value for name, value in speed.items()}}
        self._write(self._row(step, peak) | means | self._report_times(times))

    def flush(self, iteration: int, consumed_samples: int, last_iteration: int) -> None:
        """Log at the end of the run what is not logged yet: steps, and the times since the last log line.

        Steps can be left because a signal that comes during an evaluation ends the run after a step that was not known
        to be the last. The times include the last save. All ranks call it.
        """
        if self.interval.steps and self._last_step is not None:
            self._log(self._last_step, last_iteration, self._peak_memory())
        times = gather_times(self.timers.take(max(self.interval.steps, 1))) if self.timers.level else {}
        if times and self.is_writer:
            # Another key than the last step's row uses, because both rows have the same iteration.
            row_times = self._report_times(times, "times_at_end_ms")
            self._write({"iteration": iteration, "consumed_samples": consumed_samples} | row_times)
        if self.run.logging.log_timers_to_tensorboard:
            self._to_tensorboard(_timer_points(self.timers.latest_occasions()), iteration, consumed_samples)

    def _report_times(self, times: dict[str, list[float]], key: str = "times_ms") -> dict[str, Any]:
        """Print the times, if there are any, and return the slowest rank's as an entry for a row of metrics.jsonl.

        Args:
            key: name of the entry.
        """
        if not times:
            return {}
        self.say(times_in_words(times, self.run.logging.timing_log_option))
        return {key: {name: max(values) for name, values in times.items()}}

    def _write(self, row: dict[str, Any]) -> None:
        """Write one row to metrics.jsonl and to Weights & Biases."""
        if self.metrics is not None:
            with self._surviving_errors(str(self.metrics.path)):
                self.metrics.write(row)
        if self.wandb is not None:
            with self._surviving_errors("Weights & Biases's directory"):
                self.wandb.log({key: value for key, value in row.items() if key != "iteration"}, step=row["iteration"])

    @contextlib.contextmanager
    def _surviving_errors(self, name: str) -> Iterator[None]:
        """Turn an error of writing within the block into a warning, once for each file, so that training goes on."""
        try:
            yield
        except OSError as error:
            if name not in self._failed_files:
                self._failed_files.add(name)
                self.say(f"WARNING: {name} cannot be written ({error.strerror or error}). Training goes on, but "
                         "what should be written there is lost; free space or give write permission")

    def _row(self, step: StepReport, peak: int) -> dict[str, Any]:
        """Return the row of metrics.jsonl for a step, with numbers in full precision."""
        return {
            "iteration": step.iteration, "consumed_samples": step.consumed_samples,
            "consumed_tokens": step.consumed_tokens, "lm_loss": step.lm_loss, "grad_norm": step.grad_norm,
            "learning_rate": step.learning_rate, "global_batch_size": step.global_batch_size,
            "step_time_ms": 1000 * step.step_time,
            **self.speed(step.global_batch_size, step.step_time, step.attention_share),
            "loss_scale": step.loss_scale, "skipped": step.skipped, "nan": step.nan, "valid_tokens": step.num_valid,
            "peak_memory_bytes": peak, "first_sample": step.first_sample,
            "last_sample": step.first_sample + step.global_batch_size - 1,
            **({"seq_length": step.seq_length} if step.seq_length else {}), **step.extra}

    def _to_tensorboard_when_due(self, step: StepReport, parts: dict[str, float], peak: int) -> None:
        flags = self.run.logging
        if self.tensorboard is None or step.iteration % flags.tensorboard_log_interval:
            return
        loss = {} if step.lacks_labels else {"lm loss": step.lm_loss}
        points = {**loss, "learning-rate": step.learning_rate, "grad-norm": step.grad_norm,
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
                       in self.speed(step.global_batch_size, step.step_time, step.attention_share).items()}
        if flags.log_timers_to_tensorboard:
            points |= _timer_points(parts | self.timers.latest_occasions())
        self._to_tensorboard(points, step.iteration, step.consumed_samples)

    def _to_tensorboard(self, points: dict[str, float], iteration: int, consumed_samples: int) -> None:
        if self.tensorboard is None:
            return
        with self._surviving_errors(f"--tensorboard-dir {self.run.logging.tensorboard_dir}"):
            self.tensorboard.add(points, iteration, consumed_samples)

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
            points = {f"lm loss {long_name}": loss}
            if self.run.logging.log_validation_ppl_to_tensorboard:
                points[f"lm loss {long_name} ppl"] = perplexity
            self._to_tensorboard(points, iteration, consumed_samples)
        self._write(row)

    def progress(self, text: str) -> None:
        """Append a line to SAVE/progress.txt (``--log-progress``)."""
        if self.is_writer and self.run.logging.log_progress and self.run.checkpoint.save:
            path, world = Path(self.run.checkpoint.save) / "progress.txt", self.run.parallel.world_size
            with self._surviving_errors(str(path)), path.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\t{world} rank{'s' * (world > 1)}\t{text}\n")

    def speed(self, samples: int, seconds: float, attention_share: float = 1.0) -> dict[str, float]:
        """Return tokens/s of the whole run, TFLOP/s of each device and, where the device's peak is known, MFU and HFU.

        ``tflops_per_device`` and ``mfu`` count forward and backward, the causal half of attention, and no
        recomputation. ``hfu`` counts recomputation, too.

        Args:
            attention_share: work of attention, relative to sequences of one document each.
        """
        flops = replace(self.flops, attention=self.flops.attention * attention_share)
        per_device = samples / seconds / self.run.parallel.world_size / 1e12
        speed = {"tokens_per_s": samples * self.seq_length / seconds,
                 "tflops_per_device": flops.train() * per_device}
        if self.peak:
            speed |= {"mfu": flops.train() * per_device / self.peak,
                      "hfu": flops.train(repeats=self.repeats) * per_device / self.peak}
        return speed

    def _peak_memory_when_wanted(self, step: StepReport, is_logged: bool) -> int:
        """Return the largest peak memory of all ranks when this step is logged or plotted, else 0.

        The maximum is a collective. So all ranks decide from the same flags and counters whether to compute it.
        """
        flags = self.run.logging
        is_drawn = (bool(flags.tensorboard_dir) and flags.log_memory_to_tensorboard
                    and step.iteration % flags.tensorboard_log_interval == 0)
        return self._peak_memory() if is_logged or is_drawn else 0

    def _peak_memory(self) -> int:
        return largest_of_ranks(peak_memory(self.device), self.device)

    def close(self, *, failed: bool = False) -> None:
        """Close all files.

        Args:
            failed: whether the run ends with an error, for Weights & Biases.
        """
        for file in (self.metrics, self.tensorboard):
            if file is not None:
                with self._surviving_errors("a metrics file"):
                    file.close()
        if self.wandb is not None:
            self.wandb.finish(exit_code=int(failed))


def _open_metrics(run: Run, state: TrainState) -> MetricsFile | None:
    """Open metrics.jsonl in ``--save``; return None without ``--save``.

    A run continues the file only when it saves into the directory it loads from. In any other directory the file
    belongs to another run.
    """
    save, load = run.checkpoint.save, run.checkpoint.load
    if not save:
        return None
    if run.train.skip_train:
        return MetricsFile.append_to(save)
    if state.iteration and Path(load).resolve() == Path(save).resolve():
        return MetricsFile.resume(save, state.iteration)
    return MetricsFile.start_new(save)


def _timer_points(seconds: dict[str, float]) -> dict[str, float]:
    return {f"{name}-time": value for name, value in seconds.items()}


def perplexity_of(loss: float) -> float:
    """Return exp(loss), but at most exp(20), because the perplexity of a diverged model would overflow."""
    return math.exp(min(loss, 20.0))
