"""Resume from ``--load``: fill model and optimizer, and compare the checkpoint's flags with the command line's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_sp.checkpoint import compare
from megatron_sp.checkpoint.state_file import read_part
from megatron_sp.checkpoint.tokenizer_files import tokenizer_differences
from megatron_sp.config.schema import Run
from megatron_sp.config.serialize import to_dict
from megatron_sp.errors import CheckpointError
from megatron_sp.train.schedule import Schedule

#: Flags that determine the samples of a batch and of the run. The schedule counts in samples, so it depends on them.
_LENGTHS = ("train.train_iters", "train.train_samples", "train.global_batch_size", "train.rampup_batch_size",
            "train.step_batch_size_schedule", "data.seq_length")
_WARMUP = ("schedule.lr_warmup_iters", "schedule.lr_warmup_samples", "schedule.lr_warmup_tokens",
           "schedule.lr_warmup_fraction")
_DECAY = ("schedule.lr_decay_iters", "schedule.lr_decay_samples", "schedule.lr_decay_tokens")
_WEIGHT_DECAY = ("optimizer.weight_decay",)

#: Flags whose default is the length of the run -> the field of ``Train`` that holds this length.
_FOLLOWS = {"schedule.lr_decay_iters": "train_iters", "schedule.lr_decay_samples": "train_samples"}

#: Field of ``Schedule`` -> its name in messages, and the flags that it is computed from.
SOURCES: dict[str, tuple[str, tuple[str, ...]]] = {
    "style": ("shape of the decay", ("schedule.lr_decay_style",)),
    "peak": ("peak learning rate", ("schedule.lr",)),
    "minimum": ("smallest learning rate", ("schedule.min_lr",)),
    "warmup_start": ("learning rate at the start of the warm-up", ("schedule.lr_warmup_init",)),
    "warmup_samples": ("samples of warm-up", (*_WARMUP, *_DECAY, *_LENGTHS)),
    "decay_samples": ("samples of warm-up and decay", (*_DECAY, *_LENGTHS)),
    "final_style": ("shape of the final decay", ("schedule.lr_wsd_decay_style",)),
    "final_samples": ("samples of the final decay",
                      ("schedule.lr_wsd_decay_iters", "schedule.lr_wsd_decay_samples", *_DECAY, *_LENGTHS)),
    "weight_decay_style": ("shape of the weight decay's change", ("optimizer.weight_decay_incr_style",)),
    "weight_decay_start": ("first weight decay", ("optimizer.start_weight_decay", *_WEIGHT_DECAY)),
    "weight_decay_end": ("last weight decay", ("optimizer.end_weight_decay", *_WEIGHT_DECAY)),
    "weight_decay_samples": ("samples over which the weight decay changes", _LENGTHS),
}


def load(run: Run, model: Any, optimizer: Any) -> tuple[dict[str, Any] | None, bool]:
    """Fill model and optimizer from ``--load``; without a checkpoint there, fill the model from another source.

    The other sources are ``--pretrained-checkpoint`` and ``--load-hf``, which give weights only. The optimizer is also
    left as it is in a run that only evaluates, and with a flag that asks for a fresh optimizer.

    Returns:
        the content of the checkpoint's ``state.json``, or None when there is no checkpoint of this program; and
        whether only weights are used, so that the run starts at iteration 0

    Raises:
        CheckpointError: the checkpoint is damaged or holds another model, or there is none and
            ``--exit-on-missing-checkpoint``, ``--ckpt-step`` or ``--pretrained-checkpoint`` requires one.
    """
    from megatron_sp.checkpoint.store import load_checkpoint

    flags = run.checkpoint
    with_optimizer = flags.load_optimizer and not flags.finetune and not run.train.skip_train
    saved = load_checkpoint(flags.load, model, optimizer if with_optimizer else None, run,
                            iteration=flags.ckpt_step or None) if flags.load else None
    if saved is None and flags.load and flags.exit_on_missing_checkpoint:
        raise CheckpointError(f"--load {flags.load} holds no checkpoint and "
                              "--exit-on-missing-checkpoint is given; name a directory that has one")
    if saved is None and flags.load_hf:
        _load_hugging_face(run, model)
        return None, True
    if saved is not None or not flags.pretrained_checkpoint:
        return saved, flags.finetune
    saved = load_checkpoint(flags.pretrained_checkpoint, model, None, run)
    if saved is None:
        raise CheckpointError(f"--pretrained-checkpoint {flags.pretrained_checkpoint} holds no checkpoint; name a "
                              "directory that has one, or leave the flag out")
    return saved, True


def _load_hugging_face(run: Run, model: Any) -> None:
    """Fill the model from the directory of ``--load-hf``."""
    import torch.distributed as dist

    from megatron_sp.convert.fill import fill_model
    from megatron_sp.convert.hugging_face import weights_of

    directory = run.checkpoint.load_hf
    fill_model(model, run.model, lambda: weights_of(directory, run.model), f"--load-hf {directory}",
               shows=dist.get_rank() == 0)


def resume_notes(run: Run, saved: dict[str, Any] | None, weights_only: bool) -> list[str]:
    """Return lines for the log: where the run starts, and a warning for each difference from the checkpoint."""
    flags = run.checkpoint
    if saved is None and flags.load_hf:
        return [f"loaded the weights of --load-hf {flags.load_hf}; starting at iteration 0"]
    if saved is None:
        return [f"WARNING: --load {flags.load} holds no checkpoint; starting afresh"]
    if weights_only:
        return [f"loaded the weights of iteration {saved['iteration']} from "
                f"{flags.load if flags.finetune else flags.pretrained_checkpoint}; starting at iteration 0 with a "
                "fresh optimizer and schedule", *(f"WARNING: {note}" for note in saved["notes"]),
                *(f"WARNING: {line}" for line in tokenizer_differences(run.data, Path(saved["path"])))]
    fresh = "" if flags.load_optimizer or run.train.skip_train else " with a fresh optimizer (--no-load-optim)"
    differences = [*compare.differences_in_words(saved["config"], run),
                   *tokenizer_differences(run.data, Path(saved["path"]))]
    return [f"resumed from {flags.load} at iteration {saved['iteration']}{fresh}",
            *(f"WARNING: {note}" for note in saved["notes"]), *(f"WARNING: {line}" for line in differences)]


def choose_schedule(schedule: Schedule, saved: dict[str, Any], run: Run) -> Schedule:
    """Return the schedule for the rest of the training: the command line's or, if a flag asks for it, the checkpoint's.

    Args:
        schedule: the schedule of the command line.
        saved: the content of the checkpoint's ``state.json``.

    Raises:
        CheckpointError: the two schedules differ, and no flag says which one to use.
    """
    if not saved["schedule"]:      # a checkpoint converted from another system has no schedule
        return schedule
    theirs, flags = read_part(saved, "schedule", Schedule.from_dict), run.schedule
    if flags.use_checkpoint_opt_param_scheduler:
        return theirs
    fields = schedule.differences(theirs)
    if not fields or flags.override_opt_param_scheduler:
        return schedule
    listed = "; ".join(_difference(name, schedule, theirs, saved["config"], run) for name in fields)
    raise CheckpointError(
        f"--load {run.checkpoint.load} was trained with another schedule: {listed}. Give the checkpoint's flags, or "
        "--override-opt_param-scheduler (Megatron's spelling) to use the command line's schedule, or "
        "--use-checkpoint-opt_param-scheduler to use the checkpoint's")


def _difference(name: str, mine: Schedule, theirs: Schedule, saved: dict[str, Any], run: Run) -> str:
    """Return a clause on one field in which the schedules differ: both values, each with the flags that cause it."""
    what, keys = SOURCES[name]
    sides = _flag_values(to_dict(run), keys), _flag_values(saved, keys)
    causes = [key for key in keys if sides[0][key] != sides[1][key]]
    sides_in_words = []
    for values, schedule, place in zip(sides, (mine, theirs), ("here", "in the checkpoint")):
        flags = ", ".join(_flag_in_words(key, values[key]) for key in causes)
        value = getattr(schedule, name)
        # No flags are named where something else causes the difference, such as the number of ranks.
        sides_in_words.append((f"{value:g}" if isinstance(value, float) else str(value)) + f" {place}"
                              + (f" ({flags})" if flags else ""))
    return f"the {what} {'are' if what.startswith('samples') else 'is'} {' and '.join(sides_in_words)}"


def _flag_values(config: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """Return the values of these flags in a configuration that was read from JSON.

    A decay length that equals the run's length counts as 0, "not given", because that is its default.
    """
    values = {}
    for key in keys:
        section, field = key.split(".")
        values[key] = compare.as_json(config.get(section, {}).get(field, 0))
        length = _FOLLOWS.get(key)
        if length and values[key] == config.get("train", {}).get(length):
            values[key] = 0
    return values


def _flag_in_words(key: str, value: Any) -> str:
    flag = compare.flag_name(*key.split("."))
    return f"{flag} {compare.value_in_words(value)}" if value not in (0, "", [], -1.0) else f"no {flag}"
