"""Ranks in different collectives: each of them gets an error at once, and nothing hangs."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from failure_harness import Job

BOUND = 3.0  # seconds; the goal is 1
CASES = ["group size", "group dtype", "group op", "size", "dtype", "op", "plan",
         "size, up and down a tree", "size in segment", "place in segment", "segment or array",
         "default, size", "default, small or large", "segment or bind", "segment or handle",
         "handle", "layers", "number of layers"]  # fmt: skip


@pytest.mark.parametrize(("case", "n"), [(case, 2 + i % 2) for i, case in enumerate(CASES)])
def test_every_rank_is_told(job: Callable[..., Job], case: str, n: int) -> None:
    ranks = job("mismatched.py", n, case, PGASDL_TIMEOUT="10")
    ranks.said("calling")
    began = max(ranks.event(rank, "calling")["at"] for rank in range(n))
    ranks.said("refused", seconds=8)
    for rank in range(n):
        refused = ranks.event(rank, "refused")
        assert refused["kind"] == "MismatchError", ranks.transcript()
        assert refused["at"] - began < BOUND, ranks.transcript()
        ranks.signal(rank, signal.SIGUSR2)
    assert ranks.ended() == [0] * n, ranks.transcript()
