#!/usr/bin/env python3
"""Draw which earlier tokens a token attends to, and print which share of full causal attention is computed.

Examples:

    python tools/plot_attention.py --attention-pattern bigbird --attention-block-size 64 --seq-length 2048
    python tools/plot_attention.py --attention-pattern-per-layer strided sliding-window --window-size 300 \\
        --seq-length 2048 --attention-block-size 64 --output attention.png

Give the flags of the training, or those of them that say which tokens a token attends to. Rows are queries and columns
are keys. Each pattern is printed as text once: for the first layer that has it, and for each head whose pattern
differs. With --output the patterns are also drawn as a picture. In the text, # means that a query sees all earlier keys
of the cell, + that it sees some of them, and . that it sees none. A picture has 512 cells along a side. A cell is paler
if a query sees only some of its keys.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

CHECKOUT = Path(__file__).resolve().parent.parent
if (CHECKOUT / "megatron_sp").is_dir():  # false once pip has installed this file, which then finds the package anyway
    sys.path.insert(0, str(CHECKOUT))

from megatron_sp.config.cli.flags import parse  # noqa: E402
from megatron_sp.config.cli.tool_parser import ToolParser  # noqa: E402
from megatron_sp.config.resolve import resolve  # noqa: E402
from megatron_sp.config.rules.attention import attention_notes, check_attention  # noqa: E402
from megatron_sp.config.schema import Run  # noqa: E402
from megatron_sp.errors import ConfigError  # noqa: E402
from megatron_sp.layout.masks.windows import layer_names  # noqa: E402
from megatron_sp.layout.patterns.blocks import pairs_in_pattern  # noqa: E402
from megatron_sp.layout.patterns.choice import LayerAttention, layer_attention  # noqa: E402
from megatron_sp.pictures import load_pyplot, picture_problems, save_picture  # noqa: E402
from megatron_sp.runtime import run_program  # noqa: E402

if TYPE_CHECKING:
    import numpy as np

#: Cells along a side of a picture, of one token or more, and of a text.
POINTS, TEXT_CELLS = 512, 32
#: Drawings at most.
MOST = 8


@dataclass(frozen=True)
class Drawing:
    """What a head of a layer lets some queries see.

    Attributes:
        title: names pattern, layer and head, and the share of causal attention.
        seen: ``[points, points]``, by query and cell of keys: which share of the cell's keys up to itself it sees.
        length: tokens of the sequence.
        step: tokens of a cell; the last cell may have fewer.
        block: tokens of a block of the pattern; 1 without one.
    """

    title: str
    seen: np.ndarray
    length: int
    step: int
    block: int


def step_of(length: int, block: int) -> int:
    """Return the tokens of a drawn cell: as few as fit into a picture, where possible a part of a block."""
    least = -(-length // POINTS)
    return next((step for step in range(least, block + 1) if block % step == 0), least)


def visible(layer: LayerAttention, head: int, length: int, step: int) -> np.ndarray:
    """Return what the last query of each cell sees, ``[points, points]``; see ``Drawing``."""
    import numpy as np

    edges = np.array([*range(0, length, step), length])
    rows = []
    for query in edges[1:] - 1:
        size = layer.pattern.block if layer.pattern is not None else length
        blocks = [] if layer.pattern is None else layer.pattern.earlier(head, query // size)
        starts = np.array([*blocks, query // size]) * size
        if layer.window:
            starts = np.array([max(0, query - layer.window + 1)])
        lengths = np.minimum(size, query + 1 - starts)
        before = np.concatenate([[0], lengths.cumsum()])  # keys that are seen in earlier ranges
        place = np.searchsorted(starts, edges, side="right") - 1
        seen = np.where(place < 0, 0, before[place] + np.minimum(edges - starts[place], lengths[place]))
        possible = np.maximum(np.diff(np.minimum(edges, query + 1)), 1)
        rows.append(np.diff(seen) / possible)
    return np.stack(rows)


def drawings(run: Run) -> Iterator[Drawing]:
    """Yield each different attention of the layers and heads of a run, in the order of layers and heads."""
    names, length = layer_names(run.model), run.data.seq_length
    shown = set()
    for number, (name, layer) in enumerate(zip(names, layer_attention(run.model))):
        for head in range(run.model.num_attention_heads):
            kind = layer.pattern.kind(head) if layer.pattern is not None else 0
            if (layer, kind) in shown:
                continue
            shown.add((layer, kind))
            pairs = layer.area(0, length) if layer.pattern is None else (
                2 * pairs_in_pattern(layer.pattern, (head,), 0, length) - length)
            said = f", head {head}" if layer.pattern is not None and layer.pattern.by_head else ""
            several = f", layer {number}" if len(set(names)) > 1 else ""
            block = layer.pattern.block if layer.pattern is not None else 1
            step = step_of(length, block)
            yield Drawing(f"{name}{several}{said}: {pairs / length**2:.1%} of causal attention",
                          visible(layer, head, length, step), length, step, block)


def as_text(drawing: Drawing) -> str:
    """Return a drawing as lines: # where a token sees all earlier keys of a cell, + some, . none."""
    import numpy as np

    seen, points = drawing.seen, len(drawing.seen)
    width = max(drawing.step, drawing.block)  # a character shows one cell or block, or several of them
    each = width // drawing.step * -(-drawing.length // (width * TEXT_CELLS))
    edges = [*range(0, points, each), points]
    causal = np.tri(points, dtype=bool)
    lines = []
    for row, (top, bottom) in enumerate(zip(edges, edges[1:])):
        line = ""
        for left, right in zip(edges[:row + 1], edges[1:]):
            shares = seen[top:bottom, left:right][causal[top:bottom, left:right]]
            line += "#" if shares.min() == 1 else "+" if shares.max() > 0 else "."
        lines.append(" ".join(line))
    return "\n".join(lines)


