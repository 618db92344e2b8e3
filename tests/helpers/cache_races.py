"""Build an index cache from many processes at once, and kill one in the middle of a build.

This module runs as a program, with one thread and without large imports, so that it can fork.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np

from megatron_sp.config.schema import Data
from megatron_sp.data.build import build_datasets
from megatron_sp.data.gpt_dataset import GPTDataset
from megatron_sp.data.index_cache import IndexCache
from tests.helpers.kills import KILLED, run_until_change


def start_together(work: Path, words: list[str], processes: int, rounds: int) -> list[dict[str, int]]:
    """Return for each round how many processes succeeded and how often each kind of array was built."""
    return json.loads(_run("race", str(work), str(processes), str(rounds), *words))


def killed_builds(work: Path) -> int:
    """Build an entry in ``work/N``, killed before its change N of the file system; then build it again.

    Returns:
        The number of attempts; the last one was not killed. Each leaves the directory as the second build left it.
    """
    return int(_run("kill", str(work)))


def _run(*words: str) -> str:
    result = subprocess.run([sys.executable, "-m", "tests.helpers.cache_races", *words], capture_output=True, text=True,
                            check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def _race(work: Path, processes: int, rounds: int, words: list[str]) -> list[dict[str, int]]:
    found = []
    for number in range(rounds):
        cache, log = work / f"cache{number}", work / f"log{number}"
        log.touch()
        begin = time.monotonic() + 0.02
        children = []
        for _ in range(processes):
            child = os.fork()
            if child == 0:
                _one_of_many(cache, log, words, begin)
            children.append(child)
        succeeded = sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 for child in children)
        built = log.read_text().split()
        found.append({"succeeded": succeeded, **{kind: built.count(kind) for kind in ("gpt", "blend")}})
    return found


def _one_of_many(cache: Path, log: Path, words: list[str], begin: float) -> None:
    """Build the training set of a blend at the same moment as others, note each array built, and exit."""
    code = 1
    try:
        store = IndexCache.get

        def counting(self: IndexCache, description: dict, build: object) -> dict[str, np.ndarray]:
            def counted() -> dict[str, np.ndarray]:
                with open(log, "a") as file:
                    file.write(f"{description['kind']}\n")
                return build()  # type: ignore[operator]

            return store(self, description, counted)

        IndexCache.get = counting  # type: ignore[method-assign]
        time.sleep(max(0.0, begin - time.monotonic()))
        data = Data(seq_length=16, data_path=tuple(words), split="100", data_cache_path=str(cache))
        train = build_datasets(data, None, (300, 0, 0), 1).train
        assert train is not None and all(isinstance(member, GPTDataset) for member in train.datasets)  # type: ignore
        assert len(train.window(299, 0, 17)) == 17
        code = 0
    finally:
        os._exit(code)


def _kill(work: Path) -> int:
    number, code = 0, KILLED
    while code == KILLED:
        cache = IndexCache(str(work / str(number)))
        code = run_until_change(number, partial(cache.get, {"a": 1}, _arrays))
        cache.get({"a": 1}, _arrays)
        number += 1
    return number


def _arrays() -> dict[str, np.ndarray]:
    return {"x": np.arange(50_000), "y": np.ones(3)}


if __name__ == "__main__":
    if sys.argv[1] == "race":
        print(json.dumps(_race(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])))
    else:
        print(_kill(Path(sys.argv[2])))
