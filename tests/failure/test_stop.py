"""SIGSTOP: noticed by the heartbeat, and a late rank is fenced.

When a silent rank counts as stopped: tests/native/test_liveness.cpp, on a clock of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from failure_harness import TIMEOUT
from support.forking import Job
from support.patience import took
from support.requiring import lacking
from tiers import full

LIMIT = 1.0
SETTINGS = {"PGASDL_STOPPED_AFTER": "1.0", "PGASDL_HEARTBEAT_MS": "100", "PGASDL_TIMEOUT": TIMEOUT}


@pytest.mark.parametrize(
    "point", full(["waitsome", "gdraa", "barrier", "atomic", "group", "segment"], quick=1)
)
def test_stopped_rank_is_named_within_the_limit(job: Callable[..., Job], point: str) -> None:
    ranks = job("endless.py", 3, point, **SETTINGS)
    ranks.said("running")
    stopped_at = ranks.signal(1, signal.SIGSTOP)
    try:
        assert ranks.ended([0, 2]) == [0, 0], ranks.transcript()
        for rank in (0, 2):
            lost = ranks.event(rank, "lost")
            assert (lost["kind"], lost["rank"]) == ("PeerLostError", 1), ranks.transcript()
            assert "rank 1 stopped" in lost["text"], ranks.transcript()
            assert lost["at"] - stopped_at > LIMIT - 0.2, ranks.transcript()
            took("SIGSTOP to a survivor's error", lost["at"] - stopped_at, LIMIT + 0.5)
            assert ranks.event(rank, "health")["health"][1] == "stopped"
    finally:
        ranks.signal(1, signal.SIGCONT)


_LIBC = ctypes.CDLL(None, use_errno=True)
_SEIZE, _INTERRUPT, _DETACH, _ALL = 0x4206, 0x4207, 17, 0x40000000  # ptrace(2), waitpid(2)


@contextlib.contextmanager
def watch_held(pid: int) -> Iterator[None]:
    """Keep the thread that sends heartbeats from running, as on a machine short of processors."""
    (watch,) = (
        int(thread.name)
        for thread in Path(f"/proc/{pid}/task").iterdir()
        if (thread / "comm").read_text() == "pgasdl-watch\n"
    )
    for request in (_SEIZE, _INTERRUPT):
        if _LIBC.ptrace(request, watch, None, None) != 0:
            lacking(f"ptrace is refused here: {os.strerror(ctypes.get_errno())}")
    os.waitpid(watch, _ALL)
    yield
    _LIBC.ptrace(_DETACH, watch, None, None)


def test_a_rank_that_computes_is_not_stopped(job: Callable[..., Job]) -> None:
    """Its heartbeats stop first; then those of a rank that sleeps, which is lost."""
    ranks = job("starved.py", 3, **SETTINGS)
    ranks.said("running")
    with watch_held(ranks[1].pid), watch_held(ranks[2].pid):
        lost = ranks.event(0, "lost")
    assert (lost["rank"], lost["health"]) == (2, ["healthy", "healthy", "stopped"])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_a_stopped_rank_was_writing_lands_no_more(
    job: Callable[..., Job], transport: str
) -> None:
    """It is stopped within a long write, and wakes after survivors(), if it lives."""
    ranks = job("writes_late.py", 3, PGASDL_TRANSPORT=transport, **SETTINGS)
    ranks.said("written", [0])
    ranks.signal(2, signal.SIGSTOP)
    ranks.said("watching", [0, 1])
    with contextlib.suppress(ProcessLookupError):
        ranks.signal(2, signal.SIGCONT)
    assert ranks.ended([2]) == [-signal.SIGKILL if transport == "shm" else 0], ranks.transcript()
    for rank in (0, 1):
        ranks.signal(rank, signal.SIGUSR2)
    for rank in (0, 1):
        assert ranks.event(rank, "untouched")["same"], ranks.transcript()
    assert ranks.ended([0, 1]) == [0, 0], ranks.transcript()


@pytest.mark.full
def test_late_rank_finds_itself_fenced_and_corrupts_nothing(job: Callable[..., Job]) -> None:
    ranks = job("stopped.py", 3, 60.0, PGASDL_TRANSPORT="tcp", **SETTINGS)
    ranks.said("running")
    ranks.signal(2, signal.SIGSTOP)
    ranks.said("watching", [0, 1])
    ranks.signal(2, signal.SIGCONT)
    fenced = ranks.event(2, "fenced")
    assert set(fenced["ends"].values()) == {"fenced"}, fenced["ends"]
    assert "PGASDL_STOPPED_AFTER=1 s (it once gave none for " in fenced["text"]
    assert "stopped" in fenced["text"] and "fenced" in fenced["text"]
    assert fenced["health"][2] == "stopped"
    assert ranks.ended([2]) == [0]
    for rank in (0, 1):
        ranks.signal(rank, signal.SIGUSR2)
    for rank in (0, 1):
        assert ranks.event(rank, "lost")["rank"] == 2
        assert ranks.event(rank, "untouched")["same"], ranks.transcript()
    assert ranks.ended([0, 1]) == [0, 0], ranks.transcript()
