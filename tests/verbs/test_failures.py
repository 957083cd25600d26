"""A rank killed or stopped, packets dropped, the link down: every wait of a survivor ends.

Each job repeats one kind of call until a loss ends it (tests/failure/programs/endless.py). Times
are taken on the machine that boots the guests, so that the guests' clocks do not matter.
"""

from __future__ import annotations

from pathlib import Path

import hosts
import pytest
from hosts import Job, Story

pytestmark = pytest.mark.full

ENDLESS = "failure/programs/endless.py"
STOPPED_AFTER = 3.0
HEARTBEAT = 0.2
# From the harm to the error: 3 s plus the settings; and what a loaded machine needs to report it.
BOUND = 3.0 + STOPPED_AFTER + HEARTBEAT
LOADED = 6.0
PAIR = [[0], [1]]
ALONE = [[0, 1]]

Trial = tuple[str, str, int]  # harm, what the ranks repeat, the rank harmed


def run(folder: Path, ranks: list[list[int]], trials: list[Trial]) -> None:
    """Run the jobs one after the other on the same hosts."""
    env = {
        "PGASDL_TRANSPORT": "auto" if len(ranks) > 1 else "verbs",
        "PGASDL_STOPPED_AFTER": str(STOPPED_AFTER),
        "PGASDL_HEARTBEAT_MS": str(round(HEARTBEAT * 1e3)),
        "PGASDL_TIMEOUT": "40",
        "PGASDL_LOG": "warning",
    }
    jobs = [
        Job(f"{how}-{point}-{victim}", ENDLESS, ranks, [point], env, harm=(how, victim))
        for how, point, victim in trials
    ]
    stories = hosts.run(folder, jobs)
    for job, trial in zip(jobs, trials, strict=True):
        check(stories[job.name], *trial)


def check(story: Story, how: str, point: str, victim: int) -> None:
    """Both ranks have ended, and every survivor named the other in time."""
    statuses = story.statuses()
    survivors = [0, 1] if how in ("cut", "hole") else [1 - victim]
    harms = story.events("harm")
    assert harms, f"never came so far\n{story}"
    harmed_at = harms[-1]["seen"]
    for rank in survivors:
        assert statuses[rank] == 0, str(story)
        lost = story.event("lost", rank)
        assert (lost["kind"], lost["rank"]) == ("PeerLostError", 1 - rank), str(story)
        assert f"rank {1 - rank}" in lost["text"], str(story)
        assert lost["seen"] - harmed_at < BOUND + LOADED, str(story)
        assert story.event("health", rank)["health"][1 - rank] != "healthy", str(story)
    if how == "kill":
        assert statuses[victim] == -9
    if how == "stop":
        assert story.event("stopped")["rank"] == victim


def test_two_hosts_kill(tmp_path: Path) -> None:
    trials: list[Trial] = [
        ("kill", "waitsome", 1),
        ("kill", "barrier", 0),
        ("kill", "gdraa", 1),
        ("kill", "segment", 0),
    ]
    run(tmp_path, PAIR, trials)


def test_two_hosts_stop(tmp_path: Path) -> None:
    trials: list[Trial] = [("stop", "waitsome", 1), ("stop", "atomic", 0), ("stop", "exchange", 1)]
    run(tmp_path, PAIR, trials)


def test_two_hosts_cut(tmp_path: Path) -> None:
    """Packets vanish; in the last job one host's link goes down. Each side is a survivor."""
    trials: list[Trial] = [
        ("hole", "waitsome", 0),
        ("hole", "storm", 0),
        ("hole", "passive", 0),
        ("cut", "group-allreduce", 1),
    ]
    run(tmp_path, PAIR, trials)


def test_one_host(tmp_path: Path) -> None:
    trials: list[Trial] = [
        ("kill", "read", 1),
        ("kill", "tree", 0),
        ("stop", "waitsome", 0),
        ("stop", "storm", 1),
    ]
    run(tmp_path, ALONE, trials)
