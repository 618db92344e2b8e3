"""Rules about the learning rate and the weight decay over the run."""

from __future__ import annotations

from megatron_sp.config.schema import Run


def check_schedule(run: Run) -> list[str]:
    """Units, exclusions and order of warm-up and decay."""
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
    """A run counts in iterations or in samples; its schedule does the same. Tokens go with both."""
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


def _warmup_is_shorter(run: Run) -> list[str]:
    """The warm-up ends before the decay does (constant rates have no decay to end)."""
    schedule = run.schedule
    if schedule.lr_decay_style == "constant":
        return []
    batch, length = run.train.global_batch_size, run.data.seq_length
    warmups = (("--lr-warmup-tokens", schedule.lr_warmup_tokens, 1),
               ("--lr-warmup-samples", schedule.lr_warmup_samples, length),
               ("--lr-warmup-iters", schedule.lr_warmup_iters, batch * length))
    decays = (("--lr-decay-tokens", schedule.lr_decay_tokens, 1),
              ("--lr-decay-samples", schedule.lr_decay_samples, length),
              ("--lr-decay-iters", schedule.lr_decay_iters, batch * length))
    warmup = next((entry for entry in warmups if entry[1]), None)
    decay = next((entry for entry in decays if entry[1]), None)
    if warmup is None or decay is None or warmup[1] * warmup[2] < decay[1] * decay[2]:
        return []
    return [f"{warmup[0]} {warmup[1]} must be less than the decay horizon {decay[0]} {decay[1]}"
            f"{'' if warmup[2] == decay[2] else ' (converted by batch size and sequence length)'}."]


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
    found = []
    for flag, horizon in (("iters", schedule.lr_decay_iters), ("samples", schedule.lr_decay_samples)):
        value = given[f"--lr-wsd-decay-{flag}"]
        if value and horizon and value > horizon:
            found.append(f"--lr-wsd-decay-{flag} {value} is above the decay horizon --lr-decay-{flag} {horizon}.")
    return found


def check_weight_decay(run: Run) -> list[str]:
    """A constant weight decay has no start and end of its own."""
    optimizer = run.optimizer
    if optimizer.weight_decay_incr_style != "constant":
        return []
    ends = {"--start-weight-decay": optimizer.start_weight_decay, "--end-weight-decay": optimizer.end_weight_decay}
    return [f"{flag} {value:g} needs --weight-decay-incr-style linear or cosine." for flag, value in ends.items()
            if value != optimizer.weight_decay]
