"""A bad network between the ranks: it delays, splits, collects and cuts what they send."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from support.environment import environment
from support.forking import Job
from support.places import TESTS
from support.starting import finished
from support.tcp_proxy import Cut, Manner, Proxy
from tiers import full

RUN = str(TESTS / "random_programs/run.py")
MANNERS = {
    "splits": Manner(pieces=60),
    "collects": Manner(collects=0.003),
    "late": Manner(delay=0.002, pieces=1000, rate=20e6),
}
FRAME, BYTES = 56, 8  # of a frame, and of what each write has
SAMPLE = pytest.param("splits", "0:4", marks=pytest.mark.gate)


@pytest.mark.parametrize(
    ("name", "seeds"), [SAMPLE, *full([(name, "512:544") for name in MANNERS])]
)
def test_random_programs(name: str, seeds: str) -> None:
    with Proxy(MANNERS[name]) as proxy:
        command = [sys.executable, RUN, "--way", "tcp", "--seeds", seeds]
        done = finished(command, env=environment(TCP_PROXY=str(proxy.port)), timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


def found_after_cut(job: Callable[..., Job], what: str, after: int) -> int:
    """How many of two flags are raised; the bytes of each are all there."""
    cut = Cut(source=1, peer=0, after=after, answers=what == "read")
    with Proxy(Manner(cut=cut)) as proxy:
        ranks = job("cut.py", 2, proxy.port, what)
        assert ranks.ended() == [0, 0], ranks.transcript()
        assert proxy.has_cut.is_set(), ranks.transcript()
    for rank in (0, 1):
        lost = ranks.event(rank, "lost")
        assert (lost["kind"], lost["rank"]) == ("PeerLostError", 1 - rank), ranks.transcript()
    found = ranks.event(0 if what == "write" else 1, "found")
    raised = [flag == n + 1 for n, flag in enumerate(found["flags"])]
    assert raised == [bool(flag) for flag in found["flags"]], found
    for n, flag in enumerate(raised):
        assert not flag or found["data"][BYTES * n : BYTES * (n + 1)] == [7] * BYTES, found
    assert raised == sorted(raised, reverse=True)
    ranks.close()
    return sum(raised)


@pytest.mark.parametrize(("what", "after"), [("write", 150), ("read", 60)])
def test_a_cut_names_the_peer(job: Callable[..., Job], what: str, after: int) -> None:
    found_after_cut(job, what, after)


@pytest.mark.full
@pytest.mark.parametrize("what", ["write", "read"])
def test_a_cut_after_every_byte(job: Callable[..., Job], what: str) -> None:
    """Of a frame: the flag comes with the last one."""
    # Before the write come two frames that mark its block; behind a read's answer one for its flag.
    first = 2 * FRAME if what == "write" else 0
    last = first + FRAME + BYTES + (FRAME if what == "read" else 0)
    flags = [found_after_cut(job, what, after) for after in range(first, last + 1)]
    assert flags == [0] * (last - first) + [1]
