"""Ranks that are killed or stopped, where connections end and nothing is mapped."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

import pytest
from support import two_hosts
from support.environment import ONE_THREAD, environment
from support.forking import Job
from support.patience import took
from support.places import TESTS
from support.starting import finished
from tiers import full

POINTS = ["waitsome", "gdraa", "storm", "barrier", "atomic", "passive", "segment", "exchange",
          "wait_count", "counts", "group-allreduce", "group", "tree", "read", "bound"]  # fmt: skip
STOPPING = {"PGASDL_STOPPED_AFTER": "1.0", "PGASDL_HEARTBEAT_MS": "100"}


@pytest.mark.parametrize("victim", full([1, 0, 2], quick=1))
@pytest.mark.parametrize("point", full(POINTS, quick=3))
def test_every_survivor_names_the_killed_rank(
    job: Callable[..., Job], point: str, victim: int
) -> None:
    ranks = job("endless.py", 3, point)
    ranks.said("running")
    killed_at = ranks.signal(victim, signal.SIGKILL)
    survivors = [rank for rank in range(3) if rank != victim]
    assert ranks.ended(survivors) == [0, 0], ranks.transcript()
    for rank in survivors:
        lost = ranks.event(rank, "lost")
        assert (lost["kind"], lost["rank"]) == ("PeerLostError", victim), ranks.transcript()
        assert ranks.event(rank, "health")["health"][victim] == "died", ranks.transcript()
        took("kill -9 to a survivor's error, over tcp", lost["at"] - killed_at, 0.25)


@pytest.mark.parametrize("point", full(["waitsome", "atomic", "gdraa", "segment"], quick=1))
def test_every_survivor_names_the_stopped_rank(job: Callable[..., Job], point: str) -> None:
    ranks = job("endless.py", 3, point, **STOPPING)
    ranks.said("running")
    ranks.signal(1, signal.SIGSTOP)
    try:
        assert ranks.ended([0, 2]) == [0, 0], ranks.transcript()
        for rank in (0, 2):
            lost = ranks.event(rank, "lost")
            assert (lost["kind"], lost["rank"]) == ("PeerLostError", 1), ranks.transcript()
            assert "rank 1, which stopped" in lost["text"] or "rank 1 stopped" in lost["text"]
    finally:
        ranks.signal(1, signal.SIGCONT)


def test_one_of_two_leaves_in_peace(job: Callable[..., Job]) -> None:
    """It sent its last words by another connection than the one whose end is seen."""
    ranks = job("leaves.py", 2, "return", "waitsome")
    assert ranks.ended() == [0, 0], ranks.transcript()
    assert ranks.event(0, "lost")["health"][1] == "closed", ranks.transcript()


@pytest.mark.parametrize("what", ["atomics", "read", "refused", "written", "forks"])
def test_what_a_peer_does_not_answer_raises(job: Callable[..., Job], what: str) -> None:
    ranks = job("service.py", 2, what)
    assert ranks.ended() == [0, 0], ranks.transcript()
    assert ranks.event(1, "raised") and not ranks.ranks[1].said("wrong"), ranks.transcript()


# Little fits into its sockets, and little a second passes.
SLOW = """
ip link set lo mtu 1500 up
sysctl -qw net.ipv4.tcp_wmem="4096 16384 262144" net.ipv4.tcp_rmem="4096 131072 262144"
tc qdisc add dev lo root tbf rate 300mbit burst 64kb limit 300kb
exec "$@"
"""


@pytest.mark.full
@pytest.mark.parametrize("array", ["kept", "freed"])
def test_nothing_of_a_failed_all_reduce_is_written_or_read_later(array: str) -> None:
    two_hosts.require()
    launch = [sys.executable, "-m", "pgasdl", "run", "-n", "3", "--transport", "tcp"]
    program = [str(TESTS / "tcp/programs/late.py"), array]
    found = finished(
        ["unshare", "--net", "sh", "-c", SLOW, "sh", *launch, "--keep-going", *program],
        env=environment(**ONE_THREAD),
        timeout=100,
    )
    assert found.stdout.count("goes on") == 2, found.stdout + found.stderr


def test_ports_are_free_again_at_once(job: Callable[..., Job]) -> None:
    """Accepted connections of the job before may be in TIME_WAIT there."""
    for _ in range(3):
        ranks = job("service.py", 2, "forks", PGASDL_TCP_PORTS="41870-41871")
        assert ranks.ended() == [0, 0], ranks.transcript()
