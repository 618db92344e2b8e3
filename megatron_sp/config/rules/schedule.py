"""Rules about the learning rate and the weight decay over the run."""

from __future__ import annotations

from megatron_sp.config.rules.sizes import check_batch
from megatron_sp.config.schema import Run
from megatron_sp.layout.batch_size import BatchSize


def check_schedule(run: Run) -> list[str]:
    """Return problems of the learning rate: mixed units, contradicting flags, lengths that do not fit."""
    schedule = run.schedule
    found = (_units(run) or _warmup_is_shorter(run)) + _wsd(run)
    if schedule.lr and schedule.min_lr > schedule.lr:
        found.append(f"--min-lr {schedule.min_lr:g} is above --lr {schedule.lr:g}.")
    if schedule.lr and schedule.lr_warmup_init > schedule.lr:
        found.append(f"--lr-warmup-init {schedule.lr_warmup_init:g} is above --lr {schedule.lr:g}.")
    if schedule.override_opt_param_scheduler and schedule.use_checkpoint_opt_param_scheduler:
        found.append("--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other; keep "
                     "one.")
    return found


def _units(run: Run) -> list[str]:
    """Return flags whose unit is not that of the run (iterations or samples); flags in tokens go with both."""
    schedule, train = run.schedule, run.train
    if train.train_iters:
        mode, other = "--train-iters", "iters"
        foreign = {"--lr-decay-samples": schedule.lr_decay_samples, "--lr-warmup-samples": schedule.lr_warmup_samples,
                   "--lr-wsd-decay-samples": schedule.lr_wsd_decay_samples}
    else:
        mode, other = "--train-samples", "samples"
        foreign = {"--lr-decay-iters": schedule.lr_decay_iters, "--lr-warmup-iters": schedule.lr_warmup_iters,
                   "--lr-wsd-decay-iters": schedule.lr_wsd_decay_iters}
        if not train.train_samples:
            foreign = {}
    found = [f"{flag} {value} does not go with {mode}; use {flag.rpartition('-')[0]}-{other}."
             for flag, value in foreign.items() if value]
    counts = {"--lr-warmup-iters": schedule.lr_warmup_iters, "--lr-warmup-samples": schedule.lr_warmup_samples,
              "--lr-warmup-tokens": schedule.lr_warmup_tokens}
    if schedule.lr_warmup_fraction:
        found += [f"--lr-warmup-fraction {schedule.lr_warmup_fraction:g} and {flag} {value} exclude each other; keep "
                  f"one." for flag, value in counts.items() if value]
    return found


def _length(run: Run, *kinds: tuple[str, int]) -> tuple[str, int, float] | None:
    """Return the first length that is given: flag, value, and the value in tokens."""
    per_unit = {"tokens": 1, "samples": run.data.seq_length, "iters": run.data.seq_length * run.train.global_batch_size}
    return next(((flag, value, value * per_unit[flag.rpartition("-")[2]]) for flag, value in kinds if value), None)


def _warmup(run: Run) -> tuple[str, int, float] | None:
    schedule = run.schedule
    return _length(run, ("--lr-warmup-tokens", schedule.lr_warmup_tokens),
                   ("--lr-warmup-samples", schedule.lr_warmup_samples), ("--lr-warmup-iters", schedule.lr_warmup_iters))


def _horizon(run: Run) -> tuple[str, int, float] | None:
    schedule = run.schedule
    return _length(run, ("--lr-decay-tokens", schedule.lr_decay_tokens),
                   ("--lr-decay-samples", schedule.lr_decay_samples), ("--lr-decay-iters", schedule.lr_decay_iters))


def _converted(first: str, second: str) -> str:
    same = first.rpartition("-")[2] == second.rpartition("-")[2]
    return "" if same else " (converted by batch size and sequence length)"


