"""Ranks meet over any communicator, and MPI stays the program's own."""

from __future__ import annotations

import secrets
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mpi_jobs
import pytest
from support.mpi_rows import ROWS, Row, missing
from tiers import full

from pgasdl.config import Config
from pgasdl.errors import BootstrapError, ConfigError, UnavailableError
from pgasdl.runtime.bootstrap import Store
from pgasdl.runtime.launch.mpiexec import find
from pgasdl.runtime.mpi import meet

PROGRAM = mpi_jobs.PROGRAMS / "meet.py"
LEVELS = {"multiple": "3", "serialized": "2", "funneled": "1", "single": "0"}


@pytest.mark.parametrize("windows", full(["allocated", "created"], quick=1))
@pytest.mark.parametrize(
    ("way", "size"), full([("again", 2), ("late", 3), ("halves", 4), ("shm", 2)], quick=1)
)
def test_ways_in(mpi: Row, way: str, size: int, windows: str) -> None:
    (line,) = mpi_jobs.run(mpi, size, PROGRAM, way, PGASDL_MPI_WINDOWS=windows)
    mean = 0.5 if way == "halves" else (size - 1) / 2
    assert line.startswith(f"{way}: mean {mean}, thread level")


def test_beside_the_programs_own_messages(mpi: Row) -> None:
    (line,) = mpi_jobs.run(mpi, 2, PROGRAM, "beside")
    assert line.startswith("beside: mean 0.5")


@pytest.mark.parametrize("windows", full(["allocated", "created"], quick=1))
@pytest.mark.parametrize("level", full(["serialized", "funneled", "single"], quick=1))
def test_with_fewer_threads_allowed(mpi: Row, level: str, windows: str) -> None:
    """The same results where MPI may be called by one thread at a time, or by one only."""
    (line,) = mpi_jobs.run(
        mpi, 2, PROGRAM, "again", MPI4PY_RC_THREAD_LEVEL=level, PGASDL_MPI_WINDOWS=windows
    )
    assert line.startswith("again: mean 0.5, thread level ")
    # A library may grant more than was asked for.
    assert line.rpartition(" ")[2] >= LEVELS[level]


# The mpi4py of the other rows was built for one library.
@pytest.mark.parametrize(
    "mpi", full([name for name, row in ROWS.items() if not row.mpi4py], quick=1), indirect=True
)
def test_the_wrong_launcher_is_named(mpi: Row) -> None:
    """Processes of one MPI's launcher that load another MPI are each alone: the error says so."""
    other = next(name for name, row in ROWS.items() if row.kind != mpi.kind)
    if why := missing(other):
        pytest.skip(f"{other}: {why}")
    done = mpi_jobs.start(mpi, 2, PROGRAM, "again", MPI4PY_LIBMPI=ROWS[other].found().library)
    assert done.returncode != 0
    if "MPI_Init_thread" in done.stderr or "internal_Init_thread" in done.stderr:
        return  # the library itself refuses this launcher
    assert "this job has 2 ranks, but MPI" in done.stderr
    assert "MPI4PY_LIBMPI" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("mpi", ["debian_mpich"], indirect=True)
def test_a_library_that_mpi4py_does_not_load_is_refused(mpi: Row) -> None:
    """mpi4py's wheels do not know the name of this library."""
    done = mpi_jobs.start(replace(mpi, mpi4py=""), 2, PROGRAM, "again")
    assert done.returncode != 0
    assert "mpi4py's wheel asks for libmpi.so.12, which" in done.stderr
    assert "MPICC=mpicc.mpich pip install --no-binary mpi4py" in done.stderr


def test_a_launcher_that_is_none_is_refused() -> None:
    with pytest.raises(UnavailableError, match="no launcher of an MPI at /bin/true: known are mpi"):
        find("/bin/true")
    with pytest.raises(ConfigError, match="no MPI 'lam': mpich, openmpi, or the path of a"):
        find("lam")


class _Broadcast:
    """A communicator of two ranks; what rank 0 broadcasts, rank 1 gets in its turn."""

    def __init__(self) -> None:
        self.frame = b""

    def Bcast(self, message: list[Any], root: int) -> None:
        assert root == 0
        if self.frame:
            message[0][:] = self.frame
        else:
            self.frame = bytes(message[0])

    def meet(self, rank: int, secret: bytes | None) -> Store:
        state = SimpleNamespace(comm=self, place=(rank, 2, rank, 2))
        config = Config.from_environment(timeout=30.0)
        return meet._meet(SimpleNamespace(BYTE=None), state, config, secret)[1]  # type: ignore[arg-type]


def test_a_secret_that_the_ranks_have_does_not_travel() -> None:
    secret = secrets.token_bytes(32)
    for given in (secret, None):
        comm = _Broadcast()
        with comm.meet(0, given) as first, comm.meet(1, given) as second:
            first.put("key", b"value")
            assert second.get("key") == b"value" and first.token == second.token
        assert given is None or given.hex().encode() not in comm.frame
        assert (b'"secret": null' in comm.frame) == (given is not None)
    for one, other, who in ((secret, None, "rank 0 has"), (None, secret, "rank 1 has")):
        comm = _Broadcast()
        with comm.meet(0, one), pytest.raises(BootstrapError, match=f"{who} PGASDL_SECRET_FILE"):
            comm.meet(1, other)
    comm = _Broadcast()
    with comm.meet(0, secret), pytest.raises(BootstrapError, match="another secret"):
        comm.meet(1, secrets.token_bytes(32))
