"""fork while a context is open: all calls of the child are refused, the parent goes on."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
from failure_harness import Job


@pytest.mark.parametrize(
    ("how", "progress"),
    [("exit", "turn"), ("exit", "thread"), ("_exit", "turn"), ("close", "thread"),
     ("process", "thread")],
)  # fmt: skip
def test_child_is_refused_and_parent_goes_on(
    job: Callable[..., Job], how: str, progress: str
) -> None:
    ranks = job("forks.py", 2, how, PGASDL_TIMEOUT="20", PGASDL_PROGRESS=progress)
    assert ranks.ended() == [0, 0], ranks.transcript()
    for rank in (0, 1):
        child, parent = ranks.event(rank, "child"), ranks.event(rank, "parent")
        assert set(child["ends"].values()) == {"closed"}, child["ends"]
        assert parent["status"] == 0, ranks.transcript()
        assert parent["value"] == 1.5
        assert parent["health"] == ["healthy", "healthy"]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_data_loader_workers(job: Callable[..., Job]) -> None:
    ranks = job("loads_data.py", 2, PGASDL_TIMEOUT="60")
    assert ranks.ended(seconds=90) == [0, 0], ranks.transcript()
    for rank in (0, 1):
        done = ranks.event(rank, "done")
        assert done["total"] == 2 * 2 * sum(range(40))
        assert done["health"] == ["healthy", "healthy"]
