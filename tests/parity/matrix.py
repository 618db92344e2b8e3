"""The matrix of layouts: every axis with every other one, chosen so that all pairs of values meet.

A layout is one value on each of the ``AXES``. ``allowed`` says which combinations exist; ``chosen`` picks a
small number of them that together hold nearly every pair of values that can meet; ``sample`` draws any
number of them.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from functools import cache

from tests.helpers.configs import Case

#: The values of each axis. ``micro_batch`` decides the accumulation: 8 sequences make 8 / (micro_batch x dp)
#: microbatches. ``extra_layers`` makes the layers of pipeline stages uneven.
AXES: dict[str, tuple[object, ...]] = {
    "tp": (1, 2), "pp": (1, 2, 4), "ulysses": (1, 2, 4), "ring": (1, 2), "dp": (1, 2), "zero": (0, 1, 2, 3),
    "schedule": ("none", "1f1b", "interleaved", "zero-bubble", "zero-bubble, 2 stages", "zbv", "dualpipev"),
    "megatron_sp": (False, True), "micro_batch": (1, 2, 4), "recompute": (False, True), "tied": (False, True),
    "kv_heads": (8, 2, 1), "style": ("llama", "gpt"), "extra_layers": (0, 1),
    "masked": ("nothing", "eod", "late half", "ragged"), "exchange": ("memory", "sockets", "overlapped"),
}
EXCHANGE = {"memory": "", "sockets": " --no-shared-memory", "overlapped": " --ulysses-overlap-groups 2"}
Layout = tuple[object, ...]
Pair = tuple[tuple[int, object], ...]

STAGES_PER_RANK = {"none": 1, "1f1b": 1, "zero-bubble": 1}  # of the others: 2
#: How many layouts are drawn to choose among, per world size.
CANDIDATES = {2: 150, 4: 400, 8: 250}
SIZE = "--hidden-size 32 --num-attention-heads 8 --seq-length 32 --global-batch-size 8 " \
       "--make-vocab-size-divisible-by 6"
STYLE = {"llama": "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
                  "--ffn-hidden-size 48",
         "gpt": "--ffn-hidden-size 64"}


def values(layout: Layout) -> dict[str, object]:
    """The layout by axis."""
    return dict(zip(AXES, layout))


def world_size(layout: Layout) -> int:
    at = values(layout)
    return at["tp"] * at["pp"] * at["ulysses"] * at["ring"] * at["dp"]  # type: ignore[operator,no-any-return]


def allowed(layout: Layout) -> bool:
    """Whether the layout exists, needs at most 8 ranks, and says nothing that has no effect."""
    at = values(layout)
    pp, schedule = int(str(at["pp"])), str(at["schedule"])
    number = 8 // (int(str(at["micro_batch"])) * int(str(at["dp"])))
    if not 2 <= world_size(layout) <= 8 or (pp > 1) == (schedule == "none"):
        return False
    if at["megatron_sp"] and at["tp"] == 1 or at["extra_layers"] and pp == 1:
        return False
    tp, ulysses, ring, dp = (int(str(at[axis])) for axis in ("tp", "ulysses", "ring", "dp"))
    if at["exchange"] == "sockets" and ulysses * ring * dp == 1 or at["exchange"] == "overlapped" and (
            ulysses == 1 or ring > 1 or 8 // tp < 2 * ulysses):
        return False
    split_backward = schedule not in ("none", "1f1b", "interleaved")
    if split_backward and (at["zero"] == 3 or at["recompute"]):
        return False
    if schedule.split(",")[0] in ("interleaved", "zero-bubble") and number % max(1, number // pp):
        return False
    return schedule != "dualpipev" or number >= 2 * pp


def case(layout: Layout) -> Case:
    """The layout as flags."""
    at = values(layout)
    schedule, pp = str(at["schedule"]), int(str(at["pp"]))
    stages = pp * STAGES_PER_RANK.get(schedule, 2)
    layers = max(2, stages) + int(str(at["extra_layers"]))
    words = [f"--tensor-model-parallel-size {at['tp']} --pipeline-model-parallel-size {pp} --ulysses-size "
             f"{at['ulysses']} --ring-size {at['ring']} --zero-stage {at['zero']} --micro-batch-size "
             f"{at['micro_batch']}"]
    if pp > 1:
        words.append(f"--pipeline-schedule {schedule.split(',')[0]} --num-virtual-stages-per-pipeline-rank "
                     f"{stages // pp}")
    words[0] += EXCHANGE[str(at["exchange"])]
    words += ["--sequence-parallel"] if at["megatron_sp"] else []
    words += ["--recompute-granularity full"] if at["recompute"] else []
    model = f"{STYLE[str(at['style'])]} {SIZE} --num-layers {layers} --num-key-value-heads {at['kv_heads']}"
    model += "" if at["tied"] else " --untie-embeddings-and-output-weights"
    return Case(name(layout), world_size(layout), " ".join(words), "none", model, str(at["masked"]))


def name(layout: Layout) -> str:
    """A short description, for messages."""
    at = values(layout)
    degrees = [f"{axis} {at[axis]}" for axis in ("tp", "pp", "ulysses", "ring", "dp") if at[axis] != 1]
    words = [axis.replace("_", " ") for axis in ("megatron_sp", "recompute", "tied") if at[axis]]
    words += [str(at["schedule"])] if at["pp"] != 1 else []
    words += ["an extra layer"] if at["extra_layers"] else []
    return ", ".join([*degrees, f"zero {at['zero']}", *words, f"micro-batch {at['micro_batch']}", str(at["style"]),
                      f"{at['kv_heads']} of 8 kv heads", f"{at['masked']} masked", str(at["exchange"])])


def draw(generator: random.Random, world: int | None = None) -> Layout:
    """A random allowed layout, with ``world`` ranks if that is given."""
    while True:
        at = {axis: generator.choice(options) for axis, options in AXES.items()}
        if at["pp"] == 1:
            at["schedule"], at["extra_layers"] = "none", 0
        layout = tuple(at.values())
        if allowed(layout) and world in (None, world_size(layout)):
            return layout


def layout_of(seed: int) -> Layout:
    """A random allowed layout."""
    return draw(random.Random(seed))


def sample(count: int, seed: int) -> list[Case]:
    """``count`` different layouts at random."""
    generator, found = random.Random(seed), dict[Layout, None]()
    while len(found) < count:
        found[draw(generator)] = None
    return [case(layout) for layout in found]


def pairs(layout: Layout) -> Iterator[Pair]:
    """All pairs of values that meet in a layout."""
    return itertools.combinations(enumerate(layout), 2)


@cache
def chosen() -> tuple[Layout, ...]:
    """10 layouts of 8 ranks, 30 of 4 and 10 of 2, picked one by one for the pairs of values met least so far."""
    generator, met = random.Random(4), Counter[Pair]()
    picked: list[Layout] = []
    for world, count in ((8, 10), (4, 30), (2, 10)):
        pool = list(dict.fromkeys(draw(generator, world) for _ in range(CANDIDATES[world])))
        for _ in range(count):
            best = max(pool, key=lambda layout: sum(0.25 ** met[pair] for pair in pairs(layout)))
            pool.remove(best)
            met.update(pairs(best))
            picked.append(best)
    return tuple(picked)
