"""Ranks meet over a communicator, whatever it is, and MPI stays the program's own."""

from __future__ import annotations

import mpi_jobs
import pytest

PROGRAM = mpi_jobs.PROGRAMS / "meet.py"
LEVELS = {"multiple": "3", "serialized": "2", "funneled": "1", "single": "0"}


@pytest.mark.parametrize("windows", ["allocated", "created"])
@pytest.mark.parametrize(("way", "size"), [("again", 2), ("late", 3), ("halves", 4), ("shm", 2)])
def test_ways_in(kind: str, way: str, size: int, windows: str) -> None:
    (line,) = mpi_jobs.run(kind, size, PROGRAM, way, PGASDL_MPI_WINDOWS=windows)
    mean = 0.5 if way == "halves" else (size - 1) / 2
    assert line.startswith(f"{way}: mean {mean}, thread level")


def test_beside_the_programs_own_messages(kind: str) -> None:
    (line,) = mpi_jobs.run(kind, 2, PROGRAM, "beside")
    assert line.startswith("beside: mean 0.5")


@pytest.mark.parametrize("windows", ["allocated", "created"])
@pytest.mark.parametrize("level", ["serialized", "funneled", "single"])
def test_with_fewer_threads_allowed(kind: str, level: str, windows: str) -> None:
    """The same results where MPI may be called by one thread at a time, or by one only."""
    (line,) = mpi_jobs.run(
        kind, 2, PROGRAM, "again", MPI4PY_RC_THREAD_LEVEL=level, PGASDL_MPI_WINDOWS=windows
    )
    assert line.startswith("again: mean 0.5, thread level ")
    # A library may grant more than was asked for.
    assert line.rpartition(" ")[2] >= LEVELS[level]


def test_the_wrong_launcher_is_named(kind: str) -> None:
    """Processes of one MPI's launcher that load another MPI are all alone: they are told so."""
    other = {"mpich": "openmpi", "openmpi": "mpich"}[kind]
    try:
        library = mpi_jobs.library(other)
    except Exception as error:  # the other one is not here
        pytest.skip(f"{other}: {error}")
    done = mpi_jobs.start(kind, 2, PROGRAM, "again", MPI4PY_LIBMPI=library)
    assert done.returncode != 0
    if "MPI_Init_thread" in done.stderr or "internal_Init_thread" in done.stderr:
        return  # the library itself refuses this launcher
    assert "this job has 2 ranks, but MPI" in done.stderr
    assert "MPI4PY_LIBMPI" in done.stderr
