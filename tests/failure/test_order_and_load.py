"""Skewed starts give the same bits; on an overloaded machine no rank counts as dead."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

import pytest
from support.forking import Job

pytestmark = pytest.mark.full

LAUNCHES = int(os.environ.get("PGASDL_LAUNCHES", "4"))
LOAD_SECONDS = float(os.environ.get("PGASDL_LOAD_SECONDS", "3"))


def test_one_digest_whatever_the_order_of_arrival(job: Callable[..., Job]) -> None:
    digests = set()
    for launch in range(LAUNCHES):
        rng = random.Random(launch)
        ranks = job("sums.py", 3, ranks=[], PGASDL_TIMEOUT="30")
        order = [0, 1, 2]
        rng.shuffle(order)
        for rank in order:
            ranks.start(rank)
            time.sleep(rng.uniform(0, 0.1))
        assert ranks.ended() == [0, 0, 0], ranks.transcript()
        digests |= {ranks.event(rank, "digest")["digest"] for rank in range(3)}
    assert len(digests) == 1


def test_sixteen_busy_ranks_report_no_death(job: Callable[..., Job]) -> None:
    """All of them spin, yield and compute on whatever cores there are, with the default limits."""
    n = 16
    ranks = job("stopped.py", n, LOAD_SECONDS, PGASDL_TIMEOUT="60", PGASDL_SPIN_US="2000")
    assert ranks.ended(seconds=LOAD_SECONDS + 60) == [0] * n, ranks.transcript()
    ends = [ranks.event(rank, "complete") for rank in range(n)]
    assert len({(end["steps"], end["total"]) for end in ends}) == 1
    for end in ends:
        assert set(end["health"]) <= {"healthy", "closed"}
