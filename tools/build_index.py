#!/usr/bin/env python3
"""Build the index cache of a run beforehand, on a machine without GPUs such as a login node.

usage: build_index.py [--world-size N] FLAGS OF pretrain_gpt.py

Example:

    python tools/build_index.py --world-size 64 --model-preset llama3-8b --data-path data/corpus_text_document \\
        --tokenizer-type NullTokenizer --vocab-size 50257 --split 95,5,0 --seq-length 1024 --global-batch-size 64 \\
        --train-iters 100 --lr 1e-4 --data-cache-path shared/index

Give the flags of the run as they are. The order of the samples depends on the data, the seed, --split, --seq-length and
the number of samples, which follows from the batch size and the iterations. A run with the same flags then finds its
index in --data-cache-path (default: cache/megatron_sp beside the data) and starts without building anything. The tool
prints how many samples, epochs and tokens the run takes of each data set.

--world-size N: number of processes of the run (default: the variable WORLD_SIZE, else the product of the parallel
degrees). It matters only where no --global-batch-size is given.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
if (CHECKOUT / "megatron_sp").is_dir():  # false once pip has installed this file, which then finds the package anyway
    sys.path.insert(0, str(CHECKOUT))

from megatron_sp.config.load import load_run_of_world  # noqa: E402
from megatron_sp.errors import ConfigError  # noqa: E402
from megatron_sp.runtime import announced_world_size, run_program, use_only_cpu  # noqa: E402


def main(argv: list[str]) -> int:
    if not argv or "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0 if argv else 2
    started = time.monotonic()
    use_only_cpu()
    run, notes = load_run_of_world(argv, announced_world_size())
    data = run.data
    if data.mock_data:
        raise ConfigError("--mock-data needs no index; give the data of the run.")
    if data.dataset_provider and not data.data_cache_path:
        raise ConfigError("--dataset-provider needs --data-cache-path here: there is no place beside the data.")

    from megatron_sp.layout.length_schedule import phases
    from megatron_sp.train.checkpoints.state import TrainState
    from megatron_sp.train.setup import choose_tokenizer, run_datasets

    for note in notes:
        print(note, flush=True)
    tokenizer = choose_tokenizer(run) if data.dataset_provider else None
    for phase in (*phases(run),) or (None,):
        print(run_datasets(run, tokenizer, TrainState(), phase, must_store=True).describe())
    where = data.data_cache_path or "cache/megatron_sp beside the data"
    print(f"The index is in {where}; built or found in {time.monotonic() - started:.1f} s.")
    return 0


if __name__ == "__main__":
    run_program(main)
