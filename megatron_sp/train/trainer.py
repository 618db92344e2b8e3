"""The training loop: steps, evaluations and checkpoints.

All ranks run the same loop. They take every decision (skip, stop, save) from the result of one reduction per step, so
they always agree.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from megatron_sp.config.schema import Run
from megatron_sp.data.batch import BatchReader, Readers
from megatron_sp.errors import TrainingError
from megatron_sp.layout.batch_size import BatchSize
from megatron_sp.layout.length_schedule import Phase
from megatron_sp.progress import progress_bar
from megatron_sp.train.checkpoints.saving import Checkpoints
from megatron_sp.train.checkpoints.state import TrainState
from megatron_sp.train.forward_backward import build_engine
from megatron_sp.train.garbage import GarbageCollection
from megatron_sp.train.health.diagnose import describe_failure
from megatron_sp.train.health.failures import Failures
from megatron_sp.train.health.replicas import check_replicas
from megatron_sp.train.length_phases import farewell, note_in_state, phase_in_words, run_of_phase
from megatron_sp.train.report.optimizer_states import optimizer_statistics
from megatron_sp.train.report.profile import StepProfiler
from megatron_sp.train.report.recorder import Recorder
from megatron_sp.train.report.step_report import StepReport
from megatron_sp.train.signals import StopSignals
from megatron_sp.train.train_step import StepTotals, TrainStep


class MeanLoss(NamedTuple):
    """Mean loss per valid token of a data set, NaN when it has none; and the number of valid tokens."""

    loss: float
    num_valid: int


class Trainer:
    """Trains a model that is set up (see ``setup.build_trainer``).

    Args:
        run: the resolved configuration.
        step: runs one training step; holds model, optimizer and schedule.
        readers: readers of the data sets.
        state: the counters of the run so far; every step updates them.
        recorder: writes log and metrics.
        signals: remembers the signals that this process received.
        started: ``time.monotonic()`` at the program's start, for ``--exit-duration-in-mins``.
        readers_of: builds the readers of another phase of ``--seq-length-schedule``.
    """

    def __init__(self, run: Run, step: TrainStep, readers: Readers, state: TrainState, recorder: Recorder,
                 signals: StopSignals, *, started: float, readers_of: Callable[[Phase], Readers] | None = None):
        self.readers_of = readers_of
        self.phase: Phase | None = None
        self.run, self.step, self.readers, self.state = run, step, readers, state
        self.recorder, self.signals, self.started = recorder, signals, started
        self.mesh, self.model = step.mesh, step.model
        self.failures = Failures(run, step.scaler, state)
        self.garbage = GarbageCollection(run.train.manual_gc, run.train.manual_gc_interval)
        self.profiler = StepProfiler(run, self.mesh.global_rank, self.mesh.device)
        self.batch_size = BatchSize.of(run)
        self.last_iteration = run.train.train_iters or state.iteration + self.batch_size.iterations(
            state.consumed_samples, run.train.train_samples)
        self.checkpoints = Checkpoints(run, self.model, step.optimizer, self.mesh, state, recorder)
        self.stop_reason = ""
        self._sets_without_labels: set[str] = set()

    # ---------------------------------------------------------------- the loop

    def fit(self) -> None:
        """Train until the last iteration, or until a signal or a time limit ends the run; evaluate and save in between.

        Raises:
            TrainingError: loss or gradients are not finite, copies of weights differ, or too many steps in a row fail.
        """
        with self.garbage.disabled_while_training():
            self._fit()

    def _fit(self) -> None:
        self.stop_reason = self._asked_to_stop()
        if self.is_finished() and not self.run.train.skip_train:
            self.recorder.say(f"nothing to train: iteration {self.state.iteration} of {self.last_iteration} is "
                              "reached; to train longer give a larger --train-iters and --override-opt_param-scheduler "
                              "(Megatron's spelling)")
        while not self.stop_reason and not self.is_finished():
            self.profiler.before_step(self.state.iteration + 1)
            step = self.train_step()
            self._say_if_any(self.profiler.after_step(self.state.iteration), on_any_rank=True)
            error = self.failures.reason_to_end() if step.has_failed else ""
            ends = bool(error or self.stop_reason) or self.is_finished() or self._is_due(
                self.run.train.exit_interval) or self._phase_ends()
            self.recorder.step(step, self.last_iteration, is_last=ends)
            if error:
                self._give_up(error)
            self.checkpoints.after_step()
            if self._is_due(self.run.train.check_replicas):
                with self.recorder.timers("check-replicas", occasional=True):
                    check_replicas(self.model, self.mesh, self.state.iteration, self.step.optimizer)
            self.garbage.after_step(self.state.iteration)
            if self.is_finished():
                break
            if not self.stop_reason and self._is_due(self.run.train.eval_interval):
                self.evaluate("valid")
            if self._is_due(self.run.checkpoint.save_interval):
                self.save(is_last=bool(self.stop_reason) or self._is_due(self.run.train.exit_interval))
            if not self.stop_reason and self._is_due(self.run.train.exit_interval):
                self.stop_reason = f"--exit-interval {self.run.train.exit_interval}"
            if not self.stop_reason and self._phase_ends():
                self._go_on_after_phase()
        self._say_if_any(self.profiler.finish(self.state.iteration), on_any_rank=True)
        self.save(is_last=True)
        if not self.stop_reason:
            self.evaluate("valid", "test")
        self.recorder.flush(self.state.iteration, self.state.consumed_samples, self.last_iteration)
        self._say_if_any(self.failures.warning_at_end())
        if self.stop_reason:
            self.recorder.say(f"exiting at iteration {self.state.iteration}: {self.stop_reason}")

    def is_finished(self) -> bool:
        """Return whether the iterations, samples or tokens of the run are used up, or the run only evaluates."""
        train = self.run.train
        used_up = 0 < train.train_tokens <= self.state.consumed_tokens
        return train.skip_train or used_up or self.state.iteration >= self.last_iteration

    def _say_if_any(self, text: str, *, on_any_rank: bool = False) -> None:
        if text:
            self.recorder.say(text, on_any_rank=on_any_rank)

    def _is_due(self, interval: int) -> bool:
        return interval > 0 and self.state.iteration % interval == 0

    def _asked_to_stop(self) -> str:
        """Return a reason to stop when any rank received a signal before the first step, else ""."""
        asked = self.mesh.sum_over(torch.tensor(float(bool(self.signals))), "world")
        return self._signal_in_words() if asked else ""

    def _signal_in_words(self) -> str:
        return f"asked to by {self.signals.received or 'a signal to another rank'}"

    # ---------------------------------------------------------------- phases of --seq-length-schedule

    def enter(self, phase: Phase | None) -> None:
        """Begin a phase, whose readers are in place: compute and report sequences of its length."""
        self.phase = phase
        if phase is None:
            return
        note_in_state(self.state, phase)
        run = run_of_phase(self.run, phase)
        self.step = replace(self.step, engine=build_engine(run, self.model, self.mesh, self.recorder.timers))
        self.recorder.enter_phase(run)
        self.recorder.say(phase_in_words(self.run, phase))

    def _phase_ends(self) -> bool:
        return self.phase is not None and self.state.consumed_samples == self.phase.stop

    def _go_on_after_phase(self) -> None:
        """Save a checkpoint, then begin the next phase, or stop where the run is for one phase only."""
        assert self.phase is not None and self.readers_of is not None and self.phase.stop is not None
        if self.run.data.seq_length_phase:
            self.stop_reason = farewell(self.run, self.phase)
            return
        self.save(is_last=False)
        following = Phase.of(self.run, self.phase.number + 1, self.phase.stop)
        for reader in self.readers.all():
            reader.close()
        self.readers = self.readers_of(following)
        self.enter(following)

    @property
    def _sequences_per_sample(self) -> int:
        """Return how many sequences a sample is; the counters count samples."""
        return 1 if self.phase is None else self.phase.parts

    # ---------------------------------------------------------------- one step

    def train_step(self) -> StepReport:
        """Read a global batch, compute its gradients and update the weights once."""
        start, state, timers = time.perf_counter(), self.state, self.recorder.timers
        samples, parts = self.batch_size.at(state.consumed_samples), self._sequences_per_sample
        first, count = state.consumed_samples * parts, samples * parts      # sequences of this phase
        with timers("batch"):
            assert self.readers.train is not None
            # Each holds this rank's s/sp tokens, in host memory that is pinned for a GPU.
            local = self.readers.train.read(first, count, self.run.train.micro_batch_size)
        totals, learning_rate = self.step.train(local, state.scheduler_samples, self._stop_votes,
                                                lambda totals: self._note_failure(totals, first, count))
        state.advance(samples, samples * self.run.data.seq_length, updated=totals.allows_update,
                      failed=not totals.is_finite)
        self._note_stop(totals)
        dynamic = self.step.scaler.dynamic
        return StepReport(
            iteration=state.iteration, consumed_samples=state.consumed_samples,
            consumed_tokens=state.consumed_tokens, first_sample=first, global_batch_size=count,
            seq_length=0 if self.phase is None else self.phase.length,
            lm_loss=totals.loss, grad_norm=totals.grad_norm, learning_rate=learning_rate,
            step_time=time.perf_counter() - start, num_valid=totals.num_valid, loss_scale=totals.loss_scale,
            skipped=not totals.is_finite and dynamic, nan=not totals.is_finite and not dynamic,
            extra=self._extra(totals), attention_share=totals.attention_share)

    def _note_failure(self, totals: StepTotals, first: int, count: int) -> None:
        """Count a step that updates no weight, and say why; ``first``, ``count``: the sequences of its batch."""
        if not totals.is_finite:
            self._say_if_any(self.failures.count_failed_step(
                totals.loss, totals.grad_norm,
                lambda: describe_failure(self.model, self.step.engine.microbatch_losses)))
        elif not totals.has_labels:
            self._say_if_any(self.failures.count_unlabelled_step(first, count))

    def _give_up(self, error: str) -> NoReturn:
        """End the run with an error on all ranks.

        After a series of failed steps a checkpoint is saved first, because it holds the counters of these steps.
        """
        if self.failures.tolerated:
            self.save(is_last=True)
        raise TrainingError(error)

    def _stop_votes(self) -> tuple[float, float, float]:
        """Return three numbers, 1 or 0: this rank received a signal, the time of --exit-duration-in-mins is over, and a
        save in the background has failed.
        """
        limit = 60 * self.run.train.exit_duration_in_mins
        return (float(bool(self.signals)), float(0 < limit < time.monotonic() - self.started),
                self.checkpoints.vote())

    def _note_stop(self, totals: StepTotals) -> None:
        stop, out_of_time, save_failed = totals.votes
        if save_failed:
            self.checkpoints.give_up()
        if stop:
            self.stop_reason = self._signal_in_words()
        elif out_of_time:
            self.stop_reason = f"the time of --exit-duration-in-mins {self.run.train.exit_duration_in_mins:g} is over"

    def _extra(self, totals: StepTotals) -> dict[str, float]:
        extra = {}
        if self.run.logging.log_num_zeros_in_grad:
            extra["num_zeros"] = totals.num_zeros
        if self.run.logging.log_params_norm:
            extra["params_norm"] = totals.params_norm
        logging = self.run.logging
        if logging.log_optimizer_states_to_tensorboard and self._is_due(logging.tensorboard_log_interval):
            extra |= optimizer_statistics(self.model, self.step.optimizer, self.mesh)
        return extra

    # ---------------------------------------------------------------- between steps

    def evaluate(self, *names: str) -> None:
        """Record the mean loss of data sets, each on its first ``--eval-iters`` global batches.

        With named validation sets, the loss of ``valid`` is the mean of their losses. A set without any valid label has
        no loss and is left out of this mean. When a signal comes, the evaluation ends and records nothing.

        Args:
            names: "valid", "test" or both.
        """
        losses: dict[str, float] = {}
        with self.garbage.around_evaluation():
            for name in names:
                if name == "valid" and self.readers.named_valid:
                    found = self._mean_losses({f"valid/{own}": r for own, r in self.readers.named_valid.items()})
                    labelled = [mean.loss for mean in found.values() if mean.num_valid]
                    losses["valid"] = sum(labelled) / len(labelled) if labelled else math.nan
                else:
                    reader = getattr(self.readers, name)
                    found = self._mean_losses({name: reader} if reader is not None else {})
                losses |= {key: mean.loss for key, mean in found.items()}
                if self.stop_reason:
                    return
        if losses:
            state = self.state
            self.recorder.evaluation(losses, state.iteration, state.consumed_samples, state.consumed_tokens)

    def _mean_losses(self, readers: dict[str, BatchReader]) -> dict[str, MeanLoss]:
        """Return the mean loss of each of these sets. A signal ends the loop, and the remaining sets are missing."""
        found: dict[str, MeanLoss] = {}
        for name, reader in readers.items():
            if self.stop_reason:
                break
            with self.recorder.timers("evaluation", occasional=True):
                found[name] = self._mean_loss(name, reader)
            if not found[name].num_valid and not self.stop_reason and name not in self._sets_without_labels:
                self._sets_without_labels.add(name)
                self.recorder.say(f"WARNING: no token of the {name} set's {self.run.train.eval_iters} batches has a "
                                  "label, so it has no loss; its text is too short or --eod-mask-loss masks all of it")
        return found

    def _mean_loss(self, name: str, reader: BatchReader) -> MeanLoss:
        """Return the mean loss of one set. When any rank receives a signal, set ``stop_reason`` and end early."""
        train, device = self.run.train, self.mesh.device
        totals = torch.zeros(3, dtype=torch.float64, device=device)
        hidden = None if self.recorder.is_writer else True       # None: shown on a terminal only
        size = self.batch_size.last * self._sequences_per_sample
        for index in progress_bar(range(train.eval_iters), desc=f"evaluating ({name})", leave=False, disable=hidden):
            batches = reader.read(index * size, size, train.micro_batch_size)
            loss_sum, num_valid = self.step.engine.evaluate([batch.to(device) for batch in batches])
            # The sum over all ranks must count each loss once. All tp ranks of the last stage have the same loss, and
            # all tp and pp ranks that read the same tokens have the same number of valid tokens.
            tp, pp = self.mesh.size("tp"), self.mesh.size("pp")
            share = torch.tensor([0.0, num_valid / (tp * pp), bool(self.signals)], dtype=torch.float64, device=device)
            share[0] = loss_sum / tp
            totals += self.mesh.sum_over(share, "world")
            if totals[2] > 0:
                self.stop_reason = self._signal_in_words()
                break
        loss_sum, num_valid, _ = totals.tolist()
        return MeanLoss(loss_sum / num_valid if num_valid else math.nan, round(num_valid))

    def save(self, *, is_last: bool) -> None:
        """Save a checkpoint, if the run has ``--save`` and has not saved this iteration yet.

        Args:
            is_last: whether training ends here, so that nothing may be left to a save in the background.
        """
        self.checkpoints.save({"train": self.state.to_dict(), "seed": self.run.train.seed,
                               "schedule": self.step.schedule.to_dict(), "loss_scaler": self.step.scaler.state_dict()},
                              is_last=is_last)

    def close(self) -> None:
        """Wait for all ranks, then stop the readers' threads and close the logs."""
        dist.barrier()
        for reader in self.readers.all():
            reader.close()
        self.recorder.close()

    def abandon(self) -> None:
        """Write profile and logs after an error. Do not wait for other ranks, which may have ended; raise nothing."""
        with contextlib.suppress(Exception):
            self._say_if_any(self.profiler.finish(self.state.iteration))
        self.checkpoints.abandon()
        with contextlib.suppress(Exception):
            self.recorder.close(failed=True)
