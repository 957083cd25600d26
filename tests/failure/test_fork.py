"""Workers that a data loader forks while a context is open. Calls of a child: tests/contract."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
from support.forking import Job


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_data_loader_workers(job: Callable[..., Job]) -> None:
    ranks = job("loads_data.py", 2, PGASDL_TIMEOUT="60")
    assert ranks.ended(seconds=90) == [0, 0], ranks.transcript()
    for rank in (0, 1):
        done = ranks.event(rank, "done")
        assert done["total"] == 2 * 2 * sum(range(40))
        assert done["health"] == ["healthy", "healthy"]
