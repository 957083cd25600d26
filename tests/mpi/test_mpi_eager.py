"""Data that arrive for a segment while its owner still makes it are there once it is made."""

from __future__ import annotations

import mpi_jobs
import pytest
from support.mpi_rows import Row

pytestmark = pytest.mark.full

PROGRAM = mpi_jobs.PROGRAMS / "eager.py"


@pytest.mark.parametrize("size", [2, 3])
def test_nothing_is_lost_while_a_segment_is_made(mpi: Row, size: int) -> None:
    (line,) = mpi_jobs.run(mpi, size, PROGRAM, "100", timeout=300, PGASDL_MPI_WINDOWS="created")
    assert line == "right"
