"""A rank that dies ends the others, with an error that names it, and nobody stays."""

from __future__ import annotations

import mpi_jobs
import pytest

PROGRAM = mpi_jobs.PROGRAMS / "one_dies.py"


@pytest.mark.parametrize("windows", ["allocated", "created"])
def test_a_killed_rank_is_named(kind: str, windows: str) -> None:
    done = mpi_jobs.start(kind, 3, PROGRAM, "killed", timeout=60, PGASDL_MPI_WINDOWS=windows)
    assert done.returncode != 0
    # Whoever comes to its end first aborts the job, and the launcher then ends the others.
    assert "rank 1 died" in done.stdout + done.stderr


def test_a_failing_rank_is_named(kind: str) -> None:
    done = mpi_jobs.start(kind, 3, PROGRAM, "fails", timeout=60)
    assert done.returncode != 0
    assert "ZeroDivisionError: on purpose" in done.stderr
