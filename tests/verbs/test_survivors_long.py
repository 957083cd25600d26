"""Random programs on two hosts that lose packets, in which a rank is killed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hosts
import pytest
from hosts import Job

sys.path.append(str(Path(__file__).parents[1] / "random_programs"))
from long_run import growth, too_much

pytestmark = pytest.mark.full

LOST = 2
_WHOLE = 5  # generations of the first job


@pytest.mark.timeout(0)  # each job has its own limit
def test_long_run(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Between the hosts 1 % of the packets are lost, each way.

    In the first job generations follow one another in the same processes, which must not grow. In
    the second a rank is killed; the others go on as survivors, and then all together with a new
    process in its place.
    """
    seconds = 60 * request.config.getoption("--minutes") / (_WHOLE + 2)  # of each generation
    half = request.config.getoption("--ranks-of-a-host")
    ranks = [list(range(half)), list(range(half, 2 * half))]
    everybody = [*ranks[0], *ranks[1]]

    def job(name: str, numbers: Sequence[int], **more: Any) -> Job:
        orders = [json.dumps({"number": n, "seconds": seconds, "rank": -1}) for n in numbers]
        given = ["verbs", str(len(everybody)), *orders]
        if more:
            more["replaced"] = [*given[:2], *orders[1:]]
        return Job(name, "random_programs/generations.py", ranks, given,
                   seconds=len(numbers) * (seconds + 60) + 100,
                   env={"PGASDL_TIMEOUT": "60"}, **more)  # fmt: skip

    last = _WHOLE + 1
    jobs = [job("whole", range(_WHOLE)), job("killed", [_WHOLE, last], harm=("kill", LOST))]
    stories = hosts.run(tmp_path, jobs, loss=1)
    for story, final in ((stories["whole"], _WHOLE - 1), (stories["killed"], last)):
        story.check(len(everybody))
        for rank in everybody:
            events = story.events("ended", rank)
            *before, ended = events
            if story is stories["killed"]:
                assert [each["lost"] for each in before] == [LOST] * (rank != LOST)
            assert ended["generation"] == final
            assert all(each["done"]["programs"] > 0 for each in events if each["lost"] is None)
            more = growth(events, "verbs")
            assert not too_much(more), f"rank {rank} holds more: {more}"
            print(rank, more, ended)
