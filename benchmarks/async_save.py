#!/usr/bin/env python3
"""Measure how much training time a checkpoint costs: one for which training waits, and one written in the background.

    python benchmarks/async_save.py --hidden-size 768 --layers 12
    torchrun --nproc-per-node 2 benchmarks/async_save.py --directory /tmp/async_save

One process group trains the same model all the time. The rounds alternate: some steps without a save, the same number
after a save for which training waits, and the same number after one in the background, which is finished within the
round. The time lost to a save is its round's time minus that of the round without a save; the medians are reported.
On a machine with other work, more rounds give steadier figures.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_sp import runtime  # noqa: E402
from megatron_sp.errors import ConfigError  # noqa: E402
from megatron_sp.output_files import write_json  # noqa: E402
from megatron_sp.progress import progress_bar  # noqa: E402

KINDS = ("none", "sync", "async")


def build(arguments: argparse.Namespace, environment: runtime.Environment) -> tuple[Callable[[], None], Any, Any, int]:
    """Return a function that makes one training step, a saver in the foreground, one in the background, and the bytes
    of all weights and moments.
    """
    import torch

    from megatron_sp.checkpoint.saving.saver import Saver
    from megatron_sp.config.load import load_run
    from megatron_sp.config.resolve import with_vocab
    from megatron_sp.data.batch import Microbatch
    from megatron_sp.model.build import build_model
    from megatron_sp.parallel.mesh import ParallelMesh
    from megatron_sp.parallel.pipeline import own_parameters
    from megatron_sp.train.train_step import TrainStep

    vocab, length = 4096, arguments.seq_length
    flags = (f"--num-layers {arguments.layers} --hidden-size {arguments.hidden_size} --num-attention-heads "
             f"{arguments.hidden_size // 64} --position-embedding-type rope --normalization RMSNorm --swiglu "
             "--disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --zero-stage 3 --micro-batch-size 1 "
             f"--seq-length {length} --train-iters 1000 --lr 1e-4 --lr-decay-style constant --mock-data "
             f"--tokenizer-type NullTokenizer --vocab-size {vocab}")
    run = with_vocab(load_run(flags.split(), environment.world_size)[0], vocab)
    device = runtime.start(run.parallel, environment)
    mesh = ParallelMesh.build(run.parallel, device)
    step = TrainStep.build(run, build_model(run, mesh), mesh)
    text = torch.randint(0, vocab, (1, length + 1), generator=torch.Generator().manual_seed(1 + mesh.global_rank))
    batch = Microbatch(text[:, :-1].contiguous(), text[:, 1:].contiguous(), torch.arange(length).unsqueeze(0),
                       torch.zeros(1, dtype=torch.int64), length).to(device)

    def train() -> None:
        step.train([batch], scheduler_samples=0)

    sync, background = (Saver(arguments.directory, step.model, step.optimizer, run, group)
                        for group in (None, mesh.new_background_group()))
    parameters = sum(p.numel() for p in dict(own_parameters(step.model)).values())
    return train, sync, background, 12 * parameters      # fp32 weight and two moments


def measure(arguments: argparse.Namespace, environment: runtime.Environment) -> dict[str, Any]:
    """Return the medians: seconds of a round and a step, lost to each kind of save, and until a save was complete."""
    import torch.distributed as dist

    train, sync, background, num_bytes = build(arguments, environment)
    state: dict[str, Any] = {"train": {}, "schedule": {}, "loss_scaler": {}}
    for saver in (sync, background):      # makes the moments, the plan and the staging memory
        train()
        saver.save(1, state, wait=saver is sync)
        saver.finish()
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    complete: dict[str, list[float]] = {"sync": [], "async": []}
    blocked = []
    for _ in progress_bar(range(arguments.rounds), desc="rounds", disable=None if environment.rank == 0 else True):
        for kind in KINDS:
            dist.barrier()
            start = time.perf_counter()
            saver = sync if kind == "sync" else background
            saved = saver.save(1, state, wait=kind == "sync") if kind != "none" else None
            for _ in range(arguments.steps):
                train()
            if kind == "async":
                saved = saver.finish()
                blocked.append(saved.blocked)
            dist.barrier()
            times[kind].append(time.perf_counter() - start)
            if saved is not None:
                complete[kind].append(saved.seconds)
    median = {kind: statistics.median(values) for kind, values in times.items()}
    lost = {kind: statistics.median(mine - plain for mine, plain in zip(times[kind], times["none"]))
            for kind in ("sync", "async")}
    return {"ranks": environment.world_size, "state_bytes": num_bytes, "steps_per_round": arguments.steps,
            "rounds": arguments.rounds, "step_seconds": median["none"] / arguments.steps, "round_seconds": median,
            "seconds_lost": lost, "seconds_blocked_async": statistics.median(blocked),
            "seconds_until_complete": {kind: statistics.median(values) for kind, values in complete.items()}}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12, metavar="N", help="layers (default: %(default)s)")
    parser.add_argument("--hidden-size", type=int, default=768, metavar="N",
                        help="width, a multiple of 64 (default: %(default)s, with 12 layers 1 GiB of state)")
    parser.add_argument("--seq-length", type=int, default=256, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="steps of a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds (default: %(default)s)")
    parser.add_argument("--directory", default="", metavar="DIR",
                        help="where the checkpoints go (default: a temporary directory)")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="also write the figures to this file")
    arguments = parser.parse_args(argv)
    environment = runtime.launch_environment()
    if environment.world_size > 1 and not arguments.directory:
        raise ConfigError("several ranks need --directory DIR, which all of them see")
    with tempfile.TemporaryDirectory(prefix="async_save_") as place:
        arguments.directory = arguments.directory or place
        result = measure(arguments, environment)
    if environment.rank == 0:
        lost = result["seconds_lost"]
        print(f"{result['state_bytes'] / 2**30:.2f} GiB of weights and moments on {result['ranks']} rank(s); a step "
              f"takes {result['step_seconds']:.2f} s\n"
              f"save that training waits for: {lost['sync']:.2f} s lost\n"
              f"save in the background:       {lost['async']:.2f} s lost, of which training waited "
              f"{result['seconds_blocked_async']:.2f} s; complete after "
              f"{result['seconds_until_complete']['async']:.2f} s")
        if arguments.output:
            write_json(arguments.output, result, "--output")
    runtime.stop()
    return 0


if __name__ == "__main__":
    runtime.run_program(main)
