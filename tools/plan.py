#!/usr/bin/env python3
"""Find a layout and memory techniques for a model on given devices, and write a launch script for them.

Give the tool pretrain_gpt.py's flags of the model, the sequence and the batch, and leave out those of the layout and of
the memory techniques: these it finds. It prints the best plans with their predicted memory, step time and MFU, and says
why the first plan is best. It needs no GPU, data or tokenizer. docs/how-to/plan-a-run.md explains the predictions.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
if (CHECKOUT / "megatron_sp").is_dir():  # false once pip has installed this file, which then finds the package anyway
    sys.path.insert(0, str(CHECKOUT))

from megatron_sp.config.cli.tool_parser import ToolParser  # noqa: E402
from megatron_sp.config.cli.values import counted  # noqa: E402
from megatron_sp.config.load import load_run  # noqa: E402
from megatron_sp.config.resolve import with_vocab  # noqa: E402
from megatron_sp.config.schema import Run  # noqa: E402
from megatron_sp.errors import ConfigError  # noqa: E402
from megatron_sp.output_files import complete_file  # noqa: E402
from megatron_sp.pictures import load_pyplot, picture_problems, save_picture  # noqa: E402
from megatron_sp.plan.devices import DEVICES, GIB, Device, device_of_flags  # noqa: E402
from megatron_sp.plan.lengths import planned_run  # noqa: E402
from megatron_sp.plan.memory import COMPONENTS, LABELS, predict  # noqa: E402
from megatron_sp.plan.report import parameters, with_length  # noqa: E402
from megatron_sp.plan.search import Candidate, reason, search  # noqa: E402
from megatron_sp.plan.techniques import USABLE, technique_flags  # noqa: E402
from megatron_sp.runtime import run_program  # noqa: E402

EXAMPLES = """\
examples:
  python tools/plan.py --devices 8 --device A100-40 --fastest --model-preset llama3-8b --seq-length 131072 --bf16
  python tools/plan.py --devices 8 --device H100 --max-seq-length --model-preset llama3-8b --bf16 --output launch.sh
"""
#: Flags that every run must have but that change no plan; the tool adds them, so users need not type them.
FILLED_IN = {"--lr": "1e-4", "--train-iters": "1", "--global-batch-size": "1", "--vocab-size": "128256"}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this tool's own flags. All other flags describe the run, as for pretrain_gpt.py."""
    parser = ToolParser(description=__doc__, epilog=EXAMPLES, allow_abbrev=False,
                        formatter_class=argparse.RawDescriptionHelpFormatter,
                        usage="plan.py --devices N --device NAME (--fastest | --max-seq-length) "
                              "MODEL AND TRAINING FLAGS OF pretrain_gpt.py")
    goal = parser.add_mutually_exclusive_group()
    goal.add_argument("--fastest", action="store_true", help="shortest step at the given --seq-length (the default)")
    goal.add_argument("--max-seq-length", action="store_true", help="longest sequence that fits")
    parser.add_argument("--devices", type=int, default=8, metavar="N", help="number of devices (default: %(default)s)")
    parser.add_argument("--device", default="H100", metavar="NAME", help=f"one of {', '.join(DEVICES)} "
                        "(default: %(default)s)")
    parser.add_argument("--device-memory", default="", metavar="SIZE", help="another memory than the data sheet's, "
                        "such as 80GB or 40GiB")
    parser.add_argument("--host-memory", default="", metavar="SIZE", help="memory of a node's host, such as 512GB "
                        "(default: that of the manufacturers' systems, 128 or 256 GB for each device)")
    parser.add_argument("--devices-per-node", type=int, default=8, metavar="N", help="devices with fast links between "
                        "them (default: %(default)s)")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="plans to print (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the launch script of the first plan here")
    parser.add_argument("--json", action="store_true", help="print the plans as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the memory of the first plan over the sequence "
                        "length (needs matplotlib)")
    return parser


def given_flags(words: list[str]) -> set[str]:
    """Return the names of the flags in a command line."""
    return {word.split("=", 1)[0].replace("_", "-") for word in words if word.startswith("--")}


