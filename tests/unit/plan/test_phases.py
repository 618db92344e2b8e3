"""Plans of runs whose sequences grow: every phase, and the longest or the chosen one in full."""

from __future__ import annotations

import json

import pytest

from megatron_sp.config.cli.plan_flags import split_plan_flags
from megatron_sp.plan.dry_run import dry_run

FLAGS = ("--dry-run --world-size 8 --device H100 --model-preset llama3-8b --bf16 --recompute-granularity full "
         "--mock-data --global-batch-size 32 --train-iters 100 --lr 1e-4 --zero-stage 3 "
         "--seq-length-schedule 0:8K 50M:32K 100M:128K")


def planned(capsys: pytest.CaptureFixture[str], more: str) -> str:
    flags, words = split_plan_flags(f"{FLAGS} {more}".split())
    assert flags is not None and dry_run(flags, words, 1) == 0
    return capsys.readouterr().out


def test_every_phase_is_planned_and_the_longest_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    plan = json.loads(planned(capsys, "--ulysses-size 8 --json"))
    assert [(phase["length"], phase["sequences"], phase["first_token"]) for phase in plan["phases"]] == [
        (8192, 512, 0), (32768, 128, 50331648), (131072, 32, 100663296)]
    assert plan["batch"]["tokens_per_rank"] == 131072 // 8
    memory = [phase["memory"] for phase in plan["phases"]]
    assert memory == sorted(memory) and plan["memory"]["peak"] == memory[-1]
    text = planned(capsys, "--ulysses-size 8")
    assert "phase 1: sequences of 8,192 tokens from 0 tokens on, 512 in a step" in text and "the longest phase:" in text


def test_the_plan_of_one_phase_is_of_its_length(capsys: pytest.CaptureFixture[str]) -> None:
    plan = json.loads(planned(capsys, "--seq-length-phase 1 --micro-batch-size 4 --json"))
    assert "phases" not in plan and plan["batch"] == {
        "global": 512, "micro": 4, "data_parallel": 8, "microbatches": 16, "tokens_per_rank": 8192, "chunks": 1}
