"""The same exchanges between processes, through shared memory."""

from __future__ import annotations

import jobs
import pytest
from exchange_tools import REFERENCED, cases
from support.places import APPS
from tiers import full


@pytest.mark.parametrize(
    ("size", "progress"), full([(2, "turn"), (3, "thread"), (5, "turn")], quick=2)
)
def test_all_cases_between_processes(size: int, progress: str) -> None:
    n_cases = sum(len(list(cases(plan))) for plan in REFERENCED)
    out = jobs.run(size, jobs.PROGRAMS / "exchange_over_shm.py", progress)
    lines = sorted(out.splitlines())
    assert lines == [f"[{rank}] checked {n_cases} cases" for rank in range(size)]


def test_the_first_program() -> None:
    out = jobs.run(3, APPS / "hello_notify.py")
    assert sorted(out.splitlines()) == [
        f"[{rank}] rank {rank} of 3 got {left}" for rank, left in ((0, 2), (1, 0), (2, 1))
    ]
    assert jobs.run(0, APPS / "hello_notify.py") == "rank 0 of 1 got 0\n"
