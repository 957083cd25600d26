"""The backend of torch.distributed over MPI, mapped or not."""

from __future__ import annotations

import re
from pathlib import Path

import mpi_jobs
import pytest
from support.mpi_rows import Row
from tiers import full

pytest.importorskip("torch")


@pytest.mark.parametrize("windows", full(["created", "allocated"], quick=1))
def test_a_process_group(mpi: Row, windows: str, tmp_path: Path) -> None:
    program = mpi_jobs.TRAINING / "programs" / "process_group.py"
    variables = {"PGASDL_TRANSPORT": "mpi", "PGASDL_MPI_WINDOWS": windows}
    lines = mpi_jobs.run(mpi, 2, program, str(tmp_path / "store"), **variables)
    # Two ranks' lines may come as one, and both ends after them.
    said = re.findall(r"rank \d over \w+?(?=rank|$)", "".join(lines))
    assert sorted(said) == ["rank 0 over mpi", "rank 1 over mpi"], lines


@pytest.mark.full
@pytest.mark.parametrize("windows", ["created", "allocated"])
def test_groups_that_are_made_and_destroyed_leave_nothing(
    mpi: Row, windows: str, tmp_path: Path
) -> None:
    program = mpi_jobs.TRAINING / "programs" / "many_groups.py"
    variables = {"PGASDL_TRANSPORT": "mpi", "PGASDL_MPI_WINDOWS": windows}
    lines = mpi_jobs.run(mpi, 2, program, "60", str(tmp_path / "store"), **variables)
    assert "".join(lines).count("left nothing") == 2
