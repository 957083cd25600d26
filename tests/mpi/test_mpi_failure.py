"""When a rank dies, the others end with an error that names it, and no process stays."""

from __future__ import annotations

import os
import re
import time

import mpi_jobs
import pytest
from support.mpi_rows import Row

pytestmark = pytest.mark.full

PROGRAM = mpi_jobs.PROGRAMS / "one_dies.py"


@pytest.mark.parametrize("windows", ["allocated", "created"])
def test_a_killed_rank_is_named(mpi: Row, windows: str) -> None:
    done = mpi_jobs.start(mpi, 3, PROGRAM, "killed", timeout=60, PGASDL_MPI_WINDOWS=windows)
    assert done.returncode != 0
    words = done.stdout + done.stderr
    # A launcher may kill the others before they can print; then it names the one that died itself.
    launchers = {
        "mpich": "KILLED BY SIGNAL: 9|Killed .signal 9.",
        "openmpi": r"process rank 1 with PID \d+ .*exited on\s+signal 9 .Killed.",
    }
    assert re.search(f"rank 1 died|{launchers[mpi.kind]}", words), words


def test_a_failing_rank_is_named(mpi: Row) -> None:
    """Its own error is printed, although it prints late and the others could abort before."""
    done = mpi_jobs.start(mpi, 3, PROGRAM, "fails", timeout=60)
    assert done.returncode != 0
    # MPICH's launcher mixes tracebacks, whose lines are written in pieces.
    assert "pgasdl: rank 1 of 3 ends with ZeroDivisionError: on purpose" in done.stderr


def test_ranks_that_failed_begin_again(mpi: Row) -> None:
    """A rank lost in one context is there in the next one, if its process is."""
    program = mpi_jobs.PROGRAMS / "begins_again.py"
    done = mpi_jobs.start(mpi, 3, program, timeout=100)
    for rank in range(3):
        for windows in ("created", "allocated"):
            assert done.stdout.count(f"rank {rank}: {windows}") == 2, done.stdout + done.stderr


def nothing_stays(words: str, n_ranks: int, begins: str = "/") -> None:
    """Nothing that the ranks said they hold is left once the launcher has ended and reaped them."""
    held = re.findall(r"holds <(.*?)>", words)
    assert sum(name.startswith("/proc/") for name in held) == n_ranks, words
    end = time.monotonic() + 20
    while left := [name for name in held if name.startswith(begins) and os.path.exists(name)]:
        assert time.monotonic() < end, left
        time.sleep(0.02)


def test_survivors_of_a_stopped_rank_end_by_abort(mpi: Row) -> None:
    """No launcher sees that a rank stopped, and MPI_Finalize would wait for it for ever."""
    done = mpi_jobs.start(mpi, 3, PROGRAM, "stopped", timeout=60, PGASDL_STOPPED_AFTER="1")
    words = done.stdout + done.stderr
    assert done.returncode != 0, words
    assert re.search("rank [02] goes on without rank 1", words), words
    ended = r"pgasdl: rank [02] of 3: rank 1 stopped: MPI_Abort, for MPI_Finalize would wait"
    assert re.search(ended, words), words
    nothing_stays(words, 3)


@pytest.mark.parametrize("windows", ["allocated", "created"])
def test_writers_to_a_stopped_rank_end(mpi: Row, windows: str) -> None:
    """They end with PeerLostError, or without it if MPI never returns from a call that waits."""
    done = mpi_jobs.start(
        mpi, 3, PROGRAM, "unread", timeout=60, PGASDL_STOPPED_AFTER="1", PGASDL_MPI_WINDOWS=windows
    )
    words = done.stdout + done.stderr
    assert done.returncode != 0, words
    stuck = r"rank 1 of 3 was lost, and rank [02] has been in MPI_\w+ since: MPI does not"
    assert re.search(f"rank 1 stopped|{stuck}", words), words
    # A process that ends inside a call of MPI leaves the library's own files.
    nothing_stays(words, 3, "/proc/")


def test_who_never_returns_from_mpi_ends(mpi: Row) -> None:
    """An atomic on a stopped rank: MPI would wait for the answer for ever, so the process ends.

    Unless the other survivor is outside of MPI when it learns of it: then it aborts the job first.
    """
    environ = {"PGASDL_STOPPED_AFTER": "1", "PGASDL_MPI_WINDOWS": "created"}
    done = mpi_jobs.start(mpi, 3, PROGRAM, "unanswered", timeout=60, **environ)
    words = done.stdout + done.stderr
    assert done.returncode != 0, words
    stuck = r"rank 1 of 3 was lost, and rank [02] has been in MPI_Fetch_and_op since: MPI does"
    assert re.search(f"rank 1 stopped|{stuck}", words), words
    nothing_stays(words, 3, "/proc/")


def test_who_stops_while_it_writes_keeps_nobody_elses_words_back(mpi: Row) -> None:
    environ = {"PGASDL_STOPPED_AFTER": "1", "PGASDL_MPI_WINDOWS": "created"}
    done = mpi_jobs.start(mpi, 3, PROGRAM, "writing", timeout=60, **environ)
    words = done.stdout + done.stderr
    assert done.returncode != 0, words
    assert "rank 1 stopped" in words, words
    assert not re.search("rank [02] stopped", words), words
    nothing_stays(words, 3, "/proc/")
