"""Read ``state.json``: the counters, configuration, schedule and loss scale of a checkpoint. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from megatron_sp.checkpoint.files import (
    FORMAT,
    MANIFEST,
    STATE,
    DamagedCheckpoint,
    FoundCheckpoint,
    choices,
    describe_damage,
    find_candidates,
    read_json,
    read_manifest,
)
from megatron_sp.config.cli.options import sections
from megatron_sp.errors import CheckpointError

T = TypeVar("T")

#: Name and type of each entry that every state.json has at its top level. Messages call such an entry a part.
_PARTS: dict[str, type | tuple[type, ...]] = {
    "iteration": int, "vocab_size": int, "optimizer": (str, type(None)), "config": dict, "train": dict,
    "schedule": dict, "loss_scaler": dict}

#: Entries of the part ``train`` that must be there: a resumed run would count from 0 without them.
_COUNTERS = ("iteration", "consumed_samples", "consumed_tokens", "scheduler_samples")


def read_state(path: Path) -> dict[str, Any]:
    """Return the content of ``state.json`` of a checkpoint directory.

    Raises:
        DamagedCheckpoint: the file or the manifest is damaged or lacks a part.
        CheckpointError: it cannot be read, or was written by a newer version.
    """
    manifest = read_manifest(path)
    if STATE not in manifest:
        raise DamagedCheckpoint(f"{path / MANIFEST} is damaged: it does not list {STATE}")
    if damage := describe_damage(path / STATE, manifest[STATE]):
        raise DamagedCheckpoint(damage)
    state = read_json(path / STATE)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(f"{path / STATE} has format {found!r}; this version reads format {FORMAT}")
    if problems := _problems(state, read_json(path / MANIFEST)["iteration"]):
        raise DamagedCheckpoint(f"{path / STATE} {'; '.join(problems)}. Another version or another program wrote it; "
                              f"{choices(path.parent)}")
    _add_missing_dynamic(state)
    return state


def read_newest_state(directory: Path, iteration: int | None = None) -> tuple[FoundCheckpoint, dict[str, Any]] | None:
    """Return the checkpoint to load whose ``state.json`` is whole, and the content of that file; None without any.

    Raises:
        CheckpointError: no such file is whole, or that of the checkpoint which the user named is not.
    """
    damages = []
    for found in find_candidates(directory, iteration):
        try:
            return found, read_state(found.path)
        except DamagedCheckpoint as error:
            damages.append(str(error))
    if damages:
        raise CheckpointError(f"{'; '.join(damages)}. There is no other checkpoint to fall back to")
    return None


def _problems(state: dict[str, Any], iteration: int) -> list[str]:
    """Return a message for each part of a state that is missing, or has a wrong type or value.

    Args:
        iteration: the iteration that the manifest names.
    """
    problems = [f"lacks the part {name!r}" for name in _PARTS if name not in state]
    problems += [f"has the part {name!r} of type {type(state[name]).__name__}" for name, kind in _PARTS.items()
                 if name in state and (not isinstance(state[name], kind) or isinstance(state[name], bool))]
    if problems:
        return problems
    for name in sections():
        if not isinstance(state["config"].get(name, {}), dict):
            problems.append(f"has the part 'config.{name}' of type {type(state['config'][name]).__name__}")
    problems += [f"lacks the part 'config.{name}'" for name in ("model", "data", "train", "precision")
                 if name not in state["config"]]
    for name in _COUNTERS:
        if name not in state["train"]:
            problems.append(f"lacks the part 'train.{name}'")
        elif type(state["train"][name]) is not int or state["train"][name] < 0:
            problems.append(f"has {state['train'][name]!r} as 'train.{name}', not a count")
    for name, value in (("iteration", state["iteration"]), ("train.iteration", state["train"].get("iteration"))):
        if not problems and value != iteration:
            problems.append(f"has {name} {value} in the checkpoint of iteration {iteration}")
    return problems


def _add_missing_dynamic(state: dict[str, Any]) -> None:
    """Add ``loss_scaler.dynamic`` to a state that an older version wrote without it.

    A bf16 run stores a constant scale of 1. Without ``dynamic``, an fp16 run that resumes from it would take this 1 for
    a dynamic scale and continue from 1 instead of --initial-loss-scale.
    """
    precision = state["config"]["precision"]
    state["loss_scaler"].setdefault("dynamic", bool(precision.get("fp16") and not precision.get("loss_scale")))


def read_part(state: dict[str, Any], name: str, parse: Callable[[dict[str, Any]], T]) -> T:
    """Return one part of a state, parsed.

    Raises:
        CheckpointError: the part lacks an entry that ``parse`` reads, or holds one of a wrong type.
    """
    try:
        return parse(state[name])
    except KeyError as error:
        reason = f"lacks {error}"
    except (TypeError, ValueError) as error:
        reason = str(error)
    raise CheckpointError(f"cannot use the part {name!r} of the {STATE} of iteration {state['iteration']}: {reason}. "
                          "Another version or another program wrote it; choose another checkpoint")
