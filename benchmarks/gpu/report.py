"""The page that ``gpu.py`` writes."""

from __future__ import annotations

from typing import Any

GIB = 2**30


def report(results: dict[str, Any]) -> str:
    """Return the results as a Markdown page."""
    lines = ["# Speed, profile and longest sequences on GPUs", ""]
    if results["toy"]:
        lines += ["**No GPU figure exists yet.** What follows is a dry run of the script on a CPU at toy size; it says "
                  "nothing about a GPU. Run `bash benchmarks/gpu.sh` on a machine with one.", ""]
    ranks = results["ranks"]
    precision = "fp32" if results["toy"] else "bf16"
    lines += [f"{ranks} x {results['device']}, {results['layers']} layers, {precision}, torch {results['torch']}, "
              f"{results['seconds']} s in all. Smoke test (`tests/gpu`): {results['smoke']}.", ""]
    if "speed" in results:
        lines += _speed(results["speed"])
    if "profile" in results:
        lines += _profile(results["profile"])
    if "longest" in results:
        lines += _longest(results["longest"], results["memory_gib"])
    if results["not_measured"]:
        lines += ["## Not measured", "", *(f"- {line}" for line in results["not_measured"]), ""]
    return "\n".join(lines)


def _speed(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["## Speed, and planned beside measured memory", "",
             "MFU counts half of the scores of attention and no recomputation. Tokens per second and memory are those "
             "of one GPU. Planned memory is without what a process holds before it makes a tensor.", "",
             "| shape | tokens | program | techniques | s/step | tokens/s | TFLOP/s | MFU | allocated GiB "
             "| planned GiB |",
             "|---|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        first = f"| {row['shape']} | {row['length']:,} | {row['program']} | {row.get('flags') or '-'} | "
        if "seconds" not in row:
            lines.append(f"{first}does not fit | - | - | - | - | - |")
            continue
        lines.append(f"{first}{row['seconds']:.3f} | {row['tokens_per_s']:,.0f} | {row['tflops']:.3g} | "
                     f"{_percent(row.get('mfu'))} | {_gib(row.get('allocated'))} | {_planned(row)} |")
    return [*lines, ""]


def _profile(rows: list[dict[str, Any]]) -> list[str]:
    kinds = list(rows[0]["shares"]) if rows else []
    lines = ["## Where the time of a step goes", "",
             "Shares of the time of all kernels; on a CPU of all operators. `other` is neither a matrix product nor "
             "attention, communication or a copy.", "",
             f"| shape | tokens | program | {' | '.join(kinds)} |", "|---|---|---|" + "---|" * len(kinds)]
    lines += [f"| {row['shape']} | {row['length']:,} | {row['program']} | "
              + " | ".join(f"{share:.1%}" for share in row["shares"].values()) + " |" for row in rows]
    return [*lines, ""]


def _longest(rows: list[dict[str, Any]], memory: float) -> list[str]:
    lines = [f"## Longest sequence with each technique, in {memory:g} GiB", "",
             "| shape | technique | longest | limited by | s/step | tokens/s | MFU | allocated GiB | planned GiB |",
             "|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        if "length" not in row:
            lines.append(f"| {row['shape']} | {row['technique']} | none | - | - | - | - | - | - |")
            continue
        lines.append(f"| {row['shape']} | {row['technique']} | {row['length']:,} | {row['limited_by']} | "
                     f"{row['seconds']:.2f} | {row['tokens_per_s']:,.0f} | {_percent(row.get('mfu'))} | "
                     f"{_gib(row.get('allocated'))} | {_planned(row)} |")
    return [*lines, ""]


def _planned(row: dict[str, Any]) -> str:
    """Return the planned GiB, and how far they are from what was allocated."""
    if "planned" not in row:
        return "-"
    error = f" ({row['planned'] / row['allocated'] - 1:+.1%})" if row.get("allocated") else ""
    return _gib(row["planned"]) + error


def _gib(size: float | None) -> str:
    return "-" if size is None else f"{size / GIB:.2f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
