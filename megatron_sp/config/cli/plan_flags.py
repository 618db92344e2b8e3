"""The flags of ``pretrain_gpt.py --dry-run``.

They steer the program, not the run, so they are no fields of the schema.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_sp.config.cli.options import normalise
from megatron_sp.config.cli.values import parse_int, strip_quotes
from megatron_sp.errors import ConfigError

#: Flag -> (what its value is called in the help, "" for a switch; help).
PLAN_FLAGS: dict[str, tuple[str, str]] = {
    "--dry-run": ("", "Print layout, batch, work, communication, memory and step time of the run, and exit. Needs no "
                     "GPU, data, tokenizer, checkpoint or package of a tracker."),
    "--world-size": ("N", "Number of processes to plan for (default: the launcher's or WORLD_SIZE, else as many as "
                            "one copy of the model needs). Needs --dry-run."),
    "--device": ("NAME", "Device to plan for, such as A100-80 or H200 (default: H100). Needs --dry-run."),
    "--json": ("", "Print the plan as JSON. Needs --dry-run."),
}


@dataclass(frozen=True)
class PlanFlags:
    """What to plan for.

    Attributes:
        world_size: number of processes; 0 for the launcher's.
        device: name of the device; "" for the default.
        json: print JSON instead of text.
    """

    world_size: int = 0
    device: str = ""
    json: bool = False


def split_plan_flags(argv: Sequence[str]) -> tuple[PlanFlags | None, list[str]]:
    """Split the arguments into the flags of a plan (None without ``--dry-run``) and the flags of the run.

    Raises:
        ConfigError: a flag of a plan has no value or a wrong one, or stands without ``--dry-run``.
    """
    given: dict[str, str] = {}
    rest: list[str] = []
    problems: list[str] = []
    words = iter(argv)
    for word in words:
        written, equals, value = word.partition("=")
        name = normalise(written) if written.startswith("--") else ""
        if name not in PLAN_FLAGS:
            rest.append(word)
            continue
        if PLAN_FLAGS[name][0] and not equals:
            value = next(words, "")
        given[name] = strip_quotes(value)
        if PLAN_FLAGS[name][0] and not given[name]:
            problems.append(f"{name} needs a value.")
    if "--dry-run" not in given:
        problems += [f"{name} needs --dry-run: it says what to plan for." for name in given]
    size = 0
    if given.get("--world-size"):
        try:
            size = parse_int(given["--world-size"])
        except ValueError as error:
            problems.append(f"--world-size: {error}.")
        else:
            problems += [f"--world-size {size}: must be at least 1."] if size < 1 else []
    if problems:
        raise ConfigError(problems)
    if "--dry-run" not in given:
        return None, rest
    return PlanFlags(size, given.get("--device", ""), "--json" in given), rest
