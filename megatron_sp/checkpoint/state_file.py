"""Read ``state.json``: the counters, configuration, schedule and loss scale of a checkpoint. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from megatron_sp.checkpoint.files import FORMAT, MANIFEST, STATE, choices, damage, read_json, read_manifest
from megatron_sp.config.cli.options import sections
from megatron_sp.errors import CheckpointError

T = TypeVar("T")

#: What every state.json holds: name and type of each part.
_PARTS: dict[str, type | tuple[type, ...]] = {
    "iteration": int, "vocab_size": int, "optimizer": (str, type(None)), "config": dict, "train": dict,
    "schedule": dict, "loss_scaler": dict}

#: Entries of the part ``train`` without which a resumed run would count from 0.
_COUNTERS = ("iteration", "consumed_samples", "consumed_tokens", "scheduler_samples")


def read_state(path: Path) -> dict[str, Any]:
    """Read the plain state of a checkpoint directory.

    Raises:
        CheckpointError: damaged, unreadable, written by a newer version, or without one of its parts.
    """
    manifest = read_manifest(path)
    if STATE not in manifest:
        raise CheckpointError(f"{path / MANIFEST} is damaged: it does not list {STATE}; {choices(path.parent)}")
    if harm := damage(path / STATE, manifest[STATE]):
        raise CheckpointError(f"{harm}; {choices(path.parent)}")
    state = read_json(path / STATE)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(f"{path / STATE} has format {found!r}; this version reads format {FORMAT}")
    if problems := _problems(state, read_json(path / MANIFEST)["iteration"]):
        raise CheckpointError(f"{path / STATE} {'; '.join(problems)}. Another version or another program wrote it; "
                              f"{choices(path.parent)}")
    _say_whether_scale_was_dynamic(state)
    return state


def _problems(state: dict[str, Any], iteration: int) -> list[str]:
    """Everything that is wrong with the parts of a state."""
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


def _say_whether_scale_was_dynamic(state: dict[str, Any]) -> None:
    """Add ``loss_scaler.dynamic`` to states of versions that did not write it.

    A bf16 run stores a constant scale of 1. Without this an fp16 run would take it for a dynamic scale and continue
    from 1 instead of --initial-loss-scale.
    """
    precision = state["config"]["precision"]
    state["loss_scaler"].setdefault("dynamic", bool(precision.get("fp16") and not precision.get("loss_scale")))


def read_part(state: dict[str, Any], name: str, parse: Callable[[dict[str, Any]], T]) -> T:
    """Parse one part of a state; what the parser misses becomes an error for the user.

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
