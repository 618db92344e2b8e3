#!/usr/bin/env python3
"""Draw the pictures of docs/background/parallelism.md, one for each kind of parallelism.

    python docs/make/parallelism_pictures.py

A picture shows what is split (tokens, heads, columns, layers or samples) as a grid, with a colour for each rank.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_sp.layout.tokens import SequenceLayout  # noqa: E402
from megatron_sp.pictures import load_pyplot, save_picture  # noqa: E402

COLOURS = ("#7aa6d6", "#e6a267", "#8cc084", "#c59fd6")
GREY = "#dddddd"


def grid(axes: Any, x: float, y: float, colours: Sequence[Sequence[str]], *, title: str, across: str, down: str,
         cell: float = 0.42, texts: Sequence[Sequence[str]] = ()) -> float:
    """Draw a block of coloured cells with its labels, top left corner at (x, y), and return the x of its right edge."""
    from matplotlib.patches import Rectangle

    rows, columns = len(colours), len(colours[0])
    for i, row in enumerate(colours):
        for j, colour in enumerate(row):
            axes.add_patch(Rectangle((x + j * cell, y - (i + 1) * cell), cell, cell, facecolor=colour,
                                     edgecolor="white"))
            if texts:
                axes.text(x + (j + 0.5) * cell, y - (i + 0.5) * cell, texts[i][j], ha="center", va="center", fontsize=7)
    axes.text(x + columns * cell / 2, y + 0.42, title, ha="center", va="bottom", fontsize=9, fontweight="bold")
    axes.text(x + columns * cell / 2, y + 0.08, across, ha="center", va="bottom", fontsize=8)
    axes.text(x - 0.12, y - rows * cell / 2, down, ha="right", va="center", fontsize=8, rotation=90)
    return x + columns * cell


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], text: str = "", bend: float = 0.0) -> None:
    """Draw an arrow with ``text`` above its middle; ``bend`` curves it."""
    axes.annotate("", end, start, arrowprops=dict(arrowstyle="-|>", color="#444444", lw=1.3,
                                                  connectionstyle=f"arc3,rad={bend}"))
    axes.text((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.12, text, ha="center", va="bottom", fontsize=8)


def by_row(rows: int, columns: int) -> list[list[str]]:
    return [[COLOURS[i * 4 // rows]] * columns for i in range(rows)]


def by_column(rows: int, columns: int) -> list[list[str]]:
    return [[COLOURS[j * 4 // columns] for j in range(columns)] for _ in range(rows)]


def ulysses(axes: Any) -> None:
    """Draw Ulysses: tokens are split before attention, heads within it, tokens after it."""
    right = grid(axes, 0.5, 0, by_row(8, 8), title="q, k, v projected", across="heads", down="tokens")
    arrow(axes, (right + 0.15, -1.7), (right + 1.75, -1.7), "all-to-all\n(q, k, v as one)")
    right = grid(axes, right + 2.2, 0, by_column(8, 8), title="attention", across="heads", down="tokens")
    arrow(axes, (right + 0.15, -1.7), (right + 1.75, -1.7), "all-to-all")
    grid(axes, right + 2.2, 0, by_row(8, 8), title="output, feed-forward", across="heads / width", down="tokens")


def ring(axes: Any) -> None:
    """Draw a ring: which tokens each rank owns (zigzag), and which blocks of the attention matrix it computes."""
    layout = SequenceLayout(8, ring=4, kind="zigzag")
    owner = {token: rank for rank in range(4) for token in layout.positions(rank)}
    right = grid(axes, 0.5, 0, [[COLOURS[owner[token]]] for token in range(8)], title="tokens", across="zigzag",
                 down="2 x ring chunks")
    blocks = [[COLOURS[owner[q]] if k <= q else "#f4f4f4" for k in range(8)] for q in range(8)]
    steps = [[str((owner[q] - owner[k]) % 4) if k <= q else "" for k in range(8)] for q in range(8)]
    right = grid(axes, right + 1.7, 0, blocks, title="work under the causal mask", across="keys", down="queries",
                 texts=steps)
    axes.text(right - 1.7, -3.75, "colour: the rank that computes\nnumber: the step in which these keys arrive",
              ha="center", va="center", fontsize=8)
    x = right + 1.7
    places = [(x, -0.6), (x + 2.2, -0.6), (x + 2.2, -2.8), (x, -2.8)]
    for rank, (a, b) in enumerate(places):
        axes.text(a, b, f"rank {rank}", ha="center", va="center", fontsize=9,
                  bbox=dict(boxstyle="round,pad=0.5", facecolor=COLOURS[rank], edgecolor="none"))
    for one, other in ((0, 1), (1, 2), (2, 3), (3, 0)):
        (a, b), (c, d) = places[one], places[other]
        arrow(axes, (a + 0.27 * (c - a), b + 0.27 * (d - b)), (a + 0.73 * (c - a), b + 0.73 * (d - b)))
    axes.text(x + 1.1, -1.7, "keys and values\ntravel", ha="center", va="center", fontsize=8)


def hybrid(axes: Any) -> None:
    """Draw Ulysses over 2 ranks within a ring of 2 members."""
    layout = SequenceLayout(8, ring=2, ulysses=2, kind="zigzag")
    owner = {token: rank for rank in range(4) for token in layout.positions(rank)}
    right = grid(axes, 0.5, 0, [[COLOURS[owner[token]]] * 4 for token in range(8)], title="between layers",
                 across="heads", down="tokens", texts=[[""] * 4] * 8)
    arrow(axes, (right + 0.15, -1.7), (right + 1.75, -1.7), "all-to-all over\nUlysses pairs")
    member = {token: owner[token] // 2 for token in range(8)}
    colours = [[COLOURS[2 * member[token] + head // 2] for head in range(4)] for token in range(8)]
    right = grid(axes, right + 2.3, 0, colours, title="in attention", across="heads", down="tokens")
    arrow(axes, (right + 0.75, -0.6), (right + 0.75, -2.8), bend=-0.35)
    arrow(axes, (right + 0.65, -2.8), (right + 0.65, -0.6), bend=-0.35)
    axes.text(right + 1.4, -1.7, "ring between ranks with\nthe same heads: their keys\nand values travel", ha="left",
              va="center", fontsize=8)


def tensor(axes: Any) -> None:
    """Draw tensor parallelism: the columns of one matrix are split over ranks, and the rows of the next."""
    right = grid(axes, 0.5, 0, [[GREY] * 4 for _ in range(6)], title="x", across="hidden", down="tokens")
    arrow(axes, (right + 0.1, -1.3), (right + 1.3, -1.3), "all-gather*")
    right = grid(axes, right + 1.75, 0, by_column(4, 8), title="up, gate, q, k, v", across="columns", down="hidden")
    arrow(axes, (right + 0.1, -1.3), (right + 1.0, -1.3), "")
    right = grid(axes, right + 1.45, 0, by_column(6, 8), title="activations", across="width or heads", down="tokens")
    arrow(axes, (right + 0.1, -1.3), (right + 1.0, -1.3), "")
    right = grid(axes, right + 1.45, 0, by_row(8, 4), title="down, output", across="hidden", down="rows")
    arrow(axes, (right + 0.1, -1.3), (right + 2.0, -1.3), "sum over ranks\n(reduce-scatter*)")
    grid(axes, right + 2.5, 0, [[GREY] * 4 for _ in range(6)], title="y", across="hidden", down="tokens")
    axes.text(0.5, -3.7, "* with --sequence-parallel: between these two regions each rank keeps 1/tp of the tokens; "
              "without it, x and y are whole on every rank and the sum is an all-reduce", fontsize=8)


def pipeline(axes: Any) -> None:
    """Draw a pipeline: three ways to assign layers to ranks."""
    plain = [0, 0, 1, 1, 2, 2, 3, 3]
    ways = [("1f1b, zero-bubble", "one stage a rank", plain),
            ("interleaved", "several stages a rank", [0, 1, 2, 3] * 2),
            ("zbv, dualpipev", "a V", [0, 1, 2, 3, 3, 2, 1, 0])]
    x = 0.5
    for title, words, owners in ways:
        right = grid(axes, x, 0, [[COLOURS[owner]] * 3 for owner in owners], title=title, across=words, down="layers")
        for layer in range(7):
            if owners[layer] != owners[layer + 1]:
                y = -(layer + 1) * 0.42
                arrow(axes, (right + 0.12, y + 0.2), (right + 0.12, y - 0.2), bend=-0.6)
        x = right + 1.9
    axes.text(x - 1.2, -1.7, "arrows: hidden states of each\nmicrobatch go to the next stage,\n"
              "their gradients come back", va="center", fontsize=8)


def data(axes: Any) -> None:
    """Draw data parallelism: samples are split over ranks, and with ZeRO also model states, by stage."""
    right = grid(axes, 0.5, 0, by_row(8, 6), title="global batch", across="tokens", down="samples")
    x = right + 1.8
    for stage, sharded in enumerate(((), ("Adam",), ("Adam", "gradients"), ("Adam", "gradients", "weights"))):
        colours = [[COLOURS[j] if name in sharded else GREY for j in range(4)] for name in
                   ("weights", "gradients", "Adam")]
        right = grid(axes, x, -0.5, colours, title=f"ZeRO {stage}", across="a rank's share", down="", cell=0.5)
        if stage == 0:
            for row, name in enumerate(("weights", "gradients", "Adam, masters")):
                axes.text(x - 0.1, -0.75 - 0.5 * row, name, ha="right", va="center", fontsize=8)
        x = right + 0.5
    axes.text(x - 5, -2.6, "coloured: each rank of dp x ring x Ulysses keeps its part; grey: every rank keeps all",
              ha="center", fontsize=8)


RANKS = ("rank 0", "rank 1", "rank 2", "rank 3")
PAIRS = ("rank 0: ring 0, Ulysses 0", "rank 1: ring 0, Ulysses 1", "rank 2: ring 1, Ulysses 0",
         "rank 3: ring 1, Ulysses 1")


@dataclass(frozen=True)
class Picture:
    """One picture: the function that draws it, its title, its width in the units of the grid, and its legend."""

    draw: Callable[[Any], None]
    title: str
    width: float
    ranks: Sequence[str] = RANKS


PICTURES = {
    "ulysses": Picture(ulysses, "Ulysses over 4 ranks", 15.2), "ring": Picture(ring, "Ring over 4 ranks", 11.2),
    "hybrid": Picture(hybrid, "Ulysses 2 x ring 2", 12.4, PAIRS),
    "tensor": Picture(tensor, "Tensor parallelism over 4 ranks", 20.6),
    "pipeline": Picture(pipeline, "Pipeline over 4 ranks, 8 layers", 13.2),
    "data": Picture(data, "Data parallelism and ZeRO over 4 ranks", 14.8),
}


def main(directory: Path) -> None:
    """Write all pictures into a directory."""
    pyplot = load_pyplot()
    from matplotlib.patches import Patch

    for name, picture in PICTURES.items():
        figure, axes = pyplot.subplots(figsize=(0.68 * picture.width, 4.0))
        picture.draw(axes)
        axes.set(xlim=(0, picture.width), ylim=(-4.1, 1.3), title=picture.title)
        axes.set_aspect("equal")
        axes.axis("off")
        axes.legend(handles=[Patch(color=colour, label=rank) for colour, rank in zip(COLOURS, picture.ranks)],
                    loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=4, frameon=False, fontsize=8)
        save_picture(figure, directory / f"{name}.png", dpi=160, flag="directory")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    images = Path(__file__).resolve().parents[1] / "images"
    parser.add_argument("directory", nargs="?", type=Path, default=images, help="default: docs/images")
    main(parser.parse_args().directory)
