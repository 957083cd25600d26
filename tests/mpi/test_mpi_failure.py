"""A rank that dies ends the others, with an error that names it, and nobody stays."""

from __future__ import annotations

import mpi_jobs
import pytest

PROGRAM = mpi_jobs.PROGRAMS / "one_dies.py"


@pytest.mark.parametrize("windows", ["allocated", "created"])
def test_a_killed_rank_is_named(kind: str, windows: str) -> None:
    done = mpi_jobs.start(kind, 3, PROGRAM, "killed", timeout=60, PGASDL_MPI_WINDOWS=windows)
    assert done.returncode != 0
    words = done.stdout + done.stderr
    # MPICH's launcher kills the others at once, and tells of the one that died itself.
    told = ("rank 1 died", "KILLED BY SIGNAL: 9", "Killed (signal 9)")
    assert any(word in words for word in (told if kind == "mpich" else told[:1])), words


def test_a_failing_rank_is_named(kind: str) -> None:
    done = mpi_jobs.start(kind, 3, PROGRAM, "fails", timeout=60)
    assert done.returncode != 0
    assert "ZeroDivisionError: on purpose" in done.stderr