def missing_flags(words: list[str]) -> list[str]:
    """Return the flags, with values, that a run must have besides these and a sequence length."""
    given = given_flags(words)
    filled = [part for flag, value in FILLED_IN.items() if flag not in given and not (
        flag == "--train-iters" and "--train-samples" in given) for part in (flag, value)]
    if not given & {"--max-position-embeddings", "--position-embedding-type", "--model-preset"}:
        filled += ["--position-embedding-type", "rope"]
    return filled


def read_base(words: list[str]) -> Run:
    """Return the run that the flags describe, on one process and with its vocabulary sizes filled in.

    Args:
        words: the flags of the run.

    Raises:
        ConfigError: some of these flags are wrong.
    """
    filled = missing_flags(words)
    if not given_flags(words) & {"--seq-length", "--seq-length-schedule"}:
        filled += ["--seq-length", "4096"]
    run, _ = load_run([*words, *filled, "--mock-data", "--tokenizer-type", "NullTokenizer"], 1, files=False)
    return planned_run(with_vocab(run, run.model.vocab_size))


def table(plans: list[Candidate], device: Device) -> str:
    """Return the plans as text: a table with one line for each plan, and a note on the memory limit."""
    lines = [f"{'':>2} {'tokens':>11} {'memory GiB':>11} {'host GiB':>9} {'step s':>9} {'MFU':>5}  flags"]
    lines += [f"{number:>2} {plan.length:>11,} {plan.memory.total / GIB:>11.1f} {plan.memory.host / GIB:>9.1f} "
              f"{plan.time.total:>9.3g} "
              f"{100 * plan.time.mfu:>4.0f}%  {' '.join(plan.flags) or '(none)'}"
              for number, plan in enumerate(plans, start=1)]
    host = f" and {device.host_memory / GIB:.1f} GiB of host memory" if device.kind == "gpu" else ""
    return "\n".join([*lines, f"(each device has {device.memory / GIB:.1f} GiB{host}, of which plans use at most "
                              f"{100 * USABLE:.0f}%)"])


