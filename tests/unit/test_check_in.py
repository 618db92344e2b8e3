"""check_in.py: which ranks are missing, or started twice, when ranks meet. Threads stand for processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist

from megatron_sp.check_in import check_in
from megatron_sp.errors import ConfigError, PeerLostError


def arrive(ranks: list[int], world_size: int, seconds: float) -> tuple[list[BaseException | None], list[str]]:
    """Return what each of these ranks raised, and the lines of rank 0."""
    store, lines = dist.HashStore(), list[str]()
    with ThreadPoolExecutor(len(ranks)) as pool:
        waiting = [pool.submit(check_in, store, rank, world_size, timedelta(seconds=seconds), lines.append, 0.2)
                   for rank in ranks]
        return [each.exception() for each in waiting], lines


def test_all_ranks_meet() -> None:
    assert arrive([2, 0, 1], 3, 20) == ([None] * 3, [])


def test_missing_ranks_are_named() -> None:
    errors, lines = arrive([0, 2], 4, 0.7)
    assert all(isinstance(error, PeerLostError) and "2 of 4 ranks (1, 3)" in str(error) for error in errors)
    assert lines and all("rank 0 has waited" in line and "(1, 3) to start" in line for line in lines)


def test_a_rank_that_is_started_twice_is_named_at_once() -> None:
    errors, _ = arrive([0, 1, 1], 3, 60)
    assert sorted(type(error).__name__ for error in errors) == ["ConfigError", "PeerLostError", "PeerLostError"]
    assert all("rank 1 was started twice: process" in str(error) for error in errors)
    assert any(isinstance(error, ConfigError) for error in errors)
