#!/usr/bin/env python3
"""Draw how planned memory grows with the sequence length, or compare the plan with published measurements.

Examples (the first two make the picture and the Markdown table of docs/background/memory.md):

    python tools/plot_memory.py
    python tools/plot_memory.py --published
    python tools/plot_memory.py --gpus 16 --limit 40 --output memory_16.png

The figures come from ``megatron_sp.plan.memory``, which needs neither torch nor a GPU.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
if (CHECKOUT / "megatron_sp").is_dir():  # false once pip has installed this file, which then finds the package anyway
    sys.path.insert(0, str(CHECKOUT))

from megatron_sp.config.cli.tool_parser import ToolParser  # noqa: E402
from megatron_sp.config.load import load_run  # noqa: E402
from megatron_sp.config.resolve import with_vocab  # noqa: E402
from megatron_sp.config.schema import Run  # noqa: E402
from megatron_sp.errors import ConfigError  # noqa: E402
from megatron_sp.pictures import load_pyplot, picture_problems, save_picture  # noqa: E402
from megatron_sp.plan.memory import COMPONENTS, predict  # noqa: E402
from megatron_sp.runtime import run_program  # noqa: E402

COMMON = ("--position-embedding-type rope --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --mock-data "
          "--micro-batch-size 1 --train-iters 1 --lr 1e-4 --eval-iters 0 --bf16 --zero-stage 3 ")
GATED = "--swiglu --normalization RMSNorm --untie-embeddings-and-output-weights --group-query-attention "
LLAMA_8B = GATED + ("--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --num-query-groups 8 "
                    "--ffn-hidden-size 14336 --vocab-size 128256 ")
LLAMA_70B = GATED + ("--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --num-query-groups 8 "
                     "--ffn-hidden-size 28672 --vocab-size 128256 ")
QWEN_32B = GATED + ("--num-layers 64 --hidden-size 5120 --num-attention-heads 64 --kv-channels 128 "
                    "--num-query-groups 8 --ffn-hidden-size 25600 --qk-layernorm --vocab-size 151936 ")
GPT_1B = "--num-layers 24 --hidden-size 2048 --num-attention-heads 64 --kv-channels 32 --vocab-size 50304 "
GPT_7B = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 50304 "
FULL = "--recompute-granularity full "
TILED, OFFLOAD = "--mlp-tile-size 4096 ", "--offload-activations "
HEADS = 32  # query heads of LLAMA_8B
#: Title and flags of each panel of the picture; each panel adds one technique to the one before.
PANELS = {
    "no technique (loss in one tile)": "--loss-tile-size {s} ",
    "tiled loss": "",
    "+ full recompute": FULL,
    "+ tiled feed-forward layer": FULL + TILED,
    "+ offload": FULL + TILED + OFFLOAD,
    "+ {groups} head groups": FULL + TILED + OFFLOAD + "--attention-head-groups {groups} ",
}
COLOURS = ("#5b7ba3", "#8fb0d3", "#c3d5e8", "#7f7f7f", "#e08e45", "#c44e52", "#8c6bb1", "#b0b0b0", "#dddddd")
GIB = 2**30


@dataclass(frozen=True)
class Published:
    """A measurement of another system's run (ALST, arXiv 2506.13996, recipes; DeepSpeed-Ulysses, arXiv 2309.14509).

    Attributes:
        name: model, devices and techniques, for the table.
        flags: our flags for the same run.
        tokens: sequence length.
        gpus: number of devices.
        peak: measured peak memory of a device in GiB. Where the source only says that the run worked, the memory that
            the device has.
        measured: whether ``peak`` is a measurement.
        kernels: whether the run used a fused SwiGLU, which holds 4 activations of the feed-forward width instead of 6.
        whole_logits: whether its loss was not tiled; it then held 14 bytes for each logit, where ours holds 6.
        offload: whether the optimizer states were in host memory. The source does not say where the bf16 weights were.
    """

    name: str
    flags: str
    tokens: int
    gpus: int
    peak: float
    measured: bool = True
    kernels: bool = True
    whole_logits: bool = False
    offload: bool = True


PUBLISHED = (
    Published("Llama-8B, 1 x H200, recompute", LLAMA_8B + FULL + "--loss-tile-size {s} ", 65536, 1, 137.4,
              whole_logits=True),
    Published("Llama-8B, 1 x H200, + tiled loss", LLAMA_8B + FULL, 300032, 1, 135.0),
    Published("Llama-8B, 1 x H200, + offload", LLAMA_8B + FULL + OFFLOAD, 650240, 1, 126.8),
    Published("Llama-8B, 1 x H200, + tiled MLP", LLAMA_8B + FULL + TILED + OFFLOAD, 1200128, 1, 136.2),
    Published("Llama-8B, 1 x H100, recompute", LLAMA_8B + FULL + "--loss-tile-size {s} ", 32768, 1, 71.9,
              whole_logits=True),
    Published("Llama-8B, 8 x H100, all", LLAMA_8B + FULL + TILED + OFFLOAD, 3700000, 8, 80.0, measured=False),
    Published("Llama-70B, 32 x H100, all", LLAMA_70B + FULL + TILED + OFFLOAD, 4000000, 32, 80.0, measured=False),
    Published("Llama-70B, 64 x H100, all", LLAMA_70B + FULL + TILED + OFFLOAD, 10000000, 64, 80.0, measured=False),
    Published("Qwen3-32B, 32 x H100, all", QWEN_32B + FULL + TILED + OFFLOAD, 7000000, 32, 80.0, measured=False),
    Published("Qwen3-32B, 64 x H100, all", QWEN_32B + FULL + TILED + OFFLOAD, 15000000, 64, 80.0, measured=False),
    Published("GPT-1.2B, 64 x A100-40", GPT_1B + FULL + "--loss-tile-size {s} ", 1 << 20, 64, 40.0, measured=False,
              kernels=False, whole_logits=True, offload=False),
    Published("GPT-7B, 32 x A100-40", GPT_7B + FULL + "--loss-tile-size {s} ", 1 << 18, 32, 40.0, measured=False,
              kernels=False, whole_logits=True, offload=False),
)


def head_groups(gpus: int) -> int:
    """Return the number of head groups in the last panel: 4, or all heads of a rank where it has fewer than 4."""
    return min(4, max(1, HEADS // gpus))


def resolved_run(flags: str, tokens: int, gpus: int) -> Run:
    """Return the run of these flags with Ulysses over ``gpus`` devices; the length is rounded down to 64 x ``gpus``."""
    tokens = tokens // (gpus * 64) * gpus * 64
    text = COMMON + flags.format(s=tokens, groups=head_groups(gpus)) + f"--seq-length {tokens} --ulysses-size {gpus} "
    run = load_run(text.split(), gpus, files=False)[0]
    return with_vocab(run, run.model.vocab_size)


def planned_gib(case: Published) -> tuple[float, float, float]:
    """Plan the memory of a published run on each device, in GiB, under three assumptions.

    Returns:
        The plan for our system; the plan for a system that stores tensors as the published one does (``Published``);
        the latter plus a shard of bf16 weights on the device, where the source leaves their place open.
    """
    run = resolved_run(case.flags, case.tokens, case.gpus)
    plan = predict(run, device="gpu")
    parts, tokens = plan.components, run.data.seq_length // case.gpus
    theirs = float(plan.total)
    parameters = parts["weights"] / 4 * case.gpus
    if case.offload:
        theirs -= parts["weights"] + parts["gradients"] + parts["optimizer states"]
    if case.whole_logits:
        theirs += 8 * run.model.padded_vocab_size * tokens
    elif case.kernels and not run.memory.mlp_tile_size:
        theirs -= 2 * 2 * run.model.ffn_hidden_size * tokens
    shard = 2 * parameters / case.gpus if case.offload else 0.0
    return plan.total / GIB, theirs / GIB, (theirs + shard) / GIB


def published_table() -> str:
    """Return the comparison with published runs as a Markdown table."""
    lines = ["| run | tokens | published | our plan | as they hold it | error | weights on the device | error |",
             "|---|---|---|---|---|---|---|---|"]
    for case in PUBLISHED:
        ours, *theirs = planned_gib(case)
        shown = f"{case.peak:.1f} GiB" if case.measured else f"ran in {case.peak:.0f}"
        cells = [f"{value:.1f} | " + (f"{value / case.peak - 1:+.1%}" if case.measured else
                                      "fits" if value <= case.peak else "does not fit") for value in theirs]
        lines.append(f"| {case.name} | {case.tokens:,} | {shown} | {ours:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(gpus: int, limit: float, output: Path) -> None:
    """Draw the components of planned memory, stacked, over the sequence length: one panel for each of ``PANELS``."""
    pyplot = load_pyplot()
    figure, grid = pyplot.subplots(2, 3, figsize=(13, 7), sharey=True)
    per_gpu = [1024 * 2**power for power in range(0, 11)]
    for axes, (title, flags) in zip(grid.flat, PANELS.items()):
        plans = [predict(resolved_run(LLAMA_8B + flags, tokens * gpus, gpus), device="gpu") for tokens in per_gpu]
        x = [tokens * gpus / 1024 for tokens in per_gpu]
        stacks = [[plan.components[name] / GIB for plan in plans] for name in reversed(COMPONENTS)]
        axes.stackplot(x, stacks, colors=COLOURS[::-1], labels=list(reversed(COMPONENTS)))
        axes.axhline(limit, color="black", linewidth=1, linestyle="--")
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, limit * 1.5)
        axes.set_xlim(x[0], x[-1])
        ticks = [value for value in x if value in (8, 32, 128, 512, 2048, 8192)] or x[::2]
        axes.set_xticks(ticks, [f"{value:g}K" if value < 1024 else f"{value / 1024:g}M" for value in ticks])
        longest = longest_length(flags, gpus, limit)
        axes.set_title(f"{title.format(groups=head_groups(gpus))}\nlongest {longest / 1024:,.0f}K tokens", fontsize=9)
    for axes in grid[:, 0]:
        axes.set_ylabel("GiB on a device")
    for axes in grid[1]:
        axes.set_xlabel("tokens in the sequence")
    handles, names = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles[::-1], names[::-1], loc="lower center", ncol=5, frameon=False, fontsize=9)
    figure.suptitle(f"Planned peak memory, Llama-8B in bf16 on {gpus} devices: --ulysses-size {gpus} --zero-stage 3 "
                    f"(dashed: {limit:g} GiB)", fontsize=11)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    save_picture(figure, output)


def longest_length(flags: str, gpus: int, limit: float) -> int:
    """Return the longest sequence, in tokens, whose plan fits into 93% of the limit. 7% are left for fragmentation."""
    low, high = 0, 1 << 26
    while high - low > gpus * 1024:
        middle = (low + high) // 2
        fits = predict(resolved_run(LLAMA_8B + flags, max(middle, gpus * 64), gpus), device="gpu").total <= (
            0.93 * limit * GIB)
        low, high = (middle, high) if fits else (low, middle)
    return low


def build_parser() -> argparse.ArgumentParser:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    group = parser.add_argument_group("devices")
    group.add_argument("--gpus", type=int, default=8, metavar="N",
                       help=f"devices that share a sequence, from 1 to {HEADS} (default: %(default)s)")
    group.add_argument("--limit", type=float, default=80.0, metavar="GIB",
                       help="memory of a device (default: %(default)g)")
    group = parser.add_argument_group("output")
    group.add_argument("--output", type=Path, default=CHECKOUT / "docs/images/memory.png", metavar="FILE.png",
                       help="picture to write (default: docs/images/memory.png)")
    group.add_argument("--published", action="store_true", help="print the table of published measurements only")
    return parser


def main(argv: list[str]) -> None:
    arguments = build_parser().parse_args(argv)
    problems = []
    if not 1 <= arguments.gpus <= HEADS:
        problems.append(f"--gpus {arguments.gpus} must be between 1 and {HEADS}: each device needs a head of Llama-8B")
    if not 0 < arguments.limit < math.inf:
        problems.append(f"--limit {arguments.limit:g} must be above 0")
    problems += picture_problems(arguments.output)
    if problems:
        raise ConfigError(problems)
    if arguments.published:
        print(published_table())
        return
    longest = {title.format(groups=head_groups(arguments.gpus)): longest_length(flags, arguments.gpus, arguments.limit)
               for title, flags in PANELS.items()}
    for title, tokens in longest.items():
        print(f"{title:34} {tokens:>12,} tokens in {arguments.limit:g} GiB")
    draw(arguments.gpus, arguments.limit, arguments.output)
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    run_program(main)