def launch_script(plan: Candidate, words: list[str], device: Device, devices_per_node: int) -> str:
    """Return a script that starts the plan on one node, or the SETTINGS of examples/slurm_pretrain.sh for several.

    It starts as it is, with made-up data, and with the values of ``FILLED_IN`` for flags that are missing.
    """
    missing = missing_flags(words)
    if has_schedule(words):
        model = words
    else:
        kept = _without(words, {"--seq-length", "--max-position-embeddings"})
        model = [*kept, "--seq-length", str(plan.length), "--max-position-embeddings", str(plan.length)]
    arrays = [f"MODEL=({shlex.join(model)})",
              f"TRAINING=({shlex.join(missing)})  # choose learning rate, iterations, evaluation",
              f"PARALLEL=({shlex.join(plan.flags)})",
              "DATA=(--mock-data --tokenizer-type NullTokenizer)  # --data-path PREFIX and your tokenizer's flags"]
    world, python = plan.run.parallel.world_size, shlex.quote(sys.executable)
    if world > devices_per_node:
        nodes = -(-world // devices_per_node)
        tasks = world // nodes if world % nodes == 0 else devices_per_node
        return "\n".join([f"# SETTINGS=THIS_FILE sbatch --nodes {nodes} --ntasks-per-node {tasks} "
                          "examples/slurm_pretrain.sh", *arrays,
                          f"NODES=${{NODES:-{nodes}}} NPROC=${{NPROC:-{tasks}}} DEVICE=${{DEVICE:-{device.name}}}",
                          f'if [ ! -x "$PYTHON" ]; then PYTHON={python}; fi', ""])
    script = CHECKOUT / "pretrain_gpt.py"
    program = shlex.quote(str(script)) if script.is_file() else "-m pretrain_gpt"
    start = "" if world == 1 else (
        f"-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node {world} ")
    return "\n".join(["#!/usr/bin/env bash", "set -euo pipefail", f"PYTHON=${{PYTHON:-{python}}}", *arrays,
                      f'"$PYTHON" {start}{program} "${{MODEL[@]}}" "${{TRAINING[@]}}" "${{PARALLEL[@]}}" '
                      '"${DATA[@]}" "$@"', ""])


def has_schedule(words: list[str]) -> bool:
    """Return whether the flags of a run say that its sequences grow."""
    return "--seq-length-schedule" in given_flags(words)


def _without(words: list[str], flags: set[str]) -> list[str]:
    """Return the command line without these flags, each of which takes one value."""
    kept, skip = [], False
    for word in words:
        name = word.split("=", 1)[0].replace("_", "-")
        if skip:
            skip = False
        elif name in flags:
            skip = "=" not in word
        else:
            kept.append(word)
    return kept


def draw(plan: Candidate, device: Device, output: Path) -> None:
    """Draw how the predicted memory of a plan, split into components, grows with the sequence length."""
    pyplot = load_pyplot()
    lengths = [plan.length * part // 16 for part in range(1, 21)]
    step = max(1, plan.run.parallel.sp * 2 * plan.run.parallel.tp)
    lengths = sorted({max(step, length // step * step) for length in lengths})
    plans = [predict(with_length(plan.run, length), device=device.kind) for length in lengths]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.stackplot(lengths, [[each.components[name] / GIB for each in plans] for name in COMPONENTS],
                   labels=[LABELS.get(name, name) for name in COMPONENTS],
                   colors=pyplot.colormaps["tab10"].colors)
    axes.axhline(device.memory / GIB, color="black", linestyle="--", linewidth=1, label=f"{device.name}")
    axes.set(xlabel="tokens in the sequence", ylabel="GiB on a device", title=" ".join(plan.flags))
    axes.title.set_fontsize(8)
    axes.legend(loc="upper left", fontsize=8)
    save_picture(figure, output, dpi=130, flag="--plot")


def main(argv: list[str]) -> int:
    own, words = build_parser().parse_known_args(argv)
    problems = [f"--{name.replace('_', '-')} {value} must be at least 1." for name, value in (
        ("devices", own.devices), ("devices_per_node", own.devices_per_node), ("top", own.top)) if value < 1]
    device, wrong = device_of_flags(own.device, own.device_memory, own.host_memory,
                                    min(own.devices, own.devices_per_node))
    problems += wrong
    problems += picture_problems(own.plot, "--plot")
    if own.max_seq_length and has_schedule(words):
        problems.append("--max-seq-length looks for the longest sequence, and --seq-length-schedule fixes the "
                        "lengths; leave one of the two out.")
    if problems:
        raise ConfigError(problems)
    base = read_base(words)
    if given := technique_flags(base.memory):
        print(f"{' '.join(given)}: left out, since this tool chooses the memory techniques; plan with them by "
              "pretrain_gpt.py --dry-run", file=sys.stderr)
    plans = search(base, own.devices, device, own.devices_per_node, longest=own.max_seq_length)
    if not plans:
        host = f" and {device.host_memory / GIB:.1f} GiB of host memory" if device.kind == "gpu" else ""
        raise ConfigError(f"no layout of {own.devices} x {device.name} ({device.memory / GIB:.1f} GiB{host} each) fits "
                          "this model and batch; give more --devices, more --host-memory, a shorter --seq-length, or a "
                          "smaller --micro-batch-size. All techniques that docs/how-to/plan-a-run.md lists were tried.")
    best = plans[:own.top]
    if own.json:
        print(json.dumps([{"flags": plan.flags, "tokens": plan.length, "memory": plan.memory.total,
                           "host_memory": plan.memory.host, "step_seconds": plan.time.total, "mfu": plan.time.mfu}
                          for plan in best], indent=1))
    else:
        run = best[0].run
        print(f"{parameters(run) / 1e9:.3f} B parameters on {own.devices} x {device.name}, global batch "
              f"{run.train.global_batch_size}; {counted(len(plans), 'plan')} {'fits' if len(plans) == 1 else 'fit'}")
        print(table(best, device))
        print("\n".join([reason(plans[0], plans[1:], longest=own.max_seq_length), *best[0].memory.notes]))
    if own.output:
        with complete_file(own.output, "--output") as file:
            file.write(launch_script(best[0], words, device, own.devices_per_node).encode("utf-8"))
        print(f"wrote {own.output}", file=sys.stderr)
    if own.plot:
        draw(best[0], device, own.plot)
        print(f"wrote {own.plot}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    run_program(main)
