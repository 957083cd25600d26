"""Ranks in different collectives: each of them gets an error at once, and nothing hangs."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from failure_harness import TIMEOUT, Job
from support.patience import took
from tiers import full

GOAL = "different collectives to MismatchError", 1.0
CASES = ["group size", "size", "size, up and down a tree", "segment or array", "handle", "layers",
         "group dtype", "group op", "dtype", "op", "plan", "size in segment", "place in segment",
         "default, size", "default, small or large", "segment or bind", "segment or handle",
         "number of layers"]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "n"), full([(case, 2 + i % 2) for i, case in enumerate(CASES)], quick=6)
)
def test_every_rank_is_told(job: Callable[..., Job], case: str, n: int) -> None:
    ranks = job("mismatched.py", n, case, PGASDL_TIMEOUT=TIMEOUT)
    ranks.said("calling")
    began = max(ranks.event(rank, "calling")["at"] for rank in range(n))
    ranks.said("refused")
    for rank in range(n):
        refused = ranks.event(rank, "refused")
        assert refused["kind"] == "MismatchError", ranks.transcript()
        took(GOAL[0], refused["at"] - began, GOAL[1])
        ranks.signal(rank, signal.SIGUSR2)
    assert ranks.ended() == [0] * n, ranks.transcript()
