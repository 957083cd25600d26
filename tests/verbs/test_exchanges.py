"""GradientExchange over verbs: all plans and kinds, the bits that NumPy computes."""

from __future__ import annotations

from pathlib import Path

import hosts
import pytest
from exchange_tools import REFERENCED, cases
from hosts import Job
from support.places import TESTS

from pgasdl.plans import PLANS

pytestmark = pytest.mark.full

EXCHANGES = "verbs/programs/exchanges.py"
TRAINING = [str(TESTS / "training")]
VERBS = {"PGASDL_TRANSPORT": "verbs", "PGASDL_LOG": "warning"}


def test_every_plan_and_kind(tmp_path: Path) -> None:
    """In one guest, progress by turns and by a thread; three ranks make uneven blocks."""
    jobs = [
        Job("turn", EXCHANGES, [[0, 1]], ["turn"], VERBS, TRAINING, seconds=120),
        Job("thread", EXCHANGES, [[0, 1, 2]], ["thread"], VERBS, TRAINING, seconds=120),
    ]
    stories = hosts.run(tmp_path, jobs)
    refusing = [plan for plan in REFERENCED if PLANS[plan].mapped]
    n_cases = sum(len(list(cases(plan))) for plan in REFERENCED if plan not in refusing)
    for job in jobs:
        size = len(job.ranks[0])
        stories[job.name].check(size)
        for rank in range(size):
            said = stories[job.name].of(rank)
            assert said == [f"checked {n_cases} cases, {len(refusing)} plans refused"]
