"""The simulator passes torch's own schedules, and a run's real degrees are checked."""

from __future__ import annotations

import pytest

from megatron_sp.config.load import load_run
from megatron_sp.layout.rendezvous import Post, Wait, waiting
from megatron_sp.layout.schedules import SCHEDULES, takes_microbatches
from megatron_sp.proof import communication, verify
from megatron_sp.proof.communication import TORCH_TRANSPORTS, order_problem, torch_programs
from tests.helpers.configs import STYLES, TRAINING
from tools import verify_layout


@pytest.mark.parametrize("most", [4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_schedules_of_torch_come_to_their_end(schedule: str, most: int) -> None:
    facts, tried = SCHEDULES[schedule], 0
    for pp in range(2, most + 1):
        for stages in {facts.only_stages_per_rank or 1, facts.only_stages_per_rank or 2}:
            for microbatches in range(1, 2 * pp + 3):
                if not takes_microbatches(schedule, microbatches, pp) or (schedule == "interleaved" and stages == 1):
                    continue
                programs = torch_programs(schedule, pp, stages, microbatches)
                tried += 1
                for name, rule in TORCH_TRANSPORTS.items():
                    assert waiting(programs, rule) == [], (pp, stages, microbatches, name)
    assert tried >= 3


def test_ranks_that_wait_for_their_sends_before_they_receive_are_seen() -> None:
    programs = []
    for program in torch_programs("1f1b", 2, 1, 2):
        messages = [message for step in program if isinstance(step, Post) for message in step.messages]
        programs.append([each for message in sorted(messages, key=lambda message: not message.sends)
                         for each in (Post((message,)), Wait(message))])
    assert waiting(programs, TORCH_TRANSPORTS["gloo"])


def test_the_tool_says_it_and_starts_no_process(monkeypatch: pytest.MonkeyPatch,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(communication, "order_problem", lambda run: "rank 1 waits for the send to rank 0 for ever")
    monkeypatch.setattr(verify, "verify", None)     # calling it would be an error
    words = (f"{STYLES['llama']} --pipeline-model-parallel-size 2 --seq-length 64 --global-batch-size 4 --train-iters 2"
             " --lr 1e-3 --mock-data --vocab-size 97")
    assert verify_layout.main(words.split()) == 1
    assert "FAIL: with the degrees of the real run" in capsys.readouterr().out


@pytest.mark.parametrize("flags", ["--sequence-chunk-size 4 --seq-length 48", "--pipeline-schedule zero-bubble", ""])
def test_the_real_degrees_are_checked(flags: str) -> None:
    words = [*TRAINING, *STYLES["llama"].split(), *("--num-layers 6 --pipeline-model-parallel-size 3 "
             f"--global-batch-size 6 --micro-batch-size 1 {flags}").split()]
    assert order_problem(load_run(words, 3)[0]) == ""
