#!/usr/bin/env python3
"""Look into checkpoints: list them, show what one holds, verify, compare two, delete old ones.

    python tools/inspect_checkpoint.py list runs/a                     # every checkpoint of a --save directory
    python tools/inspect_checkpoint.py show runs/a --norms             # the newest one, with a table of its tensors
    python tools/inspect_checkpoint.py verify runs/a                   # checksums of all of them
    python tools/inspect_checkpoint.py diff runs/a/iter_0000004 runs/b
    python tools/inspect_checkpoint.py prune runs/a --keep-last 3      # prints what --delete would delete

DIR is the --save directory of a run, which stands for its newest checkpoint, or the directory of one checkpoint
(runs/a/iter_0000004). One tensor is read at a time, so a checkpoint may be larger than memory. Nothing in a checkpoint
is executed. verify and diff exit with 1 when something is damaged or differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

CHECKOUT = Path(__file__).resolve().parent.parent
if (CHECKOUT / "megatron_sp").is_dir():  # false once pip has installed this file, which then finds the package anyway
    sys.path.insert(0, str(CHECKOUT))

from megatron_sp import runtime  # noqa: E402
from megatron_sp.config.cli.tool_parser import ToolParser  # noqa: E402
from megatron_sp.errors import CheckpointError, ConfigError  # noqa: E402
from megatron_sp.progress import progress_bar  # noqa: E402

if TYPE_CHECKING:
    from megatron_sp.checkpoint.inspection import Contents, TensorRow


def size_in_words(size: float) -> str:
    """Return a number of bytes as people read it, for example 1.50 GiB."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while size >= 1024 and power < len(units) - 1:
        size, power = size / 1024, power + 1
    return f"{size:.0f} B" if power == 0 else f"{size:.2f} {units[power]}"


def show(arguments: argparse.Namespace) -> int:
    """Print what one checkpoint holds."""
    from megatron_sp.checkpoint.inspection import Contents, named_checkpoint, tensor_rows

    found = named_checkpoint(arguments.dir, arguments.ckpt_step)
    contents = Contents.read(found.path)
    rows = list(progress_bar(tensor_rows(contents, values=arguments.norms), total=len(contents.tensors),
                             desc="tensors", leave=False)) if arguments.tensors or arguments.norms else []
    if arguments.json:
        print(json.dumps(contents.summary() | ({"table": [asdict(row) for row in rows]} if rows else {}), indent=1))
        return 0
    for note in found.notes:
        print(f"WARNING: {note}", file=sys.stderr)
    print("\n".join(summary_lines(contents)))
    if rows:
        print("\n".join(table_lines(rows, norms=arguments.norms)))
    return 0


def summary_lines(contents: Contents) -> list[str]:
    """Return the lines that ``show`` prints above the table."""
    facts = contents.summary()
    layout, model = facts["layout"], facts["model"]
    degrees = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in layout.items()
                        if value is not None and value is not False)
    copies = ", ".join(Path(name).name for name in facts["tokenizer_files"])
    return [
        f"{facts['path']}: iteration {facts['iteration']:,}, {facts['consumed_samples']:,} samples, "
        f"{facts['consumed_tokens']:,} tokens, {facts['skipped_iterations']} skipped steps",
        f"  size       {size_in_words(facts['bytes'])} in {facts['files']} files; {facts['parameters']:,} parameters, "
        f"{facts['tensors']} tensors",
        f"  saved by   {degrees}",
        f"  batch      global {facts['global_batch_size']}, micro {facts['micro_batch_size']}, sequences of "
        f"{facts['seq_length']:,} tokens; seed {facts['seed']}",
        f"  precision  {facts['precision']}, loss scale {facts['loss_scale']:g}",
        f"  optimizer  {facts['optimizer'] or 'not saved'}",
        f"  model      {model.get('num_layers')} layers, hidden {model.get('hidden_size')}, "
        f"{model.get('num_attention_heads')} heads, {model.get('num_query_groups')} key/value heads, feed-forward "
        f"{model.get('ffn_hidden_size')} ({model.get('activation')}), {model.get('position_embedding_type')}, "
        f"{model.get('normalization')}, vocabulary {facts['vocab_size']:,}",
        f"  tokenizer  {facts['tokenizer']}" + (f", copies: {copies}" if copies else ""),
    ]


