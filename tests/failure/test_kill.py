"""kill -9 of any rank at any point: every survivor ends with an error that names it.

``PGASDL_SOAK=500`` adds that many trials at random points and places; by default each point is
tried at a few places. The detection times are printed at the end of the run.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

import pytest
from failure_harness import TIMEOUT
from support.forking import Job
from support.patience import took
from tiers import full

POINTS = ["waitsome", "barrier", "atomic", "passive", "segment", "staged", "gdraa", "exchange",
          "wait_count", "counts", "group-allreduce", "group", "tree", "direct", "handle", "storm",
          "read", "bound"]  # fmt: skip
PLACES = [(n, victim) for n in (2, 3, 4) for victim in range(n)]
SOAK = int(os.environ.get("PGASDL_SOAK", "0"))
GOAL = "kill -9 to a survivor's error", 0.25


def places() -> list[tuple[str, int, int]]:
    """For each point three of the nine places, so that all places are tried equally often."""
    return [
        (point, *PLACES[(number + 4 * turn) % len(PLACES)])
        for turn in range(3)
        for number, point in enumerate(POINTS)
    ]


def kill_one(job: Callable[..., Job], point: str, n: int, victim: int, delay: float) -> None:
    ranks = job("endless.py", n, point, PGASDL_TIMEOUT=TIMEOUT)
    ranks.said("running")
    time.sleep(delay)
    killed_at = ranks.signal(victim, signal.SIGKILL)
    survivors = [rank for rank in range(n) if rank != victim]
    statuses = ranks.ended(survivors)
    assert statuses == [0] * len(survivors), ranks.transcript()
    for rank in survivors:
        lost = ranks.event(rank, "lost")
        assert lost["kind"] == "PeerLostError", ranks.transcript()
        assert lost["rank"] == victim, ranks.transcript()
        assert f"rank {victim}" in lost["text"], ranks.transcript()
        told = ranks.event(rank, "health")
        assert told["health"][victim] == "died", ranks.transcript()
        assert told["losses"] == 1, ranks.transcript()
        took(GOAL[0], lost["at"] - killed_at, GOAL[1])


@pytest.mark.parametrize(("point", "n", "victim"), full(places(), quick=8))
def test_every_survivor_names_the_killed_rank(
    job: Callable[..., Job], point: str, n: int, victim: int
) -> None:
    kill_one(job, point, n, victim, random.uniform(0, 0.05))


@pytest.mark.skipif(not SOAK, reason="PGASDL_SOAK=500 makes so many trials")
@pytest.mark.parametrize("trial", range(SOAK))
def test_soak(job: Callable[..., Job], trial: int) -> None:
    rng = random.Random(trial)
    n, victim = rng.choice(PLACES)
    kill_one(job, rng.choice(POINTS), n, victim, rng.uniform(0, 0.08))


@pytest.mark.parametrize("victim", full([1, 0, 2], quick=1))
@pytest.mark.parametrize(
    "step", ["place", "places", "endpoint", "connect", "open", "join", "barrier"]
)
def test_death_inside_init(job: Callable[..., Job], step: str, victim: int) -> None:
    ranks = job("dies_early.py", 3, step, victim, PGASDL_TIMEOUT=TIMEOUT)
    died_at = ranks.event(victim, "dying")["at"]
    survivors = [rank for rank in range(3) if rank != victim]
    assert ranks.ended(survivors) == [0, 0], ranks.transcript()
    for rank in survivors:
        refused = ranks.event(rank, "refused")
        assert (refused["kind"], refused["rank"]) == ("PeerLostError", victim), ranks.transcript()
        took(GOAL[0], refused["at"] - died_at, GOAL[1])


def test_death_before_init_is_a_timeout_that_names_the_rank(job: Callable[..., Job]) -> None:
    """Nobody knows a process that never came: the launcher ends the job, or else the timeout."""
    ranks = job("dies_early.py", 3, "start", 1, PGASDL_TIMEOUT="1")
    assert ranks.ended([0, 2]) == [0, 0]
    for rank in (0, 2):
        refused = ranks.event(rank, "refused")
        assert refused["kind"] in ("PgasTimeoutError", "PeerLostError"), ranks.transcript()
        assert "/1'" in refused["text"] or "rank 1" in refused["text"] or rank == 2


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("step", ["before close", "after close"])
def test_death_on_the_way_out(job: Callable[..., Job], step: str, victim: int) -> None:
    ranks = job("dies_early.py", 3, step, victim, PGASDL_TIMEOUT=TIMEOUT)
    died_at = ranks.event(victim, "dying")["at"]
    survivors = [rank for rank in range(3) if rank != victim]
    assert ranks.ended(survivors) == [0, 0], ranks.transcript()
    how = "died" if step == "before close" else "closed"
    for rank in survivors:
        lost = ranks.event(rank, "lost")
        assert lost["kind"] == "PeerLostError", ranks.transcript()
        took(GOAL[0], lost["at"] - died_at, GOAL[1])
        assert ranks.event(rank, "health")["health"][victim] == how
    if how == "died":
        assert {ranks.event(rank, "lost")["rank"] for rank in survivors} == {victim}
