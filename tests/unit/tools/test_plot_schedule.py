"""Pipeline schedules as drawn: the known bubbles, and every step once and in a possible order."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_sp.config.load import load_run
from megatron_sp.plan.step_time import pipeline_bubble
from tests.integration.programs import run_tool
from tools import plot_schedule


@pytest.mark.parametrize(("schedule", "per_rank"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 3),
                                                    ("zero-bubble", 1), ("zero-bubble", 2), ("zbv", 2),
                                                    ("dualpipev", 2)])
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (4, 8), (4, 16)])
def test_each_step_once_and_in_order(schedule: str, per_rank: int, pp: int, microbatches: int) -> None:
    orders = plot_schedule.order_of(schedule, pp, per_rank, microbatches)
    forwards = [step for order in orders for step in order if step[0] == "F"]
    assert sorted(forwards) == [("F", stage, number) for stage in range(pp * per_rank)
                                for number in range(microbatches)]
    backwards = [step[1:] for order in orders for step in order if step[0] in "BI"]
    assert sorted(backwards) == sorted(step[1:] for step in forwards)
    actions = plot_schedule.simulate(orders, per_rank)
    ends = {(action.kind, action.stage, action.microbatch): action.end for action in actions}
    for action in actions:
        for kind, stage, number in plot_schedule.needs((action.kind, action.stage, action.microbatch),
                                                       pp * per_rank - 1):
            end = ends.get((kind, stage, number), ends.get(("I", stage, number)))
            assert end is not None and end <= action.start + 1e-9
    busy = sum(action.end - action.start for action in actions)
    assert busy == pytest.approx(3 * microbatches * pp)


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 2), (2, 8), (4, 4), (4, 8), (4, 2)])
def test_bubble_of_1f1b(pp: int, microbatches: int) -> None:
    actions = plot_schedule.simulate(plot_schedule.order_of("1f1b", pp, 1, microbatches), 1)
    assert plot_schedule.bubble(actions) == pytest.approx((pp - 1) / (microbatches + pp - 1))


@pytest.mark.parametrize(("pp", "microbatches", "chunks"), [(2, 1, 4), (4, 1, 8), (4, 2, 8), (3, 3, 5), (4, 1, 2)])
def test_bubble_of_chunks(pp: int, microbatches: int, chunks: int) -> None:
    """Each chunk has a forward and a backward, and all but the last one forward more, which takes a third of both."""
    orders = plot_schedule.order_of("1f1b", pp, 1, microbatches, chunks)
    for stage, order in enumerate(orders):
        assert sorted(order) == sorted(
            (kind, stage, number) for number in range(microbatches * chunks) for kind in "KFB"
            if kind != "K" or number % chunks < chunks - 1)
        held = [sum((kind == "F") - (kind == "B") for kind, *_ in order[:end + 1]) for end in range(len(order))]
        assert max(held) == min(pp - stage, microbatches * chunks)
    units = microbatches * (chunks + (chunks - 1) / 3)
    assert plot_schedule.bubble(plot_schedule.simulate(orders, 1)) == pytest.approx((pp - 1) / (units + pp - 1))
    flags = f"--pipeline-model-parallel-size {pp} --num-layers {pp} --hidden-size 8 --num-attention-heads 1 --lr 1 " \
            f"--seq-length {16 * chunks} --sequence-chunk-size 16 --global-batch-size {microbatches} --train-iters 1 " \
            "--mock-data --vocab-size 8"
    assert pipeline_bubble(load_run(flags.split(), pp)[0]) == pytest.approx((pp - 1) / (units + pp - 1))


def test_better_schedules_wait_less() -> None:
    shares = [plot_schedule.bubble(plot_schedule.simulate(plot_schedule.order_of(name, 4, per_rank, 8), per_rank))
              for name, per_rank in (("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zbv", 2))]
    assert shares == sorted(shares, reverse=True)


def test_program(tmp_path: Path) -> None:
    done = run_tool("plot_schedule.py", "--pp", 2, "--microbatches", 2, "--output", tmp_path / "s.png")
    assert done.returncode == 0, done.stderr
    assert "bubble 33.3%" in done.stdout and "rank 1 | .  f0 b0 b0 f1 b1 b1" in done.stdout
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    done = run_tool("plot_schedule.py", "--pp", 2, "--microbatches", 1, "--chunks", 3, "--output", tmp_path / "c.png")
    assert "rank 1 | .  k0 k1 f2 b2 b2 f1 b1 b1 f0 b0 b0" in done.stdout, done.stdout + done.stderr
    for words in (("--pp", 2, "--microbatches", 3, "--schedule", "zbv", "--chunks", 2),
                  ("--pp", 2, "--microbatches", 3, "--schedule", "dualpipev"), ("--pp", 2, "--microbatches", 0),
                  ("--pp", 2, "--microbatches", 4, "--stages-per-rank", 2)):
        done = run_tool("plot_schedule.py", *words)
        assert done.returncode == 2 and "Traceback" not in done.stderr
