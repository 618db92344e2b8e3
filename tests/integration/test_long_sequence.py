"""Memory of the real program: within the plan, which fails when a technique is switched off. Linux only."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron_sp.config.load import load_run
from megatron_sp.config.resolve import with_vocab
from megatron_sp.plan.memory import predict
from tests.integration.programs import ROOT, run_program

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")

VOCAB = 16000
COMMON = ("--num-attention-heads 8 --group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm "
          "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights "
          "--attention-dropout 0 --hidden-dropout 0 --mock-data --micro-batch-size 1 --global-batch-size 1 "
          "--train-iters 1 --lr 1e-3 --eval-iters 0 --optimizer sgd --sgd-momentum 0 ")
MODEL = COMMON + f"--num-layers 3 --hidden-size 128 --kv-channels 128 --ffn-hidden-size 1536 --vocab-size {VOCAB} " \
                 "--seq-length 8192 "
TINY = COMMON + "--num-layers 1 --hidden-size 32 --kv-channels 16 --ffn-hidden-size 64 --vocab-size 64 --seq-length 64 "
RECOMPUTE, LOSS = "--recompute-granularity full ", "--loss-tile-size 128 "
MLP, GROUPS = "--mlp-tile-size 256 ", "--attention-head-groups 4 "
#: Name -> the flags that switch several techniques on, and by name of a technique the same flags without it.
CASES = {"all": (RECOMPUTE + LOSS + MLP + GROUPS,
                 {"loss": RECOMPUTE + "--loss-tile-size 8192 " + MLP + GROUPS, "mlp": RECOMPUTE + LOSS + GROUPS,
                  "head groups": RECOMPUTE + LOSS + MLP}),
         "recompute": (RECOMPUTE + LOSS + MLP, {"recompute": LOSS + MLP})}
#: Bytes that are not tensors: library code that the tiny model at start-up did not use yet, and kernels' own buffers.
LIBRARIES = 64 * 2**20


def predicted(flags: str) -> int:
    return predict(with_vocab(load_run((MODEL + flags).split(), 1)[0], VOCAB)).total


def bound(flags: str) -> float:
    """Return the most bytes that a run with these flags may use above those after start-up."""
    return 1.1 * predicted(flags) + LIBRARIES


def peak(flags: str, directory: Path) -> int:
    """Return the peak of the resident bytes of ``pretrain_gpt.py``."""
    report = directory / "peak.json"
    done = run_program(sys.executable, ROOT / "tools/peak_memory.py", "--json", report, "--", sys.executable,
                       "pretrain_gpt.py", *flags.split(), timeout=240, OMP_NUM_THREADS="1",
                       MALLOC_MMAP_THRESHOLD_="1048576", MALLOC_TRIM_THRESHOLD_="1048576", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    return int(json.loads(report.read_text())["peaks"][0])


@pytest.mark.parametrize("name", ["all", pytest.param("recompute", marks=pytest.mark.slow)])
def test_within_a_bound_that_every_technique_is_needed_for(name: str, tmp_path: Path) -> None:
    flags, without = CASES[name]
    for technique, others in without.items():
        assert predicted(others) > bound(flags), technique
    above = peak(MODEL + flags, tmp_path) - peak(TINY, tmp_path)
    assert above < bound(flags), f"{above / 2**20:.0f} MiB, bound {bound(flags) / 2**20:.0f} MiB"


@pytest.mark.slow
def test_the_measurement_sees_a_technique_switched_off(tmp_path: Path) -> None:
    flags, without = CASES["all"]
    above = peak(MODEL + without["loss"], tmp_path) - peak(TINY, tmp_path)
    assert above > bound(flags)


@pytest.mark.parametrize("name, tokens", [("long_sequence", 65536), ("million_tokens", 1000448)])
def test_example_names_its_command(name: str, tokens: int) -> None:
    one = run_program("bash", f"examples/{name}_cpu.sh", DRY_RUN="1")
    two = run_program("bash", f"examples/{name}_cpu.sh", "--ulysses-size", "2", DRY_RUN="1")
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    assert f"--seq-length {tokens}" in one.stdout and "torch.distributed.run" not in one.stdout
    assert "--nproc-per-node 2" in two.stdout and "--ulysses-size 2" in two.stdout
