"""MPI makes a window only while all members call it at once: a rank that comes late, in another
order, or not at all keeps no other rank inside MPI."""

from __future__ import annotations

import mpi_jobs
import pytest
from support.mpi_rows import Row
from test_mpi_failure import nothing_stays
from tiers import full

PROGRAM = mpi_jobs.PROGRAMS / "windows.py"


@pytest.mark.parametrize(
    ("way", "windows"),
    full(
        [
            (way, windows)
            for way in ("described", "went", "again", "never", "same", "overlapping", "freed")
            for windows in ("allocated", "created")
        ],
        quick=1,
    ),
)
def test_who_is_not_there(mpi: Row, way: str, windows: str) -> None:
    (line,) = mpi_jobs.run(mpi, 3, PROGRAM, way, PGASDL_MPI_WINDOWS=windows)
    assert line == "right"


@pytest.mark.full
@pytest.mark.parametrize("windows", ["allocated", "created"])
def test_a_rank_is_killed_amidst_windows(mpi: Row, windows: str) -> None:
    """The others end, whether the library lets them out of its calls or not."""
    done = mpi_jobs.start(mpi, 3, PROGRAM, "killed", PGASDL_MPI_WINDOWS=windows)
    assert done.returncode != 0
    nothing_stays(done.stdout + done.stderr, 3, "/proc/")
