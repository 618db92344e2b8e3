"""The matrix of layouts: combinations of all axes in which nearly every pair of values occurs.

A layout has one value on each of the ``AXES``. ``allowed`` says which combinations are valid. ``chosen`` picks a small
number of layouts in which nearly every possible pair of values occurs. ``sample`` draws any number of layouts at
random. ``of_size`` makes layouts with a group of any size on one axis, such as 3, 7 or 12 ranks.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from functools import cache

from tests.helpers.configs import Case

#: The values of each axis. A global batch has 8 sequences, so ``micro_batch`` sets the gradient accumulation too: there
#: are 8 / (micro_batch x dp) microbatches. With ``extra_layers`` the pipeline stages have unequal numbers of layers.
AXES: dict[str, tuple[object, ...]] = {
    "tp": (1, 2), "pp": (1, 2, 4), "ulysses": (1, 2, 4), "ring": (1, 2), "dp": (1, 2), "zero": (0, 1, 2, 3),
    "schedule": ("none", "1f1b", "interleaved", "zero-bubble", "zero-bubble, 2 stages", "zbv", "dualpipev"),
    "megatron_sp": (False, True), "micro_batch": (1, 2, 4), "recompute": (False, True), "tied": (False, True),
    "kv_heads": (8, 2, 1), "style": ("llama", "gpt"), "extra_layers": (0, 1),
    "masked": ("nothing", "eod", "late half", "ragged"), "exchange": ("collectives", "memory", "overlapped"),
    "chunks": (1, 4),
    "documents": ("joined", "by index", "by eod"),
    "attention": ("to all", "in a window", "in windows and to all", "in blocks"),
    "dropout": ("none", "of hidden states", "of both"),
}
#: The flags that separate documents, in each way; they change what is computed, in one process too.
DOCUMENTS = {"joined": "", "by index": " --reset-position-ids --reset-attention-mask",
             "by eod": " --reset-position-ids --reset-attention-mask --document-boundaries eod"}
#: The flags that say which earlier tokens a token attends to. In windows and to all: every second layer has no window.
#: In blocks: layers and heads differ. Windows and blocks end inside a chunk, inside a document and inside the tokens of
#: a rank, and one window is longer than a chunk.
ATTENTION = {"to all": "", "in a window": " --window-size 5", "in windows and to all":
             " --window-size 11 --window-attn-skip-freq 2", "in blocks":
             " --attention-pattern-per-layer bigbird strided --attention-block-size 3 --attention-local-blocks 2 "
             "--attention-stride 3 --attention-blocks-by-head"}
#: The flags of dropout. Two different probabilities show when one is used in the place of the other.
DROPOUT = {"none": "", "of hidden states": " --hidden-dropout 0.1",
           "of both": " --hidden-dropout 0.1 --attention-dropout 0.2"}
#: The flags of each way to exchange tensors: through collectives, as on GPUs; through memory that CPU ranks share; and
#: through collectives that overlap with computation.
EXCHANGE = {"collectives": " --no-shared-memory", "memory": "", "overlapped":
            " --no-shared-memory --ulysses-overlap-groups 2"}
#: The flag that sets each axis of ``of_size``. Data parallelism has none: its size follows from the number of ranks.
SIZED_AXES = {"tp": "--tensor-model-parallel-size", "pp": "--pipeline-model-parallel-size", "ulysses": "--ulysses-size",
              "ring": "--ring-size", "dp": ""}
SIZES = (3, 4, 5, 6, 7, 8, 9, 10, 12)
Layout = tuple[object, ...]
Pair = tuple[tuple[int, object], ...]

STAGES_PER_RANK = {"none": 1, "1f1b": 1, "zero-bubble": 1}  # all other schedules: 2
#: For each number of ranks, how many random layouts ``chosen`` picks from.
CANDIDATES = {2: 300, 4: 800, 8: 500}
SIZE = "--hidden-size 32 --num-attention-heads 8 --seq-length 32 --global-batch-size 8 " \
       "--make-vocab-size-divisible-by 6"
STYLE = {"llama": "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
                  "--ffn-hidden-size 48 --rope-scaling-type yarn --original-max-position-embeddings 16",
         "gpt": "--ffn-hidden-size 64"}


def values(layout: Layout) -> dict[str, object]:
    """Return the value of a layout on each axis, by the name of the axis."""
    return dict(zip(AXES, layout))


def world_size(layout: Layout) -> int:
    at = values(layout)
    return at["tp"] * at["pp"] * at["ulysses"] * at["ring"] * at["dp"]  # type: ignore[operator,no-any-return]


def allowed(layout: Layout) -> bool:
    """Return whether a layout is valid, needs 2 to 8 ranks, and sets no axis that has no effect."""
    at = values(layout)
    pp, schedule = int(str(at["pp"])), str(at["schedule"])
    number = 8 // (int(str(at["micro_batch"])) * int(str(at["dp"])))
    if not 2 <= world_size(layout) <= 8 or (pp > 1) == (schedule == "none"):
        return False
    if at["megatron_sp"] and at["tp"] == 1 or at["extra_layers"] and pp == 1:
        return False
    tp, ulysses, ring, dp = (int(str(at[axis])) for axis in ("tp", "ulysses", "ring", "dp"))
    if at["exchange"] == "memory" and ulysses * ring * dp == 1 or at["exchange"] == "overlapped" and (
            ulysses == 1 or ring > 1 or 8 // tp < 2 * ulysses):
        return False
    if at["chunks"] != 1 and (ring > 1 or schedule not in ("none", "1f1b")):
        return False
    if (at["attention"] == "in blocks" or at["dropout"] == "of both") and ring > 1:
        return False
    split_backward = schedule not in ("none", "1f1b", "interleaved")
    if split_backward and (at["zero"] == 3 or at["recompute"]):
        return False
    if schedule.split(",")[0] in ("interleaved", "zero-bubble") and number % max(1, number // pp):
        return False
    return schedule != "dualpipev" or number >= 2 * pp


def case(layout: Layout) -> Case:
    """Return the case, with flags, that tests a layout."""
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
    words += ["--sequence-chunk-size 8"] if at["chunks"] != 1 else []
    model = f"{STYLE[str(at['style'])]} {SIZE} --num-layers {layers} --num-key-value-heads {at['kv_heads']}"
    model += "" if at["tied"] else " --untie-embeddings-and-output-weights"
    model += DOCUMENTS[str(at["documents"])] + ATTENTION[str(at["attention"])] + DROPOUT[str(at["dropout"])]
    return Case(name(layout), world_size(layout), " ".join(words), "none", model, str(at["masked"]))


def name(layout: Layout) -> str:
    """Return a short description of a layout, for messages."""
    at = values(layout)
    degrees = [f"{axis} {at[axis]}" for axis in ("tp", "pp", "ulysses", "ring", "dp") if at[axis] != 1]
    words = [axis.replace("_", " ") for axis in ("megatron_sp", "recompute", "tied") if at[axis]]
    words += [f"{at['chunks']} chunks"] if at["chunks"] != 1 else []
    words += [str(at["schedule"])] if at["pp"] != 1 else []
    words += ["an extra layer"] if at["extra_layers"] else []
    return ", ".join([*degrees, f"zero {at['zero']}", *words, f"micro-batch {at['micro_batch']}", str(at["style"]),
                      f"{at['kv_heads']} of 8 kv heads", f"{at['masked']} masked", str(at["exchange"]),
                      f"documents {at['documents']}", f"attention {at['attention']}", f"dropout {at['dropout']}"])


def draw(generator: random.Random, world: int | None = None) -> Layout:
    """Draw a random allowed layout, with ``world`` ranks if that is given."""
    while True:
        at = {axis: generator.choice(options) for axis, options in AXES.items()}
        if at["pp"] == 1:
            at["schedule"], at["extra_layers"] = "none", 0
        layout = tuple(at.values())
        if allowed(layout) and world in (None, world_size(layout)):
            return layout


def layout_of(seed: int) -> Layout:
    """Return the random allowed layout of a seed."""
    return draw(random.Random(seed))


def sample(count: int, seed: int) -> list[Case]:
    """Draw ``count`` different layouts at random.

    Some of them have a group of 3 to 10 or 12 ranks on one axis: a third of all, or 45 if that is more, at most half.
    There are 45 pairs of an axis and a size, and they are used in turn.
    """
    generator, found = random.Random(seed), dict[Layout, None]()
    pairs_of_axis_and_size = [(axis, size) for axis in SIZED_AXES for size in SIZES]
    generator.shuffle(pairs_of_axis_and_size)
    turns = itertools.cycle(pairs_of_axis_and_size)
    sized = [of_size(*next(turns), generator) for _ in range(max(count // 3, min(len(SIZED_AXES) * len(SIZES),
                                                                                 count // 2)))]
    while len(found) < count - len(sized):
        found[draw(generator)] = None
    return [*(case(layout) for layout in found), *sized]


def of_size(axis: str, size: int, generator: random.Random) -> Case:
    """Return a case with ``size`` ranks on one axis and a model that fits this size; all other values are random.

    On the Ulysses axis the heads may be no multiple of the ranks, and on the tensor axis the key/value heads.
    """
    at = {name: generator.choice(AXES[name]) for name in ("zero", "tied", "style", "masked", "exchange", "documents",
                                                            "attention", "dropout")}
    if axis == "ring" and at["attention"] == "in blocks":
        at["attention"] = "to all"
    if axis == "ring" and at["dropout"] == "of both":
        at["dropout"] = "of hidden states"
    heads, kv, layers, batch, words = 4, generator.choice((1, 2, 4)), 2, 4, [
        f"{SIZED_AXES[axis]} {size}" if SIZED_AXES[axis] else ""]
    schedule = "none"
    if axis == "tp":
        heads = size * generator.choice((1, 2))
        kv = generator.choice([1, heads, size])
        words += generator.choice(([], ["--sequence-parallel"]))
    elif axis == "ulysses":
        heads = generator.choice((size, size + 1, 2 * size))
        kv = generator.choice((1, heads))
    elif axis == "pp":
        schedule = generator.choice(("1f1b", "zero-bubble", "zbv"))
        stages = 2 if schedule == "zbv" else 1
        layers, batch = size * stages + generator.choice((0, 1)), size
        words.append(f"--pipeline-schedule {schedule} --num-virtual-stages-per-pipeline-rank {stages}")
    elif axis == "dp":
        batch = size * generator.choice((1, 2))
        shards = [part for part in range(2, size) if size % part == 0]
        if at["zero"] and shards and generator.random() < 0.5:
            words.append(f"--fsdp-size {generator.choice(shards)}")
    if axis in ("ulysses", "ring", "dp"):  # the other axes have nothing to exchange and nothing to shard
        overlaps = axis == "ulysses" and heads >= 2 * size
        exchange = "collectives" if at["exchange"] == "overlapped" and not overlaps else str(at["exchange"])
        words.append(EXCHANGE[exchange])
        words.append(f"--zero-stage {at['zero']}")
    length = 2 * size * (16 // size or 1)
    if axis != "ring" and schedule in ("none", "1f1b") and generator.random() < 0.3:
        words.append(f"--sequence-chunk-size {length // 2}")
    style = STYLE[str(at["style"])].replace("48", str(12 * size)).replace("64", str(12 * size))
    model = (f"{style} --hidden-size 32 --kv-channels 8 --num-attention-heads {heads} --num-key-value-heads {kv} "
             f"--num-layers {layers} --seq-length {length} --global-batch-size {batch} "
             "--make-vocab-size-divisible-by 6")
    model += ("" if at["tied"] else " --untie-embeddings-and-output-weights")
    model += DOCUMENTS[str(at["documents"])] + ATTENTION[str(at["attention"])] + DROPOUT[str(at["dropout"])]
    about = ", ".join([f"{axis} {size}", *words[1:], str(at["style"]), f"{kv} of {heads} kv heads",
                       f"documents {at['documents']}", f"attention {at['attention']}", f"dropout {at['dropout']}"])
    return Case(f"{about}, {at['masked']} masked",
                size, " ".join(words), "none", model, str(at["masked"]))


@cache
def chosen_of_size() -> tuple[Case, ...]:
    """Return the few cases with group sizes that are no powers of two which every run of the tests includes."""
    generator = random.Random(1)
    return tuple(of_size(axis, size, generator) for axis, size in (
        ("tp", 3), ("ring", 3), ("pp", 3), ("ulysses", 5), ("dp", 6), ("ulysses", 7)))


def pairs(layout: Layout) -> Iterator[Pair]:
    """Return all pairs of values that occur together in a layout."""
    return itertools.combinations(enumerate(layout), 2)


@cache
def chosen() -> tuple[Layout, ...]:
    """Pick 10 layouts of 8 ranks, 30 of 4 and 10 of 2: each the one with most pairs of values that are rare so far."""
    generator, met = random.Random(15), Counter[Pair]()
    picked: list[Layout] = []
    for world, count in ((8, 10), (4, 30), (2, 10)):
        pool = {layout: list(pairs(layout)) for layout in (draw(generator, world) for _ in range(CANDIDATES[world]))}
        for _ in range(count):
            best = max(pool, key=lambda layout: sum(0.25 ** met[pair] for pair in pool[layout]))
            met.update(pool.pop(best))
            picked.append(best)
    return tuple(picked)