def table_lines(rows: list[TensorRow], *, norms: bool) -> list[str]:
    """Return the table of tensors."""
    width = max(len(row.name) for row in rows)
    shapes = [" x ".join(map(str, row.shape)) or "one number" for row in rows]
    shape_width = max(map(len, shapes))
    lines = []
    for row, shape in zip(rows, shapes):
        line = f"  {row.name:<{width}}  {shape:<{shape_width}}  {row.dtype:<8}  {size_in_words(row.num_bytes):>11}"
        if norms:
            line += f"  norm {row.norm:<12.6g} largest {row.largest:<12.6g}"
            line += f" {row.not_finite} NOT FINITE" if row.not_finite else ""
        lines.append(line.rstrip())
    return lines


def list_all(arguments: argparse.Namespace) -> int:
    """Print a line for each checkpoint of a directory."""
    from megatron_sp.checkpoint import files
    from megatron_sp.checkpoint.inspection import Contents, damages_of, iterations_on_disk

    rows = []
    try:
        tracked = files.read_tracker(arguments.dir)
    except CheckpointError as error:
        tracked = None
        print(f"WARNING: {error}", file=sys.stderr)
    for iteration, path in iterations_on_disk(arguments.dir).items():
        row: dict[str, Any] = {"iteration": iteration, "path": str(path), "tracker": iteration == tracked}
        damages = damages_of(path, "size")
        if not damages:
            contents = Contents.read(path)
            row |= {"bytes": contents.num_bytes, "consumed_samples": contents.state["train"]["consumed_samples"],
                    "saved": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(
                        (path / files.MANIFEST).stat().st_mtime)),
                    "world_size": contents.state["config"].get("parallel", {}).get("world_size")}
        rows.append(row | {"damages": damages})
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return 0
    for row in rows:
        mark = "*" if row["tracker"] else " "
        facts = "; ".join(row["damages"]) if row["damages"] else (
            f"{size_in_words(row['bytes']):>11}  {row['saved']}  {row['consumed_samples']:,} samples, "
            f"{row['world_size']} rank{'s' if row['world_size'] != 1 else ''}")
        print(f"{mark} {row['iteration']:>9,}  {facts}")
    print(f"* the tracker names it; the files' sizes were compared, checksums were not ({len(rows)} checkpoints)")
    return 0


def verify(arguments: argparse.Namespace) -> int:
    """Compare the files of checkpoints with their manifests."""
    from megatron_sp.checkpoint.files import split_directory
    from megatron_sp.checkpoint.inspection import damages_of, iterations_on_disk, named_checkpoint

    directory, iteration = split_directory(arguments.dir, arguments.ckpt_step)
    paths = list(iterations_on_disk(directory).values()) if iteration is None else [
        named_checkpoint(directory, iteration).path]
    bad = 0
    for path in progress_bar(paths, desc="verifying", leave=False):
        damages = damages_of(path, "size" if arguments.sizes else "full")
        bad += bool(damages)
        print(f"{path}: " + ("; ".join(damages) if damages else "whole"))
    if bad:
        print(f"{bad} of {len(paths)} checkpoints are damaged", file=sys.stderr)
    return 1 if bad else 0


def diff(arguments: argparse.Namespace) -> int:
    """Print how two checkpoints differ."""
    from megatron_sp.checkpoint.inspection import (
        Contents,
        named_checkpoint,
        setting_differences,
        tensor_differences,
    )

    first, second = (Contents.read(named_checkpoint(path).path) for path in (arguments.dir, arguments.other))
    print(f"first:  {first.path}\nsecond: {second.path}")
    for name, one, other in setting_differences(first, second):
        print(f"  {name}: {one} -> {other}")
    found = list(progress_bar(tensor_differences(first, second), total=len(first.tensors | second.tensors),
                              desc="tensors", leave=False))
    unequal = [each for each in found if not each.is_equal]
    for each in unequal:
        print(f"  {each.name}: " + (each.text or f"largest difference {each.largest:.6g}, relative to its norm "
                                                 f"{each.relative:.6g}"))
    print(f"{len(found) - len(unequal)} of {len(found)} tensors are bitwise equal")
    return 1 if unequal else 0


