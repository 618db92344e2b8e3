"""``pretrain_gpt.py`` logs the same losses and gradient norms in every layout, to 1e-5.

One tiny fp32 model, real text, eight steps; the learning rate is high enough for an error in one
step to show in the next. Most layouts call the program's ``main`` on forked ranks, which saves the
imports; a few go through torchrun, as users do, and one through plain python.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.spawn import run_ranks
from tests.integration.programs import TORCHRUN

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-5
ITERATIONS = 8
BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-key-value-heads 2 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights "
    "--make-vocab-size-divisible-by 48 --tokenizer-type NullTokenizer --vocab-size 128 --seq-length 64 "
    "--global-batch-size 8 --micro-batch-size 1 --attention-dropout 0 --lr 2e-3 --min-lr 1e-4 "
    f"--lr-decay-style cosine --lr-warmup-iters 2 --train-iters {ITERATIONS} --split 1,0,0 --eval-iters 0 "
    "--log-interval 1 --num-workers 0 --seed 42 --save run --save-interval 100"
).split()
SIX_HEADS = "--hidden-size 48 --num-attention-heads 6 --num-key-value-heads 6"
PP2 = "--pipeline-model-parallel-size 2"
TP2, SP, U2, U4 = "--tensor-model-parallel-size 2", "--sequence-parallel", "--ulysses-size 2", "--ulysses-size 4"

#: Name, number of ranks, flags of the layout, and flags of the model, which the run on one process gets too.
LAYOUTS = [
    ("ulysses 2", 2, U2, ""),
    ("ulysses 4", 4, U4, ""),
    ("tp 2", 2, TP2, ""),
    ("tp 2, megatron sp", 2, f"{TP2} {SP}", ""),
    ("dp 2, zero 0", 2, "--zero-stage 0", ""),
    ("dp 2, zero 1", 2, "--zero-stage 1", ""),
    ("dp 2, zero 2", 2, "--zero-stage 2", ""),
    ("dp 2, zero 3", 2, "--zero-stage 3", ""),
    ("ulysses 2, tp 2", 4, f"{U2} {TP2}", ""),
    ("ulysses 2, dp 2, zero 3", 4, f"{U2} --zero-stage 3", ""),
    ("ulysses 2, tp 2, dp 2", 8, f"{U2} {TP2}", ""),
    ("ulysses 2, tp 2, dp 2, megatron sp, zero 2", 8, f"{U2} {TP2} {SP} --zero-stage 2", ""),
    ("accumulation 1", 1, "--micro-batch-size 8", ""),
    ("accumulation 2", 1, "--micro-batch-size 4", ""),
    ("accumulation 4, dp 2, zero 1", 2, "--zero-stage 1 --micro-batch-size 1", ""),
    ("accumulation 2, dp 2, zero 2", 2, "--zero-stage 2 --micro-batch-size 2", ""),
    ("micro-batch 2, ulysses 2", 2, f"{U2} --micro-batch-size 2", ""),
    ("recompute", 1, "--recompute-granularity full", ""),
    ("recompute, ulysses 2, zero 3", 2, f"{U2} --zero-stage 3 --recompute-granularity full", ""),
    ("kv heads 1, ulysses 4", 4, U4, "--num-key-value-heads 1"),
    ("kv heads 1, tp 2", 2, TP2, "--num-key-value-heads 1"),
    ("6 heads, ulysses 4", 4, U4, SIX_HEADS),
    ("ring 2, ulysses 2", 4, f"--ring-size 2 {U2}", ""),
    ("pp 2", 2, PP2, ""),
    ("pp 2, zbv", 2, f"{PP2} --pipeline-schedule zbv", "--num-layers 4"),
    ("pp 2, ring 2, tp 2", 8, f"{PP2} --ring-size 2 {TP2} {SP}", ""),
    ("eod mask, pp 2, ulysses 2", 4, f"{PP2} {U2}", "--eod-mask-loss"),
    ("eod mask, ulysses 2", 2, U2, "--eod-mask-loss"),
    ("eod mask, dp 2, zero 2", 2, "--zero-stage 2", "--eod-mask-loss"),
]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of a token set of real text: the lines of the licence, one token a character."""
    directory = tmp_path_factory.mktemp("text")
    with open(directory / "text.jsonl", "w") as file:
        for line in filter(str.strip, (ROOT / "LICENSE").read_text().splitlines()):
            tokens = [ord(letter) for letter in line if ord(letter) < 127]
            file.write(json.dumps({"text": " ".join(map(str, tokens))}) + "\n")
    subprocess.run([sys.executable, ROOT / "tools" / "preprocess_data.py", "--input", directory / "text.jsonl",
                    "--output-prefix", directory / "text", "--tokenizer-type", "NullTokenizer", "--vocab-size", "128",
                    "--append-eod", "--workers", "1"], check=True, timeout=120, capture_output=True)
    return str(directory / "text_text_document")


