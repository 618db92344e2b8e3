"""The helper that runs gloo ranks: results, the failing rank's traceback, hangs, death."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers.spawn import run_ranks


def _sum_of_ranks(scale: int) -> tuple[int, int]:
    total = torch.tensor(float(dist.get_rank() * scale))
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def _fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("told to fail")
    dist.barrier()


def _fail_everywhere() -> None:
    raise SystemExit("all of us")


def _hang_on_one() -> None:
    if dist.get_rank() == 0:
        time.sleep(1000)
    dist.barrier()


def _die_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def test_results_come_back_in_rank_order() -> None:
    assert run_ranks(_sum_of_ranks, 1, 3) == [(0, 0)]
    assert run_ranks(_sum_of_ranks, 4, 3) == [(0, 18), (1, 18), (2, 18), (3, 18)]


def test_failing_rank_is_shown_with_its_traceback() -> None:
    shown = r"rank 1 failed:(.|\n)*in _fail_on_one(.|\n)*ValueError: told to fail"
    with pytest.raises(AssertionError, match=shown) as error:
        run_ranks(_fail_on_one, 2)
    assert "rank 0 was waiting" in str(error.value) or "rank 0 failed" in str(error.value)
    with pytest.raises(AssertionError, match=r"SystemExit: all of us\n\nrank \d failed:\nthe same"):
        run_ranks(_fail_everywhere, 2)


def test_hanging_ranks_are_killed_and_located() -> None:
    with pytest.raises(AssertionError, match=r"rank 0 did not finish in 2 s:(.|\n)*_hang_on_one(.|\n)*rank 1 did not"):
        run_ranks(_hang_on_one, 2, timeout=2)


def test_dead_rank_is_named() -> None:
    with pytest.raises(AssertionError, match="rank 1 failed:\nthe process died with exit code 7"):
        run_ranks(_die_on_one, 2)
