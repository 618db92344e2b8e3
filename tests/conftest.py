"""Fixtures for all tests. One thread per process: tests run on few cores and start many processes."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in the ranks

import pytest  # noqa: E402

from tests.helpers.spawn import RunRanks, run_ranks  # noqa: E402


@pytest.fixture
def ranks() -> RunRanks:
    """``ranks(fn, world_size, *args, timeout=60)``: see tests/helpers/spawn.py."""
    return run_ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--long N --long-seed S``: N random layouts for the parity matrix, instead of the chosen ones."""
    parser.addoption("--long", type=int, default=0)
    parser.addoption("--long-seed", type=int, default=1)