def _warmup_is_shorter(run: Run) -> list[str]:
    """Return a problem where the warm-up does not end before the decay does; constant rates have no decay.

    A horizon in tokens may be shorter, as in Megatron-DeepSpeed; ``horizon_notes`` says what follows.
    """
    warmup, decay = _warmup(run), _horizon(run)
    if run.schedule.lr_decay_style == "constant" or warmup is None or decay is None or warmup[2] < decay[2] or (
            run.schedule.lr_decay_tokens):
        return []
    return [f"{warmup[0]} {warmup[1]} must be less than the decay horizon {decay[0]} {decay[1]}"
            f"{_converted(warmup[0], decay[0])}."]


def _wsd(run: Run) -> list[str]:
    schedule = run.schedule
    given = {"--lr-wsd-decay-iters": schedule.lr_wsd_decay_iters,
             "--lr-wsd-decay-samples": schedule.lr_wsd_decay_samples}
    used = {flag: value for flag, value in given.items() if value}
    if schedule.lr_decay_style != "WSD":
        return [f"{flag} {value} needs --lr-decay-style WSD." for flag, value in used.items()]
    if len(used) != 1:
        unit = "samples" if run.train.train_samples else "iters"
        return [f"--lr-wsd-decay-{unit} is required with --lr-decay-style WSD."] if not used else [
            "--lr-wsd-decay-iters and --lr-wsd-decay-samples exclude each other; keep one."]
    return _wsd_fits(run, *next(iter(used.items())))


def _wsd_fits(run: Run, flag: str, value: int) -> list[str]:
    """Return a problem where warm-up and final decay overlap within the horizon, so that the rate would jump."""
    final, decay, warmup = _length(run, (flag, value)), _horizon(run), _warmup(run)
    if final is None or decay is None:
        return []
    if final[2] > decay[2]:
        return [f"{flag} {value} is above the decay horizon {decay[0]} {decay[1]}{_converted(flag, decay[0])}."]
    share = run.schedule.lr_warmup_fraction
    rising = share * decay[2] if share else warmup[2] if warmup else 0.0
    if final[2] + rising <= decay[2]:
        return []
    name = f"--lr-warmup-fraction {share:g}" if share or warmup is None else f"{warmup[0]} {warmup[1]}"
    return [f"{name} and {flag} {value} overlap: together they are more than the decay horizon {decay[0]} "
            f"{decay[1]}{_converted(flag, decay[0])}, and the learning rate would jump; lower one of them."]


def check_weight_decay(run: Run) -> list[str]:
    """Return a problem where a constant weight decay is given a start or an end."""
    optimizer = run.optimizer
    if optimizer.weight_decay_incr_style != "constant":
        return []
    ends = {"--start-weight-decay": optimizer.start_weight_decay, "--end-weight-decay": optimizer.end_weight_decay}
    return [f"{flag} {value:g} needs --weight-decay-incr-style linear or cosine." for flag, value in ends.items()
            if value != optimizer.weight_decay]


def horizon_notes(run: Run) -> list[str]:
    """Return notes on a decay that ends with the warm-up, and on iterations that mean fewer samples than in Megatron.
    """
    warmup, decay = _warmup(run), _horizon(run)
    if run.schedule.lr_decay_tokens and warmup and decay and warmup[2] >= decay[2] and (
            run.schedule.lr_decay_style != "constant"):
        return [f"{decay[0]} {decay[1]} are over before the warm-up of {warmup[0]} {warmup[1]} is: the learning rate "
                f"falls to --min-lr {run.schedule.min_lr:g} right after the warm-up, as in Megatron-DeepSpeed. Is a "
                "factor missing?"]
    iterations, train = run.schedule.lr_decay_iters, run.train
    if not iterations or iterations == train.train_iters or not train.step_batch_size_schedule:
        return []
    if check_batch(run):
        return []      # ``check_batch`` reports the batch sizes
    batch = BatchSize.of(run)
    here, there = batch.samples(iterations), iterations * batch.last
    return [] if here == there else [
        f"--lr-decay-iters {iterations} is {here} samples, by the batch size that each iteration has. Megatron counts "
        f"every iteration with the last batch size: {there} samples. For that horizon say --train-samples and "
        f"--lr-decay-samples {there}."]