def plot(shown: list[Drawing], path: Path) -> None:
    """Write the drawings as a PNG, at most four beside each other."""
    pyplot = load_pyplot()
    columns = min(4, len(shown))
    rows = -(-len(shown) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(4.2 * columns, 4.4 * rows), squeeze=False)
    for place, one in zip(axes.flat, shown):
        place.imshow(one.seen, cmap="Blues", vmin=0, vmax=1.3, interpolation="nearest",
                     extent=(0, one.length, one.length, 0))
        place.set_title(one.title, fontsize=9)
        place.set(xlabel="key", ylabel="query")
    for place in list(axes.flat)[len(shown):]:
        place.axis("off")
    figure.tight_layout()
    save_picture(figure, path)


def build_parser() -> argparse.ArgumentParser:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                        usage="plot_attention.py [-h] [--output FILE.png] FLAGS OF pretrain_gpt.py, with --seq-length")
    parser.add_argument("--output", type=Path, metavar="FILE.png", help="picture to write (default: text only)")
    return parser


def read_run(words: list[str], output: Path | None = None) -> tuple[Run, list[str]]:
    """Return the run of some flags of a training, with a layer for each pattern and a few heads, and notes.

    Args:
        words: the flags.
        output: the picture to write.

    Raises:
        ConfigError: a flag is wrong, the length is missing, or the picture's name is none of a PNG.
    """
    parsed = parse(words, plan=True)
    run = parsed.run
    several = run.model.attention_pattern_per_layer
    model = replace(run.model, num_layers=run.model.num_layers or max(1, len(several)),
                    num_attention_heads=run.model.num_attention_heads or 4)
    run = resolve(replace(run, model=model), 1)
    problems = [*parsed.problems]
    if run.data.seq_length < 1 and not any("--seq-length" in problem for problem in problems):
        problems.append("--seq-length N of 1 or more is required: the tokens of a sequence.")
    problems += check_attention(run) + picture_problems(output)
    if problems:
        raise ConfigError(problems)
    return run, attention_notes(run)


def main(argv: list[str]) -> None:
    flags, words = build_parser().parse_known_args(argv)
    run, notes = read_run(words, flags.output)
    shown = []
    for number, one in enumerate(drawings(run)):
        if number == MOST:
            notes.append(f"Only the first {MOST} patterns are drawn.")
            break
        shown.append(one)
        print(f"{one.title}\n{as_text(one)}\n")
    print("\n".join(notes), end="\n" if notes else "")
    if flags.output:
        plot(shown, flags.output)
        print(f"wrote {flags.output}")


if __name__ == "__main__":
    run_program(main)
