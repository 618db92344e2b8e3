#!/usr/bin/env python3
"""Measure the time from the launch to the first training iteration, and compare it with a minimal program.

    python benchmarks/startup.py --repeats 3

The script starts in turn ``pretrain_gpt.py`` with a tiny model and a bare program that imports torch and makes one FSDP
step, both under torchrun with two processes. It compares the times after which they print their first iteration. The
exit status is 1 if the difference is above ``--limit``.

It also measures what a large model adds: the processor time of drawing its initial weights. The time grows with the
number of values, so weights of the shape of Llama-3-8B's are enough, and the result is seconds for a billion values.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

BARE = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
device = torch.device("cuda", dist.get_rank()) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)).to(device)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 32, device=device)).sum().backward()
optimizer.step()
if dist.get_rank() == 0:
    print("iteration 1", flush=True)
dist.barrier()
dist.destroy_process_group()
"""

TINY = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "64",
        "--position-embedding-type", "rope", "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-3",
        "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "256", "--eval-iters", "0",
        "--log-interval", "1", "--ulysses-size", "2", "--zero-stage", "3"]


def seconds_to_first_iteration(command: list[str], directory: Path) -> float:
    """Run ``command`` in ``directory`` and return the seconds until it prints the line of iteration 1.

    Raises:
        SystemExit: the command failed or printed no such line; the message has its output.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    started = time.monotonic()
    first, output = None, []
    with subprocess.Popen(command, cwd=directory, env=environment, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            words = line.replace("/", " ").split()
            if first is None and "iteration" in words and words[words.index("iteration") + 1:][:1] == ["1"]:
                first = time.monotonic() - started
    if first is None or process.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{''.join(output)}")
    return first


def measure(repeats: int) -> dict[str, list[float]]:
    """Return the times of both programs. They take turns, so that other work on the machine slows them equally."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
                "--nproc-per-node", "2"]
    times: dict[str, list[float]] = {"bare": [], "pretrain_gpt": []}
    with tempfile.TemporaryDirectory() as scratch:
        bare = Path(scratch, "bare.py")
        bare.write_text(BARE)
        commands = {"bare": [*launcher, str(bare)], "pretrain_gpt": [*launcher, str(ROOT / "pretrain_gpt.py"), *TINY]}
        for _ in range(repeats):
            for name, command in commands.items():
                times[name].append(seconds_to_first_iteration(command, Path(scratch)))
                print(f"{name}: {times[name][-1]:.1f} s", flush=True)
    return times


def seconds_per_billion(repeats: int) -> float:
    """Return the median processor time in which one core draws a billion initial values."""
    import torch

    from megatron_sp.config.schema import Model
    from megatron_sp.model.init import initial_value

    torch.set_num_threads(1)
    shape, seconds = (14336, 4096), []
    for number in range(repeats + 1):  # the first one touches new memory
        started = time.process_time()
        initial_value(f"layers.{number}.mlp.up.weight", shape, Model(), 1234)
        seconds.append(time.process_time() - started)
    return statistics.median(seconds[1:]) / (shape[0] * shape[1] / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each program (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=3.0,
                        help="seconds that pretrain_gpt.py may take beyond the bare one (default: %(default)s)")
    arguments = parser.parse_args()
    times = measure(arguments.repeats)
    bare, ours = statistics.median(times["bare"]), statistics.median(times["pretrain_gpt"])
    print(f"median: bare {bare:.1f} s, pretrain_gpt {ours:.1f} s, difference {ours - bare:.1f} s "
          f"(limit {arguments.limit:g} s)")
    print(f"drawing initial weights: {seconds_per_billion(arguments.repeats):.1f} s of processor time for a billion")
    sys.exit(ours - bare > arguments.limit)


if __name__ == "__main__":
    main()