@pytest.fixture(scope="session")
def half_masked(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of a token set in which every sample ends in 40 end-of-document tokens of 64.

    With ``--eod-mask-loss`` at least one of two Ulysses ranks never has a valid label.
    """
    from megatron_sp.data.token_files.indexed_dataset import best_dtype
    from megatron_sp.data.token_files.token_writer import IndexedDatasetBuilder

    prefix = str(tmp_path_factory.mktemp("half") / "half")
    letters = np.frombuffer((ROOT / "LICENSE").read_bytes(), dtype=np.uint8) % 127
    with IndexedDatasetBuilder(prefix, best_dtype(128)) as builder:
        for start in range(0, 24 * 80, 24):
            builder.add_document(np.concatenate([letters[start:start + 24], np.full(40, 127)]))
        builder.finalize()
    return prefix


@pytest.fixture(scope="session")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[str]], list[dict[str, float]]]:
    """Return a function that trains on one process and returns the metrics; it trains once for each set of flags."""
    known: dict[tuple[str, ...], list[dict[str, float]]] = {}

    def run(flags: Sequence[str]) -> list[dict[str, float]]:
        key = tuple(flags)
        if key not in known:
            known[key] = train(flags, 1, tmp_path_factory.mktemp("one"))
        return known[key]

    return run


def train(flags: Sequence[str], world: int, directory: Path) -> list[dict[str, float]]:
    """Train on forked ranks and return the metrics."""
    run_ranks(_main, world, [*BASE, *flags], str(directory), timeout=120)
    output = (directory / "output_0.txt").read_text()
    assert "no effect" not in output, output  # a flag without effect would leave its feature untested
    return metrics(directory)


def _main(argv: list[str], directory: str) -> None:
    """Run the program on one rank, in ``directory``, and write its output to a file there."""
    import pretrain_gpt

    os.chdir(directory)
    with open(f"output_{os.environ['RANK']}.txt", "w") as file, contextlib.redirect_stdout(file):
        code = pretrain_gpt.main(argv)
    assert not code, code


def launch(command: Sequence[str | Path], flags: Sequence[str], directory: Path) -> list[dict[str, float]]:
    """Start the real script with a launcher and return the metrics."""
    done = subprocess.run([*command, ROOT / "pretrain_gpt.py", *BASE, *flags], cwd=directory, text=True,
                          capture_output=True, timeout=180, env=os.environ | {"PYTHONPATH": ""})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return metrics(directory)


def metrics(directory: Path) -> list[dict[str, float]]:
    """Return the rows of all steps from the metrics file."""
    rows = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "lm_loss" in row]
    assert [row["iteration"] for row in rows] == list(range(1, ITERATIONS + 1))
    return rows


def assert_equal(rows: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    """Compare loss, gradient norm and counters of every iteration."""
    for row, want in zip(rows, expected, strict=True):
        for name in ("lm_loss", "grad_norm", "learning_rate"):
            assert row[name] == pytest.approx(want[name], rel=TOLERANCE, abs=0), f"{name} at {want['iteration']}"
        for name in ("consumed_samples", "consumed_tokens", "global_batch_size", "skipped"):
            assert row[name] == want[name], f"{name} at {want['iteration']}"


@pytest.mark.parametrize(("name", "world", "layout", "model"), LAYOUTS, ids=[case[0] for case in LAYOUTS])
def test_layout(name: str, world: int, layout: str, model: str, text: str, tmp_path: Path,
                one_process: Callable[[Sequence[str]], list[dict[str, float]]]) -> None:
    flags = ["--data-path", text, *model.split()]
    assert_equal(train([*flags, *layout.split()], world, tmp_path), one_process(flags))


@pytest.mark.parametrize(("world", "layout"), [(2, U2), (4, U4), (4, f"{U2} --zero-stage 3"), (4, f"{U2} {TP2} {SP}")])
def test_shard_with_every_label_masked(world: int, layout: str, half_masked: str, tmp_path: Path,
                                       one_process: Callable[[Sequence[str]], list[dict[str, float]]]) -> None:
    flags = ["--data-path", half_masked, "--eod-mask-loss"]
    rows = train([*flags, *layout.split()], world, tmp_path)
    assert all(row["lm_loss"] > 0 for row in rows)
    assert_equal(rows, one_process(flags))


def test_masking_changes_the_loss(text: str, one_process: Callable[[Sequence[str]], list[dict[str, float]]]) -> None:
    """The text has end-of-document tokens, so the masked runs above really mask something."""
    plain, masked = (one_process(["--data-path", text, *flags]) for flags in ([], ["--eod-mask-loss"]))
    assert all(row["lm_loss"] != other["lm_loss"] for row, other in zip(plain, masked, strict=True))
    assert plain[-1]["lm_loss"] < plain[0]["lm_loss"]


@pytest.mark.parametrize("world", [0, 2, 4], ids=["python", "torchrun 2", "torchrun 4"])
def test_real_launch(world: int, text: str, tmp_path: Path,
                     one_process: Callable[[Sequence[str]], list[dict[str, float]]]) -> None:
    flags = ["--data-path", text]
    layout = {0: "", 2: f"{U2} --zero-stage 3", 4: f"{U2} {TP2} {SP}"}[world]
    launcher = [*TORCHRUN, str(world)] if world else [sys.executable]
    assert_equal(launch(launcher, [*flags, *layout.split()], tmp_path), one_process(flags))
