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
from long_run import growth

pytestmark = pytest.mark.full

LOST = 2


@pytest.mark.timeout(0)  # each job has its own limit
def test_long_run(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Between the hosts 1 % of the packets are lost, each way.

    In the second job a rank is killed; the others go on as survivors, and then all together with a
    new process in its place.
    """
    seconds = 30 * request.config.getoption("--minutes")  # of each job
    half = request.config.getoption("--ranks-of-a-host")
    ranks = [list(range(half)), list(range(half, 2 * half))]
    everybody = [*ranks[0], *ranks[1]]

    def job(name: str, numbers: Sequence[int], **more: Any) -> Job:
        orders = [json.dumps({"number": n, "seconds": seconds, "rank": -1}) for n in numbers]
        given = ["verbs", str(len(everybody)), *orders]
        if more:
            more["replaced"] = [*given[:2], *orders[1:]]
        return Job(name, "random_programs/generations.py", ranks, given,
                   seconds=seconds + 160, env={"PGASDL_TIMEOUT": "60"}, **more)  # fmt: skip

    jobs = [job("whole", [0]), job("killed", [1, 2], harm=("kill", LOST))]
    stories = hosts.run(tmp_path, jobs, loss=1)
    for story, last in ((stories["whole"], 0), (stories["killed"], 2)):
        story.check(len(everybody))
        for rank in everybody:
            *before, ended = story.events("ended", rank)
            assert [each["lost"] for each in before] == [LOST] * (last > 0 and rank != LOST)
            assert ended["generation"] == last
            assert ended["done"]["programs"] > 0
            print(ended)
        grown = growth([story.events("ended", rank)[-1] for rank in everybody], "verbs")
        assert not any(n > 0 for n in grown.values()), f"a rank holds more: {grown}"