def prune(arguments: argparse.Namespace) -> int:
    """Delete old checkpoints, or print which ones would be deleted."""
    from megatron_sp.checkpoint import files
    from megatron_sp.checkpoint.inspection import damages_of, iterations_on_disk
    from megatron_sp.checkpoint.lock import RunLock
    from megatron_sp.checkpoint.saving.removal import remove_checkpoint
    from megatron_sp.checkpoint.saving.retention import Retention, is_whole

    if not arguments.keep_last and not arguments.save_retain_interval:
        raise ConfigError("prune needs --keep-last N or --save-retain-interval N; without either all checkpoints stay")
    iterations_on_disk(arguments.dir)
    complete = files.complete_checkpoints(arguments.dir)
    newest = files.find_checkpoint(arguments.dir)
    if newest is None:
        raise CheckpointError(f"{arguments.dir} holds no complete checkpoint, so nothing is deleted")
    rule = Retention(arguments.keep_last or 1, arguments.save_retain_interval)
    surplus = rule.surplus([number for number, path in complete.items() if is_whole(path)], newest.iteration)
    stay = [path for number, path in complete.items() if number not in surplus]
    damages = [text for path in progress_bar(stay, desc="verifying those that stay", leave=False)
               for text in damages_of(path)] if surplus else []
    if damages:
        raise CheckpointError(f"nothing is deleted, because a checkpoint that would stay is damaged: "
                              f"{'; '.join(damages)}")
    for number in surplus:
        print(f"{'deleting' if arguments.delete else 'would delete'} {complete[number]}")
    if arguments.delete and surplus:
        lock = RunLock.take(arguments.dir, 1)       # a run must not save meanwhile
        try:
            failures = [problem for number in surplus if (problem := remove_checkpoint(complete[number]))]
        finally:
            lock.release()
        if failures:
            raise CheckpointError(" ".join(failures).replace("WARNING: ", ""))
    kept = ", ".join(path.name for path in stay)
    print(f"{len(surplus)} checkpoints {'deleted' if arguments.delete else 'would be deleted (add --delete)'}; "
          f"{len(stay)} stay: {kept}")
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, action: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.add_argument("dir", type=Path, metavar="DIR", help="--save directory of a run, or one checkpoint in it")
        sub.set_defaults(action=action)
        return sub

    step = dict(type=int, metavar="N", help="iteration to look at (default: the newest)")
    sub = command("show", show, "Show iteration, samples, layout, model, sizes and tensors of one checkpoint.")
    sub.add_argument("--ckpt-step", **step)  # type: ignore[arg-type]
    sub.add_argument("--tensors", action="store_true", help="add a table of the tensors' shapes, types and sizes")
    sub.add_argument("--norms", action="store_true", help="add norm and largest value of each tensor, which reads all")
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub = command("list", list_all, "List all checkpoints of a --save directory.")
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub = command("verify", verify, "Compare every file with its checksum; of a --save directory all checkpoints.")
    sub.add_argument("--ckpt-step", **step | {"help": "iteration to verify (default: all)"})  # type: ignore[arg-type]
    sub.add_argument("--sizes", action="store_true", help="compare sizes alone, which is fast")
    sub = command("diff", diff, "Compare the settings and tensors of two checkpoints.")
    sub.add_argument("other", type=Path, metavar="OTHER", help="the second checkpoint, as DIR")
    sub = command("prune", prune, "Delete old checkpoints of a --save directory, as a run does with the same flags.")
    sub.add_argument("--keep-last", type=int, default=0, metavar="N", help="keep the newest N")
    sub.add_argument("--save-retain-interval", type=int, default=0, metavar="N",
                     help="keep those at multiples of this iteration, and of the others the newest (or --keep-last)")
    sub.add_argument("--delete", action="store_true", help="delete; without it the tool only says what it would delete")
    return parser


def main(argv: list[str]) -> int:
    arguments = build_parser().parse_args(argv)
    if not arguments.dir.is_dir():
        raise CheckpointError(f"{arguments.dir} is not a directory; give the --save directory of a run, or one "
                              "checkpoint in it")
    for flag in ("keep_last", "save_retain_interval", "ckpt_step"):
        if (getattr(arguments, flag, None) or 0) < 0:
            raise ConfigError(f"--{flag.replace('_', '-')} {getattr(arguments, flag)} must be at least 0")
    return arguments.action(arguments)


if __name__ == "__main__":
    runtime.run_program(main)
