"""torch's symmetric memory and windows over MPI, mapped or not."""

from __future__ import annotations

import mpi_jobs
import pytest
from support.mpi_rows import Row
from tiers import full

pytest.importorskip("torch")


@pytest.mark.parametrize(("windows", "mapped"), full([("created", False), ("allocated", True)], 1))
def test_programs_in_torchs_words(mpi: Row, windows: str, mapped: bool) -> None:
    program = mpi_jobs.TRAINING / "programs" / "symmetric_memory.py"
    variables = {"PGASDL_TRANSPORT": "mpi", "PGASDL_MPI_WINDOWS": windows}
    lines = mpi_jobs.run(mpi, 2, program, **variables)
    assert lines == [f"2 ranks are right, mapped {mapped}"]
